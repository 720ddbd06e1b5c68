"""One step laid out over ranks and micro-batches.

`cut_freely` chooses the ranks itself (align steps): it takes m * ceil(B / m) micro-batches, m = dp x multiple and B
what the packing needs, and adds a padding row only for a micro-batch that no row is left for. `cut_by_rank` keeps rows
on the ranks they are on (align lcm, forward-only work). Either way every rank has the same number of micro-batches,
and slot j, the j-th of every rank, costs about the same on all of them; the dearest slots come first, so that
a shortage of memory shows at once. Given `kin`, a micro-batch costs what its trees do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raggedright.arrays import Floats, Ints, offsets
from raggedright.plan.kin import Kin
from raggedright.plan.layout import Layout
from raggedright.plan.micro_batches import micro_batch_costs, pack, spread
from raggedright.plan.packing import count_bins


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The rows of one optimizer step (or forward pass), sorted by rank, then micro-batch.

    `row` holds positions in the plan's rows; a position of `len(rows)` or more is a padding row. Micro-batch `slot` of
    rank `dp_rank` is `row[bounds[b] : bounds[b + 1]]` with `b = dp_rank * num_slots + slot`.
    A skipped step has no loss token: no rank runs it, the schedule still advances.
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
        """Per-token weight of each of those rows."""
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
        """Micro-batches without a row; only under align lcm, where the row count is fixed."""
        return int((self.bounds[1:] - self.bounds[:-1] == 0).sum())

    @property
    def micro_batch_index(self) -> Ints:
        """Number of the micro-batch (dp_rank * num_slots + slot) that each row is in."""
        return np.repeat(np.arange(self.num_micro_batches), self.bounds[1:] - self.bounds[:-1])

    def weighed(self, weights: Floats) -> "Step":
        """This step with the weights of its rows; positions past the end (padding) weigh zero."""
        weight = np.append(weights, 0.0)[np.minimum(self.row, len(weights))]
        return replace(self, weight=weight, skipped=not weight.any())


def costs_of(step: Step, lengths: Ints, layout: Layout, kin: Kin | None) -> Ints:
    """Cost of each micro-batch of a step, [dp_size, num_slots]."""
    number, num_bins = step.micro_batch_index, step.num_micro_batches
    costs = micro_batch_costs(number, lengths[step.row], num_bins, layout, kin and kin.take(step.row))
    return costs.reshape(step.dp_size, step.num_slots)


def cut_freely(
    row: Ints, lengths: Ints, layout: Layout, *, epoch: int, first_padding: int, kin: Kin | None = None
) -> Step:
    """Lay out rows (in descending length) over all ranks; padding rows are numbered from `first_padding`."""
    dp_size, multiple = layout.dp_size, layout.dp_size * layout.micro_batch_multiple
    length = lengths[row]
    packed = pack(length, layout, multiple=multiple)
    num_bins = multiple * -(-count_bins(packed) // multiple)
    bins = spread(length, packed, num_bins=num_bins, width=dp_size, layout=layout, kin=kin and kin.take(row))
    num_padding = max(0, num_bins - len(row))
    if num_padding:
        row = np.append(row, first_padding + np.arange(num_padding))
        bins = np.append(bins, num_bins - num_padding + np.arange(num_padding))
        length = np.append(length, np.full(num_padding, layout.min_row_tokens))
    costs = micro_batch_costs(bins, length, num_bins, layout, kin and kin.take(row)).reshape(-1, dp_size)
    num_slots = num_bins // dp_size
    number = _rank_of_bin(costs) * num_slots + np.repeat(np.arange(num_slots), dp_size)
    return _step(row, number[bins], num_slots, dp_size, epoch)


def cut_by_rank(
    rows_of_rank: Sequence[Ints],
    lengths: Ints,
    layout: Layout,
    *,
    epoch: int,
    first_padding: int | None,
    kin: Kin | None = None,
) -> Step:
    """Lay out each rank's rows (in descending length) over one number of micro-batches.

    A rank with fewer rows than that gets padding rows numbered from `first_padding`, or, where the row count is
    not ours to change (None), micro-batches without a row.
    """
    multiple = layout.micro_batch_multiple
    packings = [pack(lengths[row], layout, multiple=multiple) for row in rows_of_rank]
    num_slots = multiple * -(-max(map(count_bins, packings)) // multiple)
    rows, bins = [], []
    for dp_rank, (row, packed) in enumerate(zip(rows_of_rank, packings, strict=True)):
        length, kin_of_rank = lengths[row], kin and kin.take(row)
        slots = spread(length, packed, num_bins=num_slots, width=num_slots, layout=layout, kin=kin_of_rank)
        by_cost = np.argsort(-micro_batch_costs(slots, length, num_slots, layout, kin_of_rank), kind="stable")
        slot_of_bin = np.empty(num_slots, dtype=np.int64)
        slot_of_bin[by_cost] = np.arange(num_slots)
        rows.append(row)
        bins.append(dp_rank * num_slots + slot_of_bin[slots])
        num_padding = 0 if first_padding is None else max(0, num_slots - len(row))
        if first_padding is not None and num_padding:
            rows.append(first_padding + np.arange(num_padding))
            bins.append(dp_rank * num_slots + num_slots - num_padding + np.arange(num_padding))
            first_padding += num_padding
    return _step(np.concatenate(rows), np.concatenate(bins), num_slots, layout.dp_size, epoch)


def deal_to_ranks(row: Ints, costs: Ints, dp_size: int, *, first_rank: int) -> list[Ints]:
    """Rows (in descending cost) to ranks, one each in turn, the dearest to the rank with the least so far.

    Counts differ by one at most; the ranks from `first_rank` on are the ones with a row more.
    """
    load = np.zeros(dp_size, dtype=np.int64)
    rank = np.empty(len(row), dtype=np.int64)
    for start in range(0, len(row), dp_size):
        cost = costs[start : start + dp_size]
        ranks = np.arange(dp_size) if len(cost) == dp_size else (first_rank + np.arange(len(cost))) % dp_size
        ranks = ranks[np.argsort(load[ranks], kind="stable")]
        rank[start : start + dp_size] = ranks
        load[ranks] += cost
    return [row[rank == r] for r in range(dp_size)]


def join_steps(steps: Sequence[Step]) -> Step:
    """The micro-batches of several steps, one after another, as one forward pass."""
    dp_size, epoch = steps[0].dp_size, steps[0].epoch
    num_slots = sum(step.num_slots for step in steps)
    bins, start = [], 0
    for step in steps:
        dp_rank, slot = np.divmod(step.micro_batch_index, max(step.num_slots, 1))
        bins.append(dp_rank * num_slots + start + slot)
        start += step.num_slots
    return _step(np.concatenate([step.row for step in steps]), np.concatenate(bins), num_slots, dp_size, epoch)


def _rank_of_bin(costs: Ints) -> Ints:
    """Rank of each bin, slot by slot: the dearest bin to the rank with the least so far."""
    num_slots, dp_size = costs.shape
    load = np.zeros(dp_size, dtype=np.int64)
    ranks = np.zeros((num_slots, dp_size), dtype=np.int64)
    dearest_first = np.argsort(-costs, axis=1, kind="stable")
    for slot in range(num_slots if dp_size > 1 else 0):
        ranks[slot, dearest_first[slot]] = np.argsort(load, kind="stable")
        load[ranks[slot]] += costs[slot]
    return ranks.ravel()


def _step(row: Ints, bins: Ints, num_slots: int, dp_size: int, epoch: int) -> Step:
    order = np.argsort(bins, kind="stable")
    bounds = offsets(np.bincount(bins, minlength=dp_size * num_slots))
    return Step(epoch, dp_size, num_slots, row[order], np.zeros(len(row)), bounds)
