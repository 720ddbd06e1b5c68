"""`make_plan`: which row goes to which step, rank and micro-batch, with which weight.

A pure function of rows and layout: no I/O, no torch, no randomness except the seed, integer costs. Invariants, each a
property test: every real row occurs exactly once per epoch and role; the config fixes the number of optimizer steps
(align steps); every rank has the same number of micro-batches in a step; no micro-batch is above the budget; the token
weights of a step sum to the value that loss_agg defines; padding rows have weight zero and are as few as the alignment
allows; no step consists of padding alone; the order of the rows does not matter.

There are three roles, each with its own steps: `actor`, `critic` (when it trains), and `forward`, one pass over all
rows for log-probs and the reference model, on the actor's ranks. Values are computed in the critic's steps.

Note: padding rows are shared between passes. They are numbered from `len(rows)` in each role and epoch, so a batch
contains only as many as the pass that needs most.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from raggedright.arrays import Floats, Ints
from raggedright.errors import ConfigError, RowsError
from raggedright.plan.assign import assign_prompts, assign_rows, lcm_multiple, num_steps, token_weights
from raggedright.plan.cut import Step, assign_to_ranks, costs_of, cut_by_rank, cut_cells, cut_freely, join_steps
from raggedright.plan.equal_rows import equal_rows_steps, join_ranks
from raggedright.plan.layout import Layout
from raggedright.plan.micro_batches import row_costs
from raggedright.plan.prefix_groups import PrefixGroups
from raggedright.rows import FIELDS, Rows

Role = Literal["actor", "critic", "forward"]
Roles = dict[Role, tuple[Step, ...]]

# A forward pass of trees keeps more micro-batches than necessary if that saves more than 1 / 16 of its time.
MIN_TIME_SAVED_DIVISOR = 16
# Up to this many padding rows cause no warning, even if there are fewer real rows.
FEW_PADDING_ROWS = 100


@dataclass(frozen=True, slots=True, eq=False)
class PlannedMicroBatch:
    """One micro-batch of one rank: its real rows with their weights, and the number of padding rows."""

    step: int  # number of the optimizer step, counted over all epochs
    positions: Ints  # of its real rows in `plan.rows`
    keys: list[str]  # of these rows: prompt/session/trajectory
    weights: Floats  # of each loss token of these rows
    num_padding: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps of one batch by role; `micro_batches(rank)` iterates over what a rank computes."""

    rows: Rows
    layout: Layout
    roles: Mapping[Role, tuple[Step, ...]]
    dropped: Ints  # positions of rows over the budget, if over_long = "drop"
    multiple: int | None  # the row count is padded to a multiple of it, under align lcm

    def steps(self, role: Role) -> tuple[Step, ...]:
        """The steps of a role, all epochs in order; `forward` has one."""
        return self.roles[role]

    def micro_batches(self, rank: int, role: Role = "actor") -> Iterator[PlannedMicroBatch]:
        """The micro-batches of a rank in the order in which it runs them; skipped steps have none."""
        num_rows = len(self.rows)
        for number, step in enumerate(self.steps(role)):
            if not 0 <= rank < step.dp_size:
                raise ConfigError(f"rank is {rank}, and {role} has dp_size {step.dp_size}; ranks count from 0")
            for slot in range(0 if step.skipped else step.num_slots):
                positions, weights = step.micro_batch(rank, slot), step.micro_batch_weight(rank, slot)
                real = positions < num_rows
                keys = self.rows.key[positions[real]].tolist()
                yield PlannedMicroBatch(number, positions[real], keys, weights[real], int((~real).sum()))

    @property
    def trained_roles(self) -> tuple[Role, ...]:
        """The roles that take optimizer steps, the actor first."""
        return tuple(role for role in self.roles if role != "forward")

    @cached_property
    def num_padding_rows(self) -> int:
        """Padding rows in the batch: as many as the role and epoch that needs most."""
        last = max((int(step.row.max(initial=-1)) for steps in self.roles.values() for step in steps), default=-1)
        return max(0, last + 1 - len(self.rows))

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each row as it is collated, padding rows included."""
        return _lengths(self.rows, self.layout, self.num_padding_rows)

    @cached_property
    def prefix_groups(self) -> PrefixGroups | None:
        """Which rows are assumed to share a prefix; None unless they are collated as trees."""
        return PrefixGroups.of(self.rows) if self.layout.collate == "tree" else None

    @cached_property
    def padded_rows(self) -> Rows:
        """The rows and then the padding rows: every position in the plan is a position in these."""
        return self.rows.with_padding(self.num_padding_rows, self.layout.min_row_tokens)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about a plan that is exact but probably not what the user intended, each with its remedy."""
        return (*_more_than_configured(self), *_much_padding(self))

    def digest(self) -> str:
        """A hash of the whole plan, the same for every order of the rows; ranks compare it before they train."""
        h = hashlib.sha256(repr(self.layout).encode())
        by_name = np.argsort(self.rows.order, kind="stable")
        h.update(repr(self.rows.prompt[by_name].tolist()).encode())
        for name in FIELDS[1:]:
            h.update(getattr(self.rows, name)[by_name].tobytes())
        number = np.append(self.rows.order, len(self.rows) + np.arange(self.num_padding_rows))
        h.update(np.sort(number[self.dropped]).tobytes())
        for role, steps in self.roles.items():
            for step in steps:
                h.update(f"{role} {step.epoch} {step.num_slots} {step.skipped}".encode())
                for array in (number[step.row], step.weight, step.bounds):
                    h.update(array.tobytes())
        return h.hexdigest()


