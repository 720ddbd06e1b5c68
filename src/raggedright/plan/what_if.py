"""The same rows under every alignment: ours, and what the common rules of other trainers would do with them.

The other rules bring the row count to the multiple that `align = "lcm"` asks for, then cut the rows, in the order in
which they arrived, into mini-batches and ranks:

    drop the remainder  rows past the last whole multiple are lost
    copy rows           the first rows are trained a second time to fill the last multiple
    pad at the end      padding fills it, so that the last steps may hold a row or none

Micro-batches are cut by our own packer in all of them, so what differs is the alignment alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raggedright.arrays import Ints
from raggedright.plan.cut import Step, cut_by_rank
from raggedright.plan.deal import lcm_multiple
from raggedright.plan.layout import Layout
from raggedright.plan.measure import Imbalance, imbalance_of
from raggedright.plan.plan import Plan, make_plan
from raggedright.rows import Rows


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One rule's outcome on a batch, for the first role that trains, over one epoch."""

    rule: str
    padding_rows: int
    padding_tokens: int
    lost_rows: int
    copied_rows: int
    steps: int
    fewest_rows: int  # real rows in the poorest step
    imbalance: Imbalance


def compare_rules(
    rows: Rows, layout: Layout, *, plan: Plan | None = None, report: Callable[[str, int, int], None] | None = None
) -> list[WhatIf]:
    """Each rule's outcome; ours first.

    A `plan` of these rows that exists already is used where it is one of ours. `report` is told the rule that is worked
    on, and how many of how many mini-batches are done.
    """
    report = report or (lambda rule, done, total: None)
    layout = replace(layout, epochs=1)
    ours = []
    for align in ("steps", "lcm"):
        report(f"align {align}", 0, 1)
        wanted = replace(layout, align=align)
        ours.append(plan if plan is not None and plan.layout == wanted else make_plan(rows, wanted))
    cuts: dict[bytes, Step] = {}  # of mini-batches that several rules have in common
    return [*map(_ours, ours), *(_theirs(rule, ours[1], cuts, report) for rule in RULES)]


def _drop_remainder(row: Ints, multiple: int, _first_padding: int) -> Ints:
    return row[: len(row) - len(row) % multiple]


def _copy_rows(row: Ints, multiple: int, _first_padding: int) -> Ints:
    return np.append(row, np.resize(row, -len(row) % multiple)) if len(row) else row


def _pad_at_end(row: Ints, multiple: int, first_padding: int) -> Ints:
    return np.append(row, first_padding + np.arange(-len(row) % multiple))


# What a rule makes of the rows in their order, the multiple, and the first of the numbers that stand for padding rows.
RULES: Mapping[str, Callable[[Ints, int, int], Ints]] = {
    "drop the remainder": _drop_remainder,
    "copy rows": _copy_rows,
    "pad at the end": _pad_at_end,
}


def _ours(plan: Plan) -> WhatIf:
    return _outcome(f"align {plan.layout.align}", plan.steps(plan.trained_roles[0]), plan)


def _theirs(rule: str, lcm_plan: Plan, cuts: dict[bytes, Step], report: Callable[[str, int, int], None]) -> WhatIf:
    """What a rule does with the rows that our lcm plan has; it gets the same multiple and mini-batches."""
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
    """A mini-batch whose rows go to ranks in runs, as they come."""
    ranks = [part[np.argsort(-plan.lengths[part], kind="stable")] for part in np.array_split(row, plan.layout.dp_size)]
    return cut_by_rank(ranks, plan.lengths, plan.layout, epoch=0, first_padding=None, kin=plan.kin)


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
        imbalance=imbalance_of(steps, plan),
    )
