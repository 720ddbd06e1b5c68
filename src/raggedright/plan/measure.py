"""What a plan costs and how level it is, padding included.

`rank` compares the dearest rank of each step with the mean rank; `slot` compares the dearest micro-batch of each
slot with the mean one, which is the time lost when ranks run in lock-step. 1.0 is the limit of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from raggedright.arrays import Ints
from raggedright.plan.cut import Step
from raggedright.plan.layout import Layout
from raggedright.plan.micro_batches import micro_batch_costs, micro_batch_tokens
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
    return imbalance_of(plan.steps(role or plan.trained_roles[0]), plan.lengths, plan.layout)


def imbalance_of(steps: Sequence[Step], lengths: Ints, layout: Layout) -> Imbalance:
    """Imbalance over the steps that run; `lengths` has the tokens of every row and padding row as collated."""
    total = rank = slot = 0
    for step in steps:
        if step.skipped:
            continue
        costs = micro_batch_costs(step.micro_batch_index, lengths[step.row], step.num_micro_batches, layout)
        costs = costs.reshape(step.dp_size, step.num_slots)
        total += int(costs.sum())
        rank += int(costs.sum(axis=1).max(initial=0))
        slot += int(costs.max(axis=0).sum()) if step.num_slots else 0
    return Imbalance(rank * layout.dp_size / total, slot * layout.dp_size / total) if total else Imbalance(1.0, 1.0)