def make_plan(rows: Rows, layout: Layout) -> Plan:
    """Plan a batch. Padding rows among `rows` are ignored: the plan makes its own."""
    real = np.flatnonzero(~rows.is_padding)
    lengths = _lengths(rows, layout, 0)
    dropped = _over_long(rows, real, lengths, layout)
    planned = np.setdiff1d(real, dropped, assume_unique=True)
    planned = planned[np.lexsort((rows.order[planned], -lengths[planned]))]
    _check_cost(lengths[planned], layout)
    multiple = lcm_multiple(layout) if layout.align == "lcm" else None
    if layout.cut == "equal-rows":
        roles = _equal_rows(rows, planned, layout, multiple)
    else:
        roles = _micro_batches(rows, planned, lengths, layout, multiple)
    return Plan(rows, layout, roles, dropped, multiple)


def _micro_batches(rows: Rows, planned: Ints, lengths: Ints, layout: Layout, multiple: int | None) -> Roles:
    """The steps of each role, cut into micro-batches on the same ranks."""
    groups = PrefixGroups.of(rows) if layout.collate == "tree" else None
    roles: Roles = {}
    if layout.actor_trains:
        roles["actor"] = _training_steps(rows, planned, lengths, groups, layout, layout.mini_batch_size, multiple)
    size = layout.critic_mini_batch_size
    if layout.actor_trains and size == layout.mini_batch_size:
        roles["critic"] = roles["actor"]
    elif size is not None:
        roles["critic"] = _training_steps(rows, planned, lengths, groups, layout, size, multiple)
    first_epoch = [step for step in next(iter(roles.values())) if step.epoch == 0]
    roles["forward"] = (_forward_pass(first_epoch, rows, groups, layout),)
    return roles


def _equal_rows(rows: Rows, planned: Ints, layout: Layout, multiple: int | None) -> Roles:
    """The steps of each role, with equal numbers of rows on the ranks of that role."""
    actor = equal_rows_steps(rows, planned, layout, layout.actor, multiple=multiple, trains=layout.actor_trains)
    roles: Roles = {"actor": tuple(actor)} if layout.actor_trains else {}
    if layout.critic is not None:
        roles["critic"] = tuple(equal_rows_steps(rows, planned, layout, layout.critic, multiple=multiple))
    roles["forward"] = (join_ranks([step for step in actor if step.epoch == 0]),)
    return roles


def _lengths(rows: Rows, layout: Layout, num_padding: int) -> Ints:
    return np.append(np.maximum(rows.tokens, layout.min_row_tokens), np.full(num_padding, layout.min_row_tokens))


