"""Load of experts: the balance loss as a token sum, and how evenly a step's tokens are spread.

The usual loss is a product of two means over a batch, `experts x sum_e f_e P_e`, and does not add up over cuts of it.
Here a step's fractions f_e are counted from the recorded routing of all its rows before any backward; then P_e, the
mean router probability, is a sum over tokens like all else. 1 is perfect balance; layers count alike.

The tokens that count, in fractions, loss and metrics, are those of real rows that the rollout routed. What it never
routed stands at a row's end, behind its last loss token, where no loss sees it. Padding rows have a routing and no say.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from raggedright.errors import RowsError
from raggedright.plan.cut import Step
from raggedright.tensors.batch import TensorBatch
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.losses import Sums
from raggedright.tensors.routing import Routers, is_routed


def routings_of(batch: TensorBatch, step: Step, dp_rank: int) -> Iterator[Tensor]:
    """The recorded routings of a rank's real rows in a step."""
    for slot in range(step.num_slots):
        for position in step.micro_batch(dp_rank, slot):
            experts = batch.fields[position].get("routed_experts")
            if position < len(batch.plan.rows) and isinstance(experts, Tensor):
                yield experts


def count_experts(routings: Iterable[Tensor], routers: Routers) -> Tensor:
    """How many choices fell on each expert of each layer, [layers, experts]; routings are [tokens, layers, topk]."""
    counts = torch.zeros(routers.num_layers, routers.num_experts, dtype=torch.float64)
    given = list(routings)
    if not given:
        return counts
    for layer, experts in enumerate(routers.of_layers(torch.cat(given))):
        chosen = experts[is_routed(experts)].long().flatten()
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < routers.num_experts:
            raise RowsError(
                f"routed_experts names experts {int(chosen.min())} to {int(chosen.max())} and the model has "
                f"{routers.num_experts}, from 0; they were recorded with another model"
            )
        counts[layer] = torch.bincount(chosen, minlength=routers.num_experts)
    return counts


def balance_loss(logits: Sequence[Tensor], micro: MicroBatch, counts: Tensor, routers: Routers) -> Sums:
    """A micro-batch's share of the step's balance loss; `logits` [tokens, experts] by layer, `counts` of the step."""
    choices = counts.sum(1, keepdim=True).clamp(min=1)
    worth = counts / choices * (routers.num_experts * routers.topk / routers.num_layers) / choices  # of probability
    total = counts.new_zeros(())
    if micro.routing is not None and micro.real is not None:
        real = micro.real.flatten()
        for of_layer, experts, of_expert in zip(logits, routers.of_layers(micro.routing), worth, strict=True):
            counted = (is_routed(experts) & real)[:, None]
            raised = of_layer.to(torch.promote_types(of_layer.dtype, torch.float32))
            probabilities = torch.softmax(torch.where(counted, raised, 0.0), dim=-1)
            total = total + torch.where(counted, probabilities * of_expert, 0.0).sum()
    return Sums(total, {"actor/balance_loss": total.detach().double()})


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Of counts [steps, layers, experts]: means over steps. A load of 1 is an expert's fair share of the choices."""
    choices = counts.sum(-1, keepdim=True)
    counts = counts[(choices > 0).flatten(1).all(1)]  # steps that have recorded routings
    if not len(counts):
        return {}
    load = counts / counts.sum(-1, keepdim=True) * counts.shape[-1]
    return {
        "actor/experts/load_max": float(load.amax((1, 2)).mean()),
        "actor/experts/load_min": float(load.amin((1, 2)).mean()),
        "actor/experts/dead": float((load == 0).double().mean()),
    }
