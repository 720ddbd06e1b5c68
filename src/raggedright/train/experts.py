"""What a run does with the routing that its rollouts recorded: the actor replays it, and its load is kept in balance.

Reference and critic route naturally: they are other models, and no rollout was theirs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raggedright.config.sections import Experts
from raggedright.errors import ConfigError
from raggedright.plan.cut import Step
from raggedright.tensors.balance import balance_loss, count_experts, routings_of
from raggedright.tensors.batch import TensorBatch
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.losses import Sums
from raggedright.tensors.routing import Routers, find_routers
from raggedright.train.world import World


@dataclass(frozen=True, slots=True, eq=False)
class ActorExperts:
    """The actor's routers and what the config asks of them; make one with `actor_experts`."""

    routers: Routers
    config: Experts

    def count(self, batch: TensorBatch, steps: Sequence[Step], world: World) -> Tensor:
        """How many choices fell on each expert in each step, [steps, layers, experts], over all ranks."""
        counts = torch.zeros(len(steps), self.routers.num_layers, self.routers.num_experts, dtype=torch.float64)
        for i, step in enumerate(steps):
            if not step.skipped:
                counts[i] = count_experts(routings_of(batch, step, world.dp_rank), self.routers)
        return world.sum(counts.to(world.device))

    def with_balance(self, sums: Sums, logits: Sequence[Tensor], micro: MicroBatch, counts: Tensor) -> Sums:
        """The loss with the balance loss, if there is one."""
        if not self.config.balance_coef:
            return sums
        balance = balance_loss(logits, micro, counts, self.routers)
        return Sums(sums.loss + self.config.balance_coef * balance.loss, sums.metrics | balance.metrics)


def actor_experts(model: nn.Module, config: Experts) -> ActorExperts | None:
    """None for a model without experts, and where the config wants nothing of them."""
    if not config.replay and not config.balance_coef:
        return None
    routers = find_routers(model)
    if routers is None and config.balance_coef:
        raise ConfigError(f"experts.balance_coef is {config.balance_coef:g} and the model has no experts; set it to 0")
    return None if routers is None else ActorExperts(routers, config)


@contextmanager
def replaying(experts: ActorExperts | None, micro: MicroBatch) -> Iterator[Sequence[Tensor]]:
    """The actor's passes inside, backward passes too, choose the recorded experts; the routers' logits by layer."""
    if experts is None:
        yield ()
        return
    with experts.routers.replaying(micro.routing if experts.config.replay else None) as logits:
        yield logits