def _over_long(rows: Rows, real: Ints, lengths: Ints, layout: Layout) -> Ints:
    """Positions to drop; an error if the layout does not allow rows over the budget."""
    budget = layout.micro_batch_tokens
    over = real[lengths[real] > layout.capacity] if budget is not None else real[:0]
    if len(over) and layout.over_long == "error":
        first = over[np.argmin(rows.order[over])]
        others = f", and so have {len(over) - 1:,} others" if len(over) > 1 else ""
        raise RowsError(
            f"row {rows.key[first]} has {lengths[first]:,} tokens and micro_batch_tokens is {budget:,}{others}; "
            f"raise it to {lengths[over].max():,}, or set over_long = 'alone' or 'drop'"
        )
    return over if layout.over_long == "drop" else real[:0]


def _check_cost(lengths: Ints, layout: Layout) -> None:
    longest = int(lengths.max(initial=0))
    highest = longest * (layout.cost_linear + layout.cost_quadratic * longest)
    if max(highest * len(lengths), layout.cost_linear, layout.cost_quadratic) >= 2**62:
        raise ConfigError(
            f"cost_linear {layout.cost_linear:,} and cost_quadratic {layout.cost_quadratic:,} make {len(lengths):,} "
            f"rows of up to {longest:,} tokens cost too much to add up in 64 bits; lower both in proportion"
        )


