"""Which row goes to which mini-batch and rank, as verl's workers can take it: equal row counts everywhere.

verl cuts a rank's rows into `num_mini_batch` equal parts and each part into micro-batches by itself. So a step here
has one slot, the same number of rows on every rank and in every step. `align = "steps"`: the configured number of
steps, padded to dp x steps (x verl's fixed micro-batch size, if any). `align = "lcm"`: verl's own row count a step.

Invariants: every real row once a role; rows with loss tokens, and all real rows, spread over the steps to one
row; no step on padding alone (there are never more steps than rows with loss tokens); ranks level within each
step. The surprise: a step may hold part of a prompt, since whole prompts would need more padding rows than there are
ranks.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from raggedright.arrays import Ints, offsets
from raggedright.integrations.verl.options import VerlLossAgg
from raggedright.plan.cut import Step
from raggedright.plan.deal import deal_rows, num_steps
from raggedright.plan.layout import Layout, LossAgg
from raggedright.plan.micro_batches import row_costs
from raggedright.plan.plan import Plan, Role
from raggedright.plan.weights import token_weights
from raggedright.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How a role's rows are cut: its ranks, its mini-batch in prompts, and how its loss weighs tokens."""

    dp_size: int
    mini_batch_size: int
    rows_multiple: int = 1
    trains: bool = True
    loss_agg: VerlLossAgg = "token-mean"
    loss_norm_tokens: int | None = None


def make_verl_plan(rows: Rows, layout: Layout, actor: Grid, critic: Grid | None = None) -> Plan:
    """The plan of a batch of real rows; `actor` has one step for its forward passes while the critic warms up."""
    lengths = np.maximum(rows.tokens, layout.min_row_tokens)
    trained = [grid for grid in (actor, critic) if grid is not None and grid.trains]
    multiple = None
    if layout.align == "lcm":
        sizes = [grid.mini_batch_size * layout.rollout_n for grid in trained]
        multiple = math.lcm(*sizes, *(grid.dp_size for grid in (actor, critic) if grid is not None))
    roles: dict[Role, tuple[Step, ...]] = {}
    forward = _steps(rows, lengths, layout, actor, multiple)
    if actor.trains:
        roles["actor"] = forward
    if critic is not None:
        roles["critic"] = _steps(rows, lengths, layout, critic, multiple)
    roles["forward"] = (_join(forward),)
    return Plan(rows, layout, roles, np.empty(0, dtype=np.int64), multiple)


def step_of_row(steps: tuple[Step, ...], num_rows: int) -> Ints:
    """The step that each real row is in."""
    step = np.full(num_rows, -1, dtype=np.int64)
    for number, cut in enumerate(steps):
        step[cut.row[cut.row < num_rows]] = number
    return step


def by_rank(steps: tuple[Step, ...]) -> Ints:
    """All positions of a role in the order that verl dispatches: rank by rank, and step by step within a rank."""
    return np.concatenate([step.micro_batch(dp_rank, 0) for dp_rank in range(steps[0].dp_size) for step in steps])


def weigh(rows: Rows, grid: Grid, step: Ints) -> np.ndarray:
    """Weight of each row's loss tokens; `token-sum`, which is verl's alone, weighs each of them 1."""
    if grid.loss_agg == "token-sum":
        return ((rows.loss_tokens > 0) & (step >= 0)).astype(np.float64)
    loss_agg: LossAgg = grid.loss_agg
    return token_weights(rows, loss_agg, step=step, loss_norm_tokens=grid.loss_norm_tokens)


def _steps(rows: Rows, lengths: Ints, layout: Layout, grid: Grid, multiple: int | None) -> tuple[Step, ...]:
    num_trainable = int((rows.loss_tokens > 0).sum())
    if not grid.trains:
        count, rows_per_step = 1, 0
    elif multiple is None:
        count, rows_per_step = num_steps(layout, grid.mini_batch_size), 0
    else:
        rows_per_step = grid.mini_batch_size * layout.rollout_n
        count = multiple * -(-len(rows) // multiple) // rows_per_step
    count = max(1, min(count, num_trainable))
    step = _deal(rows, count, layout)
    equal = grid.dp_size * grid.rows_multiple
    size = max(rows_per_step, equal * -(-int(np.bincount(step, minlength=count).max(initial=0)) // equal), equal)
    weights = weigh(rows, grid, step)
    steps, first_padding = [], len(rows)
    for number in range(count):
        row = np.flatnonzero(step == number)
        row = row[np.lexsort((rows.order[row], -lengths[row]))]
        missing = size - len(row)
        row = np.append(row, first_padding + np.arange(missing))
        first_padding += missing
        length = np.append(lengths, np.full(first_padding - len(rows), layout.min_row_tokens))[row]
        ranks = _level(row, row_costs(length, layout), grid.dp_size)
        steps.append(_one_slot(ranks).weighed(weights))
    return tuple(steps)


def _deal(rows: Rows, count: int, layout: Layout) -> Ints:
    """The step of each row: those with loss tokens evenly, then the others to the steps with the fewest rows."""
    has_loss = rows.loss_tokens > 0
    with_loss, without = np.flatnonzero(has_loss), np.flatnonzero(~has_loss)
    step = deal_rows(rows, with_loss, count, seed=layout.seed, epoch=0)
    sizes = np.bincount(step[with_loss], minlength=count)
    behind = np.flatnonzero(sizes < sizes.max())
    places = np.append(behind, np.tile(np.arange(count), -(-len(without) // count)))
    step[without[np.argsort(rows.order[without])]] = places[: len(without)]
    return step


def _level(row: Ints, costs: Ints, dp_size: int) -> list[Ints]:
    """Rows (in descending cost) to ranks in equal numbers, each to the rank with the least so far that has room."""
    room = len(row) // dp_size
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    least = [(0, dp_rank) for dp_rank in range(dp_size)]
    for position, cost in zip(row.tolist(), costs.tolist(), strict=True):
        load, dp_rank = least[0]
        ranks[dp_rank].append(position)
        if len(ranks[dp_rank]) < room:
            heapq.heapreplace(least, (load + cost, dp_rank))
        else:
            heapq.heappop(least)
    return [np.array(rank, dtype=np.int64) for rank in ranks]


def _one_slot(ranks: list[Ints]) -> Step:
    row = np.concatenate(ranks)
    return Step(0, len(ranks), 1, row, np.zeros(len(row)), offsets(np.array([len(rank) for rank in ranks])))


def _join(steps: tuple[Step, ...]) -> Step:
    """All steps as one forward pass on the same ranks."""
    ranks = range(steps[0].dp_size)
    return _one_slot([np.concatenate([step.micro_batch(dp_rank, 0) for step in steps]) for dp_rank in ranks])
