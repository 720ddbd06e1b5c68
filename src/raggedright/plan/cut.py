"""One step, divided into ranks and micro-batches.

`cut_freely` chooses the ranks itself (align steps): it makes m * ceil(B / m) micro-batches, where m = dp x multiple and
B is what the packing needs, and adds a padding row only to a micro-batch that would have no row. `cut_by_rank` and
`cut_cells` keep rows on their ranks (align lcm, forward-only work). In both cases every rank has the same number of
micro-batches, and slot j, the j-th of every rank, costs about the same on all ranks. The most expensive slots come
first, so that a lack of memory shows immediately. With prefix groups, a micro-batch costs what its trees cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raggedright.arrays import Floats, Ints, offsets
from raggedright.plan.layout import Layout
from raggedright.plan.micro_batches import micro_batch_costs, pack, spread
from raggedright.plan.packing import bins_per_cell, cell_of_row, count_bins
from raggedright.plan.prefix_groups import PrefixGroups


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The rows of one optimizer step (or forward pass), sorted by rank, then micro-batch.

    `row` holds positions in the plan's rows; a position of `len(rows)` or more is a padding row. Micro-batch `slot` of
    rank `dp_rank` is `row[bounds[b] : bounds[b + 1]]` with `b = dp_rank * num_slots + slot`.
    A skipped step has no loss token: no rank runs it, but the schedule advances.
    """

    epoch: int
    dp_size: int
    num_slots: int
    row: Ints
    weight: Floats
    bounds: Ints
    skipped: bool = False

    def micro_batch(self, dp_rank: int, slot: int) -> Ints:
        """Positions of the rows of one micro-batch."""
        return self.row[self._part(dp_rank, slot)]

    def micro_batch_weight(self, dp_rank: int, slot: int) -> Floats:
        """Weight of each loss token of those rows."""
        return self.weight[self._part(dp_rank, slot)]

    def _part(self, dp_rank: int, slot: int) -> slice:
        b = dp_rank * self.num_slots + slot
        return slice(self.bounds[b], self.bounds[b + 1])

    @property
    def num_micro_batches(self) -> int:
        """On all ranks together."""
        return self.dp_size * self.num_slots

    @property
    def num_empty(self) -> int:
        """Micro-batches without a row; they exist only under align lcm, where the row count is fixed."""
        return int((self.bounds[1:] - self.bounds[:-1] == 0).sum())

    @property
    def micro_batch_index(self) -> Ints:
        """Number of the micro-batch (dp_rank * num_slots + slot) that each row is in."""
        return np.repeat(np.arange(self.num_micro_batches), self.bounds[1:] - self.bounds[:-1])

    def weighed(self, weights: Floats) -> "Step":
        """This step with the weights of its rows; positions past the end (padding) have weight zero."""
        is_row = self.row < len(weights)
        weight = np.zeros(len(self.row))
        weight[is_row] = weights[self.row[is_row]]
        return replace(self, weight=weight, skipped=not weight.any())


def costs_of(step: Step, lengths: Ints, layout: Layout, groups: PrefixGroups | None) -> Ints:
    """Cost of each micro-batch of a step, [dp_size, num_slots]."""
    number, num_bins = step.micro_batch_index, step.num_micro_batches
    costs = micro_batch_costs(number, lengths[step.row], num_bins, layout, groups and groups.take(step.row))
    return costs.reshape(step.dp_size, step.num_slots)


