"""What a plan costs and how level it is, padding included.

`rank` compares the dearest rank of each step with the mean rank; `slot` compares the dearest micro-batch of each
slot with the mean one, which is the time lost when ranks run in lock-step. 1.0 is the limit of both. The cost of a
tree is a guess (`kin`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from raggedright.arrays import Ints
from raggedright.plan.cut import Step, costs_of
from raggedright.plan.micro_batches import micro_batch_tokens
from raggedright.plan.plan import Plan, Role


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Cost over the mean, for ranks that meet once a step and for ranks that meet in every slot."""

    rank: float
    slot: float


def tokens_of(plan: Plan, step: Step) -> Ints:
    """Tokens of each micro-batch as collated, [dp_size, num_slots]."""
    tokens = micro_batch_tokens(step.micro_batch_index, plan.lengths[step.row], step.num_micro_batches, plan.layout)
    return tokens.reshape(step.dp_size, step.num_slots)


def measure_imbalance(plan: Plan, role: Role | None = None) -> Imbalance:
    """Imbalance over all steps of a role, by default the first that trains."""
    return imbalance_of(plan.steps(role or plan.trained_roles[0]), plan)


def imbalance_of(steps: Sequence[Step], plan: Plan) -> Imbalance:
    """Imbalance over the steps that run, of rows and padding rows of a plan."""
    dp_size = plan.layout.dp_size
    total = rank = slot = 0
    for step in steps:
        if step.skipped:
            continue
        costs = costs_of(step, plan.lengths, plan.layout, plan.kin)
        total += int(costs.sum())
        rank += int(costs.sum(axis=1).max(initial=0))
        slot += int(costs.max(axis=0).sum()) if step.num_slots else 0
    return Imbalance(rank * dp_size / total, slot * dp_size / total) if total else Imbalance(1.0, 1.0)
