"""What a plan costs and how level it is, padding included.

`rank` compares the dearest rank of each step with the mean rank; `slot` compares the dearest micro-batch of each
slot with the mean one, which is the time lost when ranks run in lock-step. 1.0 is the limit of both.
"""

from dataclasses import dataclass

from raggedright.arrays import Ints
from raggedright.plan.cut import Step
from raggedright.plan.micro_batches import micro_batch_costs, micro_batch_tokens
from raggedright.plan.plan import Plan, Role


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Cost over the mean, for ranks that meet once a step and for ranks that meet in every slot."""

    rank: float
    slot: float


def tokens_of(plan: Plan, step: Step) -> Ints:
    """Tokens of each micro-batch as collated, [dp_size, num_slots]."""
    tokens = micro_batch_tokens(step.bins, plan.lengths[step.row], step.num_micro_batches, plan.layout)
    return tokens.reshape(step.dp_size, step.num_slots)


def costs_of(plan: Plan, step: Step) -> Ints:
    """Cost of each micro-batch as collated, [dp_size, num_slots]."""
    costs = micro_batch_costs(step.bins, plan.lengths[step.row], step.num_micro_batches, plan.layout)
    return costs.reshape(step.dp_size, step.num_slots)


def measure_imbalance(plan: Plan, role: Role | None = None) -> Imbalance:
    """Imbalance over all steps of a role, by default the first that trains."""
    steps = plan.steps(role or plan.trained_roles[0])
    costs = [costs_of(plan, step) for step in steps if not step.skipped]
    total = sum(int(cost.sum()) for cost in costs)
    if total == 0:
        return Imbalance(1.0, 1.0)
    mean = total / plan.layout.dp_size
    rank = sum(int(cost.sum(axis=1).max()) for cost in costs)
    slot = sum(int(cost.max(axis=0).sum()) for cost in costs)
    return Imbalance(rank / mean, slot / mean)