def _training_steps(
    rows: Rows,
    planned: Ints,
    lengths: Ints,
    groups: PrefixGroups | None,
    layout: Layout,
    mini_batch_size: int,
    multiple: int | None,
) -> tuple[Step, ...]:
    """The steps of a role over all epochs; every epoch assigns rows to steps again."""
    steps = []
    for epoch in range(layout.epochs):
        if multiple is None:
            count = num_steps(layout, mini_batch_size)
            step_of_row = assign_prompts(rows, planned, count, seed=layout.seed, epoch=epoch)
            cuts = _cut_to_steps(rows, _split(planned, step_of_row, count), lengths, groups, layout, epoch)
        else:
            rows_per_step = mini_batch_size * layout.rollout_n
            count = multiple * -(-len(planned) // multiple) // rows_per_step
            step_of_row = assign_rows(rows, planned, count, seed=layout.seed, epoch=epoch)
            cuts = _cut_to_lcm(rows, _split(planned, step_of_row, count), rows_per_step, groups, layout, epoch)
        weights = token_weights(rows, layout.loss_agg, step=step_of_row, loss_norm_tokens=layout.loss_norm_tokens)
        steps += [step.weighed(weights) for step in cuts]
    return tuple(steps)


def _split(planned: Ints, step_of_row: Ints, count: int) -> list[Ints]:
    """The planned rows of each step, in their order."""
    step = step_of_row[planned]
    ends = np.cumsum(np.bincount(step, minlength=count))
    return np.split(planned[np.argsort(step, kind="stable")], ends[:-1]) if count else []


def _cut_to_steps(
    rows: Rows, rows_of_step: list[Ints], lengths: Ints, groups: PrefixGroups | None, layout: Layout, epoch: int
) -> list[Step]:
    steps, first_padding = [], len(rows)
    for row in rows_of_step:
        step = cut_freely(row, lengths, layout, epoch=epoch, first_padding=first_padding, groups=groups)
        first_padding += len(step.row) - len(row)
        steps.append(step)
    return steps


def _cut_to_lcm(
    rows: Rows, rows_of_step: list[Ints], rows_per_step: int, groups: PrefixGroups | None, layout: Layout, epoch: int
) -> list[Step]:
    """Equal row counts per step; row counts of ranks differ by at most one in a step and not at all in the batch."""
    if not rows_of_step:
        return []
    num_padding = rows_per_step * len(rows_of_step) - sum(map(len, rows_of_step))
    lengths = _lengths(rows, layout, num_padding)
    in_step = np.array([len(row) for row in rows_of_step])
    row = np.empty((len(in_step), rows_per_step), dtype=np.int64)
    is_row = np.arange(rows_per_step) < in_step[:, None]
    row[is_row] = np.concatenate(rows_of_step)
    row[~is_row] = len(rows) + np.arange(num_padding)
    on_ranks, counts = assign_to_ranks(row, row_costs(lengths[row], layout), layout.dp_size)
    return cut_cells(on_ranks, counts, lengths, layout, epoch=epoch, groups=groups)


def _forward_pass(steps: list[Step], rows: Rows, groups: PrefixGroups | None, layout: Layout) -> Step:
    """All rows once, each on its rank, in fewer and fuller micro-batches than those of the steps if possible.

    Trees keep the micro-batches of the steps if these repeat so much less that it is worth their larger number.
    """
    if not steps:  # align lcm without rows
        no_rows = np.empty(0, dtype=np.int64)
        return cut_freely(no_rows, rows.tokens, layout, epoch=0, first_padding=len(rows), groups=None)
    joined = join_steps(steps)
    if len(steps) == 1 or joined.num_slots == 0:
        return joined
    lengths = _lengths(rows, layout, max(0, int(joined.row.max()) + 1 - len(rows)))
    per_rank = np.split(joined.row, joined.bounds[joined.num_slots : -1 : joined.num_slots])
    first_padding = None
    if layout.align == "steps":  # the padding rows of steps need no forward pass; lcm keeps its row count
        first_padding = len(rows)
        per_rank = [row[row < len(rows)] for row in per_rank]
    name_order = np.append(rows.order, np.arange(len(rows), len(lengths)))
    per_rank = [row[np.lexsort((name_order[row], -lengths[row]))] for row in per_rank]
    repacked = cut_by_rank(per_rank, lengths, layout, epoch=0, first_padding=first_padding, groups=groups)
    best = min(joined, repacked, key=lambda step: (step.num_slots, step.num_empty))
    if groups is not None and best is repacked and joined.num_empty == 0:
        # Fuller micro-batches have less room to keep prefix groups together.
        times = [int(costs_of(step, lengths, layout, groups).max(axis=0).sum()) for step in (joined, repacked)]
        best = joined if times[0] < times[1] - times[1] // MIN_TIME_SAVED_DIVISOR else repacked
    return best


def _more_than_configured(plan: Plan) -> Iterator[str]:
    """Prompts beyond batch_size where it fixes the number of steps, and sessions beyond rollout_n."""
    rows, layout = plan.rows, plan.layout
    real = ~rows.is_padding
    prompt_of_session = np.full(rows.num_sessions, -1)
    prompt_of_session[rows.session_index[real]] = rows.prompt_index[real]
    sessions = np.bincount(prompt_of_session[prompt_of_session >= 0])
    num_prompts, most = int(np.count_nonzero(sessions)), int(sessions.max(initial=0))
    if num_prompts > layout.batch_size and layout.align == "steps":
        yield (
            f"the batch has {num_prompts:,} prompts and batch_size is {layout.batch_size:,}, which alone fixes the "
            f"number of optimizer steps, so steps have more prompts than configured; set batch_size to {num_prompts:,}"
        )
    if most > layout.rollout_n:
        yield (
            f"the batch has a prompt of {most:,} sessions and rollout_n is {layout.rollout_n:,}; "
            f"set rollout_n to {most:,}"
        )


def _much_padding(plan: Plan) -> Iterator[str]:
    layout, steps = plan.layout, len(plan.steps(plan.trained_roles[0]))
    num_rows = int((~plan.rows.is_padding).sum()) - len(plan.dropped)
    if num_rows == 0 or plan.num_padding_rows <= max(num_rows, FEW_PADDING_ROWS):
        return
    start = f"the plan has {plan.num_padding_rows:,} padding rows for {num_rows:,} rows"
    if plan.multiple is None:
        least = layout.dp_size * layout.micro_batch_multiple
        yield (
            f"{start}: each of {steps:,} steps takes at least {least:,} rows (dp_size {layout.dp_size:,} x "
            f"micro_batch_multiple {layout.micro_batch_multiple:,}); lower one of these, or raise mini_batch_size"
        )
    else:
        sizes = {"mini_batch_size": layout.mini_batch_size if layout.actor_trains else None}
        sizes["critic_mini_batch_size"] = layout.critic_mini_batch_size
        parts = ", ".join(f"{name} {size:,} x rollout_n {layout.rollout_n:,}" for name, size in sizes.items() if size)
        yield (
            f"{start} and {steps:,} optimizer steps: align = 'lcm' pads to a multiple of {plan.multiple:,}, the least "
            f"common multiple of dp_size {layout.dp_size:,}, {parts}; set align = 'steps', or choose sizes that share "
            "factors"
        )
