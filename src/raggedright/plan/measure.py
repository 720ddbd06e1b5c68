"""What a plan costs and how level it is, padding included, and what the rules of other trainers would do instead.

`Imbalance.rank` compares the slowest rank of each step with the mean rank; `Imbalance.slot` compares the most expensive
micro-batch of each slot with the mean one, which is the time lost when ranks run in lock-step. 1.0 is the optimum of
both. The cost of a tree is a guess (see `prefix_groups`).

`compare_rules` applies every alignment to the same rows. The rules of other trainers bring the row count to a multiple
of what `align = "lcm"` requires, then cut the rows, in the order in which they arrived, into mini-batches and ranks:

    drop the remainder  rows after the last full multiple are lost
    copy rows           the first rows are trained a second time to fill the last multiple
    pad at the end      padding rows fill it, so the last steps may have one real row or none

Micro-batches are cut by our own packer in all of them, so only the alignment differs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raggedright.arrays import Ints
from raggedright.plan.assign import lcm_multiple
from raggedright.plan.cut import Step, costs_of, cut_by_rank
from raggedright.plan.layout import Layout
from raggedright.plan.micro_batches import micro_batch_tokens
from raggedright.plan.planner import Plan, Role, make_plan
from raggedright.rows import Rows


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Cost divided by the mean, for ranks that synchronize once per step and for ranks that do so in every slot."""

    rank: float
    slot: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The outcome of one rule on a batch, for the first role that trains, over one epoch."""

    rule: str
    padding_rows: int
    padding_tokens: int
    lost_rows: int
    copied_rows: int
    steps: int
    fewest_rows: int  # real rows in the step that has fewest
    imbalance: Imbalance


def tokens_of(plan: Plan, step: Step) -> Ints:
    """Tokens of each micro-batch as collated, [dp_size, num_slots]."""
    tokens = micro_batch_tokens(step.micro_batch_index, plan.lengths[step.row], step.num_micro_batches, plan.layout)
    return tokens.reshape(step.dp_size, step.num_slots)


def measure_imbalance(plan: Plan, role: Role | None = None) -> Imbalance:
    """Imbalance over all steps of a role, by default the first that trains."""
    return _imbalance(plan.steps(role or plan.trained_roles[0]), plan)


def _imbalance(steps: Sequence[Step], plan: Plan) -> Imbalance:
    """Imbalance over the steps that are not skipped."""
    dp_size = plan.layout.dp_size
    total = rank = slot = 0
    for step in steps:
        if step.skipped:
            continue
        costs = costs_of(step, plan.lengths, plan.layout, plan.prefix_groups)
        total += int(costs.sum())
        rank += int(costs.sum(axis=1).max(initial=0))
        slot += int(costs.max(axis=0).sum()) if step.num_slots else 0
    return Imbalance(rank * dp_size / total, slot * dp_size / total) if total else Imbalance(1.0, 1.0)


def compare_rules(
    rows: Rows, layout: Layout, *, plan: Plan | None = None, report: Callable[[str, int, int], None] | None = None
) -> list[WhatIf]:
    """The outcome of each rule; the two alignments of `Layout` come first.

    An existing `plan` of these rows is used where its layout fits. `report` is called with the current rule, the number
    of rows that it has aligned so far, and their total.
    """
    report = report or (lambda rule, done, total: None)
    layout = replace(layout, epochs=1)
    plans = []
    for align in ("steps", "lcm"):
        report(f"align {align}", 0, 1)
        aligned = replace(layout, align=align)
        plans.append(plan if plan is not None and plan.layout == aligned else make_plan(rows, aligned))
    outcomes = [_outcome(f"align {plan.layout.align}", plan.steps(plan.trained_roles[0]), plan) for plan in plans]
    cuts: dict[bytes, Step] = {}  # of mini-batches that several rules have in common
    return [*outcomes, *(_apply_rule(rule, plans[1], cuts, report) for rule in RULES)]


def _drop_remainder(row: Ints, multiple: int, _first_padding: int) -> Ints:
    return row[: len(row) - len(row) % multiple]


def _copy_rows(row: Ints, multiple: int, _first_padding: int) -> Ints:
    return np.append(row, np.resize(row, -len(row) % multiple)) if len(row) else row


def _pad_at_end(row: Ints, multiple: int, first_padding: int) -> Ints:
    return np.append(row, first_padding + np.arange(-len(row) % multiple))


# Each takes the rows in their order, the multiple, and the position of the first padding row.
RULES: Mapping[str, Callable[[Ints, int, int], Ints]] = {
    "drop the remainder": _drop_remainder,
    "copy rows": _copy_rows,
    "pad at the end": _pad_at_end,
}


def _apply_rule(rule: str, lcm_plan: Plan, cuts: dict[bytes, Step], report: Callable[[str, int, int], None]) -> WhatIf:
    """The outcome of a rule with the rows, the multiple and the mini-batch size of our lcm plan."""
    layout = lcm_plan.layout
    mini_batch_size = layout.mini_batch_size if layout.actor_trains else layout.critic_mini_batch_size
    assert mini_batch_size is not None
    aligned = RULES[rule](_planned(lcm_plan), lcm_multiple(layout), len(lcm_plan.rows))
    rows_per_step = mini_batch_size * layout.rollout_n
    steps = []
    for start in range(0, len(aligned), rows_per_step):
        report(rule, start, len(aligned))
        row = aligned[start : start + rows_per_step]
        key = row.tobytes()
        if key not in cuts:
            cuts[key] = _cut_in_order(row, lcm_plan)
        steps.append(cuts[key])
    return _outcome(rule, steps, lcm_plan)


def _planned(plan: Plan) -> Ints:
    """The rows that are to be trained."""
    planned = ~plan.rows.is_padding
    planned[plan.dropped] = False
    return np.flatnonzero(planned)


def _cut_in_order(row: Ints, plan: Plan) -> Step:
    """A mini-batch whose rows are divided into ranks in their order."""
    lengths = plan.lengths
    ranks = [part[np.argsort(-lengths[part], kind="stable")] for part in np.array_split(row, plan.layout.dp_size)]
    return cut_by_rank(ranks, lengths, plan.layout, epoch=0, first_padding=None, groups=plan.prefix_groups)


def _outcome(rule: str, steps: Sequence[Step], plan: Plan) -> WhatIf:
    num_rows = len(plan.rows)
    placed = np.concatenate([np.empty(0, dtype=np.int64), *(step.row for step in steps)])
    padding = int((placed >= num_rows).sum())
    times = np.bincount(placed, minlength=num_rows)[_planned(plan)]
    return WhatIf(
        rule=rule,
        padding_rows=padding,
        padding_tokens=padding * plan.layout.min_row_tokens,
        lost_rows=int((times == 0).sum()),
        copied_rows=int(np.maximum(times - 1, 0).sum()),
        steps=len(steps),
        fewest_rows=min((int((step.row < num_rows).sum()) for step in steps), default=0),
        imbalance=_imbalance(steps, plan),
    )
