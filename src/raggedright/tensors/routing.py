"""Experts of a mixture-of-experts model: recording and replaying the routers' choices, and the balance of their load.

Replay keeps only the choice of experts: the recorded experts are weighted by the current router's logits, so that
gradients reach the router as usual. A position without a record is routed naturally. Invariant: replaying the experts
that the model would have chosen anyway changes no bit. This is tested, not assumed: each router is run on random
numbers, and a router is refused if none of the rules here derives its weights from its logits and its choice.
Hooks are registered only inside the `with` statements. Activation checkpointing runs the routers again in the backward
pass, which must therefore be inside as well.

The usual balance loss is a product of two means over a batch, `experts x sum_e f_e P_e`, and does not add up over
micro-batches. Here the fractions f_e of a step are counted from the recorded routing of all its rows before the first
backward pass; then P_e, the mean router probability, is a sum over tokens like every other loss. 1 is perfect balance;
all layers have the same weight. The tokens that count are those of real rows that were routed in the rollout. Tokens
that were never routed are at a row's end, after its last loss token. Padding rows have a routing but do not count.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from raggedright.errors import ConfigError, RowsError
from raggedright.plan.cut import Step
from raggedright.tensors.losses import Sums

if TYPE_CHECKING:  # these modules import NOT_ROUTED
    from raggedright.tensors.collate import MicroBatch
    from raggedright.tensors.tensor_batch import TensorBatch

NOT_ROUTED = -1
"""The expert number at a position that was never routed."""

Rule = Callable[[Tensor, Tensor], Tensor]  # weights of chosen experts [N, topk], from logits [N, experts] and choice
_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # in configs
_NUM_TEST_TOKENS = 64


def routing_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype for expert numbers that can also hold NOT_ROUTED."""
    return next(t for t in (torch.int8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(t).max)


def fill_up(experts: Tensor, length: int) -> Tensor:
    """A row's experts, with NOT_ROUTED for the tokens at its end that no pass has read."""
    filled = experts.new_full((length, *experts.shape[1:]), NOT_ROUTED)
    filled[: len(experts)] = experts
    return filled


def is_routed(experts: Tensor) -> Tensor:
    """Which positions of [..., topk] have a record."""
    return (experts != NOT_ROUTED).all(-1)


class Routers:
    """A model's routers in the order of its layers; make one with `find_routers`."""

    def __init__(self, modules: list[nn.Module], rule: Rule, num_experts: int, topk: int) -> None:
        self._modules, self._rule = modules, rule
        self.num_layers, self.num_experts, self.topk = len(modules), num_experts, topk

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Record the experts of the pass inside; the yielded function returns them flat, [tokens, layers, topk]."""
        chosen: list[Tensor] = []

        def record(_layer: int, _router: nn.Module, _inputs: object, output: Sequence[Tensor]) -> None:
            chosen.append(output[2])

        with self._hooked(record):
            yield lambda: torch.stack(chosen, dim=1).to(routing_dtype(self.num_experts))

    @contextmanager
    def replaying(self, routing: Tensor | None) -> Iterator[list[Tensor]]:
        """Choose recorded experts, [..., layers, topk] over the pass's tokens, in all passes inside.

        After the first pass, the yielded list has the logits of each layer, with their graph. Without a routing, all
        tokens are routed naturally.
        """
        recorded = None if routing is None else self.by_layer(routing)
        logits: list[Tensor] = []

        def replay(
            layer: int, _router: nn.Module, _inputs: object, output: Sequence[Tensor]
        ) -> tuple[Tensor, Tensor, Tensor] | None:
            layer_logits, weights, natural = output
            if layer == len(logits):  # not when activations are recomputed
                logits.append(layer_logits)
            if recorded is None:
                return None
            chosen = torch.where(is_routed(recorded[layer])[:, None], recorded[layer], natural)
            return layer_logits, self._rule(layer_logits, chosen).to(weights.dtype), chosen

        with self._hooked(replay):
            yield logits

    @contextmanager
    def _hooked(self, hook: Callable[[int, nn.Module, object, Sequence[Tensor]], object]) -> Iterator[None]:
        handles = [module.register_forward_hook(partial(hook, layer)) for layer, module in enumerate(self._modules)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def by_layer(self, routing: Tensor) -> list[Tensor]:
        """A routing [..., layers, topk] as one flat [tokens, topk] per layer."""
        if routing.shape[-2:] != (self.num_layers, self.topk):
            raise RowsError(
                f"routed_experts has {tuple(routing.shape[-2:])} layers and experts per token and the model "
                f"{(self.num_layers, self.topk)}; they were recorded with another model"
            )
        return list(routing.flatten(0, -3).unbind(1))


def find_routers(model: nn.Module) -> Routers | None:
    """The routers of a model, None if it has no experts; a ConfigError if no rule here describes them."""
    modules = _router_modules(model)
    if not modules:
        return None
    described = {type(module).__name__: _describe(module) for module in modules}
    unknown = [name for name, description in described.items() if description is None]
    known = [description for description in described.values() if description is not None]
    if unknown:
        raise _refusal(model, f"{unknown[0]} does not weigh its experts by a softmax over its logits")
    if len(set(known)) > 1:
        raise _refusal(model, "layers differ in their number of experts, or in how they choose them")
    return Routers(modules, *known[0])


def _refusal(model: nn.Module, why: str) -> ConfigError:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return ConfigError(
        f"the experts of model type {kind!r} cannot be recorded or replayed: {why}; "
        "set experts.replay = false and experts.balance_coef = 0"
    )


def _router_modules(model: nn.Module) -> list[nn.Module]:
    """The modules from which transformers itself takes router logits."""
    recorders = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
            recorders += recorder if isinstance(recorder, list | tuple) else [recorder]
    kinds = {getattr(recorder, "target_class", recorder) for recorder in recorders}
    if kinds:
        return [module for module in model.modules() if type(module) in kinds]
    config = getattr(model, "config", None)
    text = config.get_text_config() if isinstance(model, PreTrainedModel) and config is not None else None
    counts = [count for name in _COUNT_NAMES if isinstance(count := getattr(text, name, None), int)]
    if max(counts, default=0) > 1:
        raise _refusal(model, "transformers does not say which of its modules are routers")
    return []


def _describe(router: nn.Module) -> tuple[Rule, int, int] | None:
    """The rule of a router, its number of experts and how many it chooses per token.

    The router is also run in float32, because rounding to half precision hides differences between the rules.
    """
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    outputs = [_test_output(router, weight, dtype) for dtype in {torch.float32, weight.dtype}]
    for rule in _RULES:
        if all(out is not None and torch.equal(rule(out[0], out[2]).to(out[1].dtype), out[1]) for out in outputs):
            assert outputs[0] is not None
            return rule, len(weight), outputs[0][2].shape[1]
    return None


@torch.no_grad()
def _test_output(router: nn.Module, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
    """Logits, weights and choice of a router for random tokens, or None if it returns something else.

    The router's parameters are random, too: its own may be sharded, or all zero.
    """
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight.device, dtype)

    parameters = {name: numbers(*parameter.shape) for name, parameter in router.named_parameters()}
    parameters["weight"] = 2 * parameters["weight"] / weight.shape[1] ** 0.5
    try:
        output = functional_call(router, parameters, (numbers(_NUM_TEST_TOKENS, weight.shape[1]),))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes other inputs
        return None
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(part, Tensor) for part in output):
        return None
    logits, weights, chosen = output
    fits = chosen.dtype is torch.int64 and chosen.shape == weights.shape and chosen.dim() == 2
    return (logits, weights, chosen) if fits and logits.shape == (_NUM_TEST_TOKENS, len(weight)) else None


def _softmax_of_all(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)


def _share_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    weights = _softmax_of_all(logits, chosen)
    return weights / weights.sum(dim=-1, keepdim=True)


def _softmax_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.softmax(logits.gather(-1, chosen), dim=-1)


_RULES: tuple[Rule, ...] = (_softmax_of_all, _share_of_chosen, _softmax_of_chosen)


def routings_of(batch: "TensorBatch", step: Step, dp_rank: int) -> Iterator[Tensor]:
    """The recorded routings of a rank's real rows in a step."""
    for slot in range(step.num_slots):
        for position in step.micro_batch(dp_rank, slot):
            experts = batch.fields[position].get("routed_experts")
            if position < len(batch.plan.rows) and isinstance(experts, Tensor):
                yield experts


def count_experts(routings: Iterable[Tensor], routers: Routers) -> Tensor:
    """How often each expert of each layer was chosen, [layers, experts]; routings are [tokens, layers, topk]."""
    counts = torch.zeros(routers.num_layers, routers.num_experts, dtype=torch.float64)
    recorded = list(routings)
    if not recorded:
        return counts
    for layer, experts in enumerate(routers.by_layer(torch.cat(recorded))):
        chosen = experts[is_routed(experts)].long().flatten()
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < routers.num_experts:
            raise RowsError(
                f"routed_experts names experts {int(chosen.min())} to {int(chosen.max())} and the model has "
                f"{routers.num_experts}, from 0; they were recorded with another model"
            )
        counts[layer] = torch.bincount(chosen, minlength=routers.num_experts)
    return counts


def balance_loss(logits: Sequence[Tensor], micro: "MicroBatch", counts: Tensor, routers: Routers) -> Sums:
    """A micro-batch's share of a step's balance loss; `logits` are [tokens, experts] by layer, `counts` the step's."""
    choices = counts.sum(1, keepdim=True).clamp(min=1)
    weights = counts / choices * (routers.num_experts * routers.topk / routers.num_layers) / choices
    total = counts.new_zeros(())
    if micro.routing is not None and micro.real is not None:
        real = micro.real.flatten()
        for layer_logits, experts, expert_weights in zip(logits, routers.by_layer(micro.routing), weights, strict=True):
            counts_here = (is_routed(experts) & real)[:, None]
            raised = layer_logits.to(torch.promote_types(layer_logits.dtype, torch.float32))
            probabilities = torch.softmax(torch.where(counts_here, raised, 0.0), dim=-1)
            total = total + torch.where(counts_here, probabilities * expert_weights, 0.0).sum()
    return Sums(total, {"actor/balance_loss": total.detach().double()})


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Means over steps, from counts [steps, layers, experts]. A load of 1 is an expert's fair share of the choices."""
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