def cut_freely(
    row: Ints, lengths: Ints, layout: Layout, *, epoch: int, first_padding: int, groups: PrefixGroups | None
) -> Step:
    """Distribute rows (in descending length) over all ranks; padding rows are numbered from `first_padding`."""
    dp_size, multiple = layout.dp_size, layout.dp_size * layout.micro_batch_multiple
    length = lengths[row]
    counts, groups_of_row = np.array([len(row)]), groups and groups.take(row)
    packed = pack(length, counts, layout, multiple=multiple)
    num_bins = multiple * -(-count_bins(packed) // multiple)
    bins = spread(
        length, packed, counts, num_bins=np.array([num_bins]), width=dp_size, layout=layout, groups=groups_of_row
    )
    num_padding = max(0, num_bins - len(row))
    if num_padding:
        row = np.append(row, first_padding + np.arange(num_padding))
        bins = np.append(bins, num_bins - num_padding + np.arange(num_padding))
        length = np.append(length, np.full(num_padding, layout.min_row_tokens))
    costs = micro_batch_costs(bins, length, num_bins, layout, groups and groups.take(row)).reshape(-1, dp_size)
    num_slots = num_bins // dp_size
    number = _rank_of_bin(costs) * num_slots + np.repeat(np.arange(num_slots), dp_size)
    return make_step(row, number[bins], num_slots, dp_size, epoch)


def cut_by_rank(
    rows_of_rank: Sequence[Ints],
    lengths: Ints,
    layout: Layout,
    *,
    epoch: int,
    first_padding: int | None,
    groups: PrefixGroups | None,
) -> Step:
    """Divide each rank's rows (in descending length) into the same number of micro-batches.

    A rank with fewer rows than that gets padding rows numbered from `first_padding`, or, if the row count must not
    change (None), micro-batches without a row.
    """
    row, counts = np.concatenate(rows_of_rank), np.array([[len(row) for row in rows_of_rank]])
    (step,) = cut_cells(row, counts, lengths, layout, epoch=epoch, groups=groups)
    return step if first_padding is None else _fill_with_padding(step, first_padding)


def cut_cells(
    row: Ints, counts: Ints, lengths: Ints, layout: Layout, *, epoch: int, groups: PrefixGroups | None
) -> list[Step]:
    """Steps whose rows have their ranks; `counts` [steps, ranks] are the numbers of rows, in descending length."""
    multiple, dp_size = layout.micro_batch_multiple, layout.dp_size
    in_cell, length, groups_of_row = counts.ravel(), lengths[row], groups and groups.take(row)
    packed = pack(length, in_cell, layout, multiple=multiple)
    num_slots = multiple * -(-bins_per_cell(packed, in_cell).reshape(counts.shape).max(axis=1) // multiple)
    num_bins = np.repeat(num_slots, dp_size)
    bins = spread(length, packed, in_cell, num_bins=num_bins, width=None, layout=layout, groups=groups_of_row)
    first_bin = offsets(num_bins)
    bins += np.repeat(first_bin[:-1], in_cell)
    costs = micro_batch_costs(bins, length, int(first_bin[-1]), layout, groups_of_row)
    number = np.empty(len(costs), dtype=np.int64)
    number[np.lexsort((-costs, cell_of_row(num_bins)))] = np.arange(len(costs))  # the most expensive of each cell first
    bins = number[bins]
    row = row[np.argsort(bins, kind="stable")]
    bounds = offsets(np.bincount(bins, minlength=len(costs)))
    ends = first_bin[::dp_size].tolist()
    return [
        Step(
            epoch, dp_size, slots, row[bounds[start] : bounds[end]], np.zeros(bounds[end] - bounds[start]),
            bounds[start : end + 1] - bounds[start],
        )
        for slots, start, end in zip(num_slots.tolist(), ends[:-1], ends[1:], strict=True)
    ]  # fmt: skip


def _fill_with_padding(step: Step, first_padding: int) -> Step:
    """The step with a padding row in each micro-batch that has no row; these are the last of their rank."""
    empty = np.flatnonzero(np.diff(step.bounds) == 0)
    bins = np.append(step.micro_batch_index, empty)
    row = np.append(step.row, first_padding + np.arange(len(empty)))
    return make_step(row, bins, step.num_slots, step.dp_size, step.epoch)


def assign_to_ranks(row: Ints, costs: Ints, dp_size: int) -> tuple[Ints, Ints]:
    """Assign the rows of each step [steps, rows], in descending cost, to ranks.

    Each rank in turn gets one row, the most expensive row for the rank with the lowest cost so far. Returns all rows,
    rank after rank in each step, and the number of rows of each rank [steps, ranks]. These numbers differ by at most
    one; the ranks with one row more are those that follow the ranks with one row more in the previous step.
    """
    num_steps, per_step = row.shape
    load = np.zeros((num_steps, dp_size), dtype=np.int64)
    rank = np.empty((num_steps, per_step), dtype=np.int64)
    for start in range(0, per_step, dp_size):
        cost = costs[:, start : start + dp_size]
        first = 0 if cost.shape[1] == dp_size else np.arange(num_steps)[:, None] * per_step
        ranks = (first + np.broadcast_to(np.arange(cost.shape[1]), cost.shape)) % dp_size
        lightest = np.argsort(np.take_along_axis(load, ranks, axis=1), axis=1, kind="stable")
        ranks = np.take_along_axis(ranks, lightest, axis=1)
        rank[:, start : start + dp_size] = ranks
        np.put_along_axis(load, ranks, np.take_along_axis(load, ranks, axis=1) + cost, axis=1)
    cell = rank + np.arange(num_steps)[:, None] * dp_size
    counts = np.bincount(cell.ravel(), minlength=num_steps * dp_size).reshape(num_steps, dp_size)
    return row.ravel()[np.argsort(cell.ravel(), kind="stable")], counts


def join_steps(steps: Sequence[Step]) -> Step:
    """The micro-batches of several steps, one after another, as one forward pass."""
    dp_size, epoch = steps[0].dp_size, steps[0].epoch
    num_slots = sum(step.num_slots for step in steps)
    bins, start = [], 0
    for step in steps:
        dp_rank, slot = np.divmod(step.micro_batch_index, max(step.num_slots, 1))
        bins.append(dp_rank * num_slots + start + slot)
        start += step.num_slots
    return make_step(np.concatenate([step.row for step in steps]), np.concatenate(bins), num_slots, dp_size, epoch)


def _rank_of_bin(costs: Ints) -> Ints:
    """Rank of each bin, slot by slot: the most expensive bin to the rank with the lowest cost so far."""
    num_slots, dp_size = costs.shape
    load = np.zeros(dp_size, dtype=np.int64)
    ranks = np.zeros((num_slots, dp_size), dtype=np.int64)
    costliest_first = np.argsort(-costs, axis=1, kind="stable")
    for slot in range(num_slots if dp_size > 1 else 0):
        ranks[slot, costliest_first[slot]] = np.argsort(load, kind="stable")
        load[ranks[slot]] += costs[slot]
    return ranks.ravel()


def make_step(row: Ints, bins: Ints, num_slots: int, dp_size: int, epoch: int) -> Step:
    """A step, without weights, from the micro-batch (dp_rank * num_slots + slot) of each row."""
    order = np.argsort(bins, kind="stable")
    bounds = offsets(np.bincount(bins, minlength=dp_size * num_slots))
    return Step(epoch, dp_size, num_slots, row[order], np.zeros(len(row)), bounds)
