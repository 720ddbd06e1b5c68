"""`cut = "equal-rows"`: steps for engines that form micro-batches themselves and require equal row counts (verl).

Such an engine divides a rank's rows into equal mini-batches, one per step, and each mini-batch into micro-batches. So
a step here has one slot and the same number of rows on every rank, and all steps have the same size.

- `align = "steps"`: the configured number of steps, padded to a multiple of ranks x `rows_multiple`.
- `align = "lcm"`: at least mini_batch_size x rollout_n rows per step.

Invariants: every real row is in one step per role and epoch; the numbers of real rows, and of rows with loss tokens,
differ by at most one between steps; no step has padding alone (there are never more steps than rows with loss
tokens, except for one step if there are none); ranks have about equal costs within each step.

Note: a step may hold part of a prompt. Steps of whole prompts would need more padding rows than there are ranks.
"""

import numpy as np

from raggedright.arrays import Ints
from raggedright.plan.assign import assign_rows, num_steps, token_weights
from raggedright.plan.cut import Step, make_step
from raggedright.plan.layout import Layout, RoleLayout
from raggedright.plan.level import costliest_first
from raggedright.plan.micro_batches import row_costs
from raggedright.rows import Rows


def equal_rows_steps(
    rows: Rows, planned: Ints, layout: Layout, role: RoleLayout, *, multiple: int | None, trains: bool = True
) -> list[Step]:
    """The steps of a role over all epochs; for a role that does not train, one step for its forward pass."""
    steps, dp_size = [], role.dp_size
    for epoch in range(layout.epochs if trains else 1):
        step_of_row, count = _assign_steps(rows, planned, layout, role, multiple if trains else None, trains, epoch)
        weights = token_weights(rows, role.loss_agg, step=step_of_row, loss_norm_tokens=role.loss_norm_tokens)
        size = int(np.bincount(step_of_row[planned], minlength=count).max(initial=1))
        if trains and multiple is not None:
            size = max(size, role.mini_batch_size * layout.rollout_n)
        equal = dp_size * role.rows_multiple
        size = equal * -(-size // equal)
        first_padding = len(rows)
        for number in range(count):
            row = planned[step_of_row[planned] == number]
            num_padding = size - len(row)
            lengths = np.append(rows.tokens[row], np.zeros(num_padding, dtype=np.int64))
            costs = row_costs(np.maximum(lengths, layout.min_row_tokens), layout)
            row = np.append(row, first_padding + np.arange(num_padding))
            first_padding += num_padding
            ones = np.ones(size, dtype=np.int64)
            rank = costliest_first(ones, costs, np.array([size]), np.array([dp_size]), size // dp_size)
            steps.append(make_step(row, rank, 1, dp_size, epoch).weighed(weights))
    return steps


def join_ranks(steps: list[Step]) -> Step:
    """All steps as one forward pass; each row stays on its rank."""
    row, rank = (np.concatenate(arrays) for arrays in zip(*((s.row, s.micro_batch_index) for s in steps), strict=True))
    return make_step(row, rank, 1, steps[0].dp_size, epoch=0)


def _assign_steps(
    rows: Rows, planned: Ints, layout: Layout, role: RoleLayout, multiple: int | None, trains: bool, epoch: int
) -> tuple[Ints, int]:
    """The step of each row (-1 if it is not planned), and the number of steps.

    Rows with loss tokens are spread evenly; the others fill up the steps with the fewest rows.
    """
    if not trains:
        count = 1
    elif multiple is None:
        count = num_steps(layout, role.mini_batch_size)
    else:
        count = multiple * -(-len(planned) // multiple) // (role.mini_batch_size * layout.rollout_n)
    has_loss = rows.loss_tokens[planned] > 0
    with_loss, without = planned[has_loss], planned[~has_loss]
    count = max(1, min(count, len(with_loss)))
    step_of_row = assign_rows(rows, with_loss, count, seed=layout.seed, epoch=epoch)
    sizes = np.bincount(step_of_row[with_loss], minlength=count)
    smaller = np.flatnonzero(sizes < sizes.max())
    places = np.append(smaller, np.tile(np.arange(count), -(-len(without) // count)))
    step_of_row[without[np.argsort(rows.order[without])]] = places[: len(without)]
    return step_of_row, count
