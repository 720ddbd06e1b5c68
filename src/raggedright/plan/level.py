"""Spread rows over a fixed number of bins so that ranks in lock-step wait for each other as little as possible.

The bins of a slot run at the same time on different ranks, so a slot takes as long as its most expensive bin: the bins
of one slot should have equal costs, different slots may differ. All bins of a cell form one slot; with `width`, the
bins of a single cell form slots of `width` bins, numbered by slot (bin // width), the most expensive slot first.
Cells and their arrays: see `packing`. Costs descend with the sizes.

Invariants: every bin gets a row if there are enough, no bin exceeds its capacity, ties are broken by position, all
arithmetic is in integers.

Note: levelling by cost alone would overfill bins of short rows, because quadratic attention makes the tokens of long
rows more expensive. So sizes are levelled first, over all bins, and costs second, within each slot.
"""

from bisect import bisect_left
from heapq import heappop, heappush, heapreplace

import numpy as np

from raggedright.arrays import Ints, index_in_run, sum_by
from raggedright.plan.packing import (
    bins_per_cell,
    cell_of_row,
    count_bins,
    first_fit,
    kth_rows,
    rows_of_cells,
    split_cells,
    worth_arrays,
)

# With more slots than this, neighbours in a sorted list of bins cost the same to a fraction of a percent.
MANY_SLOTS = 400
# Halvings of the capacity's slack when rows fit too tightly for plain levelling.
TIGHTENINGS = 4
# Bins, and the share of them that a round reaches, below which a heap is faster than rounds of array operations.
HEAP_BELOW = 32
# A slot within a thousandth of level is left as it is.
LEVEL_ENOUGH = 1_000
CLOSED = np.int64(2**63 - 1)  # the load of a bin that a cell does not have


def level(
    sizes: Ints, costs: Ints, packing: Ints, counts: Ints, num_bins: Ints, capacity: int, *, width: int | None = None
) -> Ints:
    """Bin of each row; every cell has more rows than `num_bins`, and `packing` needs at most that many bins."""
    if width is not None and num_bins[0] > MANY_SLOTS * width:
        return sort_bins(split_bins(packing, costs, counts, num_bins), costs, counts, num_bins)
    bins = None
    if width is not None:
        bins = _level_seeded(sizes, costs, int(num_bins[0]), width, capacity)
    if bins is None:
        bins = _level_sizes(sizes, costs, packing, counts, num_bins, capacity)
    bins = sort_bins(bins, costs, counts, num_bins)
    if width is None:
        return _level_costs(bins, sizes, costs, counts, num_bins, capacity)
    slot, place = np.divmod(bins, width)
    by_slot = np.argsort(slot, kind="stable")  # keeps the descending order of size within a slot
    in_slot = np.bincount(slot)
    place = _level_costs(
        place[by_slot], sizes[by_slot], costs[by_slot], in_slot, np.full_like(in_slot, width), capacity
    )
    bins[by_slot] = slot[by_slot] * width + place
    return bins


def split_bins(bins: Ints, costs: Ints, counts: Ints, num_bins: Ints) -> Ints:
    """Halve the most expensive bins of each cell that have two rows or more until the cell has its `num_bins`."""
    most, cell = int(num_bins.max(initial=1)), cell_of_row(counts)
    bins, have = bins.copy(), bins_per_cell(bins, counts)
    while (have < num_bins).any():
        key = cell * most + bins
        in_bin = np.bincount(key, minlength=len(counts) * most)
        costliest = np.argsort(-sum_by(key, costs, len(in_bin)).reshape(-1, most), axis=1, kind="stable")
        halved = np.take_along_axis(in_bin.reshape(-1, most), costliest, axis=1) >= 2
        number = np.cumsum(halved, axis=1)
        halved &= number <= (num_bins - have)[:, None]
        if not halved.any():
            break  # one row per bin: fewer rows than bins
        new_number = np.full((len(counts), most), -1)
        in_cell, place = np.nonzero(halved)
        new_number[in_cell, costliest[in_cell, place]] = (have[:, None] + number - 1)[in_cell, place]
        moves = (new_number.ravel()[key] >= 0) & (_place_in_bin(key, in_bin) >= (in_bin[key] + 1) // 2)
        bins[moves] = new_number.ravel()[key[moves]]
        have += halved.sum(axis=1)
    return bins


def _place_in_bin(bins: Ints, in_bin: Ints) -> Ints:
    """How many rows of its bin come before each row."""
    order = np.argsort(bins, kind="stable")
    place = np.empty(len(bins), dtype=np.int64)
    place[order] = index_in_run(in_bin)
    return place


def sort_bins(bins: Ints, costs: Ints, counts: Ints, num_bins: Ints) -> Ints:
    """Number the bins of each cell by descending cost; ties keep their order."""
    most = int(num_bins.max(initial=1))
    key = cell_of_row(counts) * most + bins
    costliest = np.argsort(-sum_by(key, costs, len(counts) * most).reshape(-1, most), axis=1, kind="stable")
    number = np.empty_like(costliest)
    np.put_along_axis(number, costliest, np.arange(most)[None, :], axis=1)
    return number.ravel()[key]


def _level_sizes(sizes: Ints, costs: Ints, packing: Ints, counts: Ints, num_bins: Ints, capacity: int) -> Ints:
    """Bins of about equal size: each row to the bin of its cell with the smallest sum, if that fits; else repacked."""
    bins, most = longest_first(sizes, counts, num_bins), int(num_bins.max())
    loads = sum_by(cell_of_row(counts) * most + bins, sizes, len(counts) * most).reshape(-1, most)
    over = np.flatnonzero(loads.max(axis=1) > capacity)
    if len(over):
        at, in_cell = rows_of_cells(counts, over), counts[over]
        tighter = _tighten(sizes[at], packing[at], in_cell, num_bins[over], capacity)
        bins[at] = split_bins(tighter, costs[at], in_cell, num_bins[over])
    return bins


def _tighten(sizes: Ints, packing: Ints, counts: Ints, num_bins: Ints, capacity: int) -> Ints:
    """First-fit-decreasing at the smallest capacity, to a sixteenth of the slack, that still needs no more bins."""
    packing, longest = packing.copy(), sizes[np.cumsum(counts) - counts]
    low = -(-sum_by(cell_of_row(counts), sizes, len(counts)) // num_bins)
    high, cells = np.full(len(counts), capacity), np.arange(len(counts))
    for _ in range(TIGHTENINGS):
        cells = cells[(low + high)[cells] // 2 >= longest[cells]]
        if len(cells) == 0:
            break
        at, middle = rows_of_cells(counts, cells), (low + high)[cells] // 2
        tighter = first_fit(sizes[at], counts[cells], middle)
        fits = bins_per_cell(tighter, counts[cells]) <= num_bins[cells]
        kept = np.repeat(fits, counts[cells])
        packing[at[kept]] = tighter[kept]
        high[cells[fits]], low[cells[~fits]] = middle[fits], middle[~fits]
    return packing


def _level_costs(bins: Ints, sizes: Ints, costs: Ints, counts: Ints, num_bins: Ints, capacity: int) -> Ints:
    """Assign the rows of a cell again, by cost, where that makes its most expensive bin cheaper."""
    most = int(num_bins.max())
    bin_costs = sum_by(cell_of_row(counts) * most + bins, costs, len(counts) * most).reshape(-1, most)
    highest, mean = bin_costs.max(axis=1), bin_costs.sum(axis=1) // num_bins
    uneven = np.flatnonzero(highest - mean > mean // LEVEL_ENOUGH)
    if len(uneven):
        at, cell = rows_of_cells(counts, uneven), cell_of_row(counts[uneven])
        new_bins = costliest_first(sizes[at], costs[at], counts[uneven], num_bins[uneven], capacity)
        fits = np.bincount(cell, new_bins < 0, len(uneven)) == 0
        new_costs = sum_by(cell * most + np.maximum(new_bins, 0), costs[at], len(uneven) * most).reshape(-1, most)
        better = (fits & (new_costs.max(axis=1) < highest[uneven]))[cell]
        bins[at[better]] = new_bins[better]
    return bins


def _level_seeded(sizes: Ints, costs: Ints, num_bins: int, width: int, capacity: int) -> Ints | None:
    """The longest rows in slots of their own, the others by size in the remaining bins; None if that is impossible."""
    bins = _seed_slots(sizes, costs, num_bins, width, capacity)
    num_seeded, rest = count_bins(bins), np.flatnonzero(bins < 0)
    if num_seeded == 0 or len(rest) < num_bins - num_seeded:
        return None
    bins[rest] = num_seeded + longest_first(sizes[rest], np.array([len(rest)]), np.array([num_bins - num_seeded]))
    return bins if sum_by(bins, sizes, num_bins).max() <= capacity else None


def _seed_slots(sizes: Ints, costs: Ints, num_bins: int, width: int, capacity: int) -> Ints:
    """While the longest row left costs more than an average bin, its slot cannot be cheaper: fill that slot.

    The `width` longest rows left each start a bin, and each bin takes the largest rows that fit its room and keep it
    below the cost of the slot's longest row. Rows that no such slot takes have bin -1.
    """
    num_rows = len(sizes)
    bins = np.full(num_rows, -1, dtype=np.int64)
    size, cost = sizes.tolist(), costs.tolist()
    by_size, by_cost = (-sizes).tolist(), (-costs).tolist()  # ascending, for bisect
    next_left = list(range(num_rows + 1))  # the first row left at or after each position, with path halving

    def first_left(i: int) -> int:
        while next_left[i] != i:
            next_left[i] = i = next_left[next_left[i]]
        return i

    cost_left, seeded = int(costs.sum()), 0
    while num_bins - seeded > width:
        longest = first_left(0)
        if longest == num_rows or cost[longest] * (num_bins - seeded) <= cost_left:
            break
        slot_cost, i = cost[longest], longest
        seeds = []
        while len(seeds) < width and (i := first_left(i)) < num_rows:
            next_left[i] = i + 1
            seeds.append(i)
        for b, i in enumerate(seeds, start=seeded):
            room, gap = capacity, slot_cost
            while i < num_rows:
                next_left[i] = i + 1
                bins[i] = b
                room, gap, cost_left = room - size[i], gap - cost[i], cost_left - cost[i]
                i = first_left(max(bisect_left(by_size, -room), bisect_left(by_cost, -gap)))
        seeded += width
    return bins


def longest_first(sizes: Ints, counts: Ints, num_bins: Ints) -> Ints:
    """Each row, in descending size, to the bin of its cell with the smallest sum so far."""
    if not worth_arrays(counts, num_bins):
        cells = zip(split_cells(sizes, counts), num_bins.tolist(), strict=True)
        return np.concatenate([_longest_first_rounds(size, n) for size, n in cells])
    by_count, most = np.argsort(-counts, kind="stable"), int(num_bins.max())
    loads = np.where(np.arange(most) < num_bins[by_count, None], 0, CLOSED)
    flat, bins = loads.ravel(), np.empty(len(sizes), dtype=np.int64)
    for first_bin, at in kth_rows(counts, by_count, most):
        lightest = loads[: len(at)].argmin(axis=1)
        flat[first_bin + lightest] += sizes[at]
        bins[at] = lightest
    return bins


def _longest_first_rounds(sizes: Ints, num_bins: int) -> Ints:
    """`longest_first` of one cell.

    In each round the lightest bins take the next rows, up to the first row for which a bin of this round would be
    lighter again. Where rounds get short, a heap assigns the remaining rows; both give the same answer.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    sizes = sizes * num_bins
    loads = np.arange(num_bins)  # ascending; sum * num_bins + bin: one integer to compare
    start, worth_it = 0, num_bins >= HEAP_BELOW
    while worth_it and start < len(sizes):
        batch = sizes[start : start + num_bins]
        before = loads[: len(batch)]
        after = before + batch
        too_late = before[1:] > np.minimum.accumulate(after)[:-1]
        take = int(too_late.argmax()) + 1 if too_late.any() else len(batch)
        bins[start : start + take] = before[:take] % num_bins
        loads[:take] = after[:take]
        loads.sort(kind="stable")
        start, worth_it = start + take, take * HEAP_BELOW >= num_bins
    heap, rest = loads.tolist(), []
    for size in sizes[start:].tolist():
        lightest = heap[0]
        rest.append(lightest % num_bins)
        heapreplace(heap, lightest + size)
    bins[start:] = rest
    return bins


def costliest_first(sizes: Ints, costs: Ints, counts: Ints, num_bins: Ints, capacity: int) -> Ints:
    """Each row to the cheapest bin of its cell with room for it; where a row has no room, it gets bin -1."""
    if not worth_arrays(counts, num_bins):
        cells = zip(split_cells(sizes, counts), split_cells(costs, counts), num_bins.tolist(), strict=True)
        return np.concatenate([_costliest_first_heap(size, cost, n, capacity) for size, cost, n in cells])
    by_count, most = np.argsort(-counts, kind="stable"), int(num_bins.max())
    loads = np.where(np.arange(most) < num_bins[by_count, None], 0, CLOSED)
    room = np.full_like(loads, capacity)
    flat, flat_room, bins = loads.ravel(), room.ravel(), np.empty(len(sizes), dtype=np.int64)
    for first_bin, at in kth_rows(counts, by_count, most):
        size = sizes[at]
        cheapest = loads[: len(at)].argmin(axis=1)
        full = np.flatnonzero(flat_room[first_bin + cheapest] < size)
        if len(full):  # few: the cheapest bin is rarely a full one
            cheapest[full] = np.where(room[full] >= size[full, None], loads[full], CLOSED).argmin(axis=1)
        chosen = first_bin + cheapest
        fits = (flat[chosen] < CLOSED) & (flat_room[chosen] >= size)
        flat[chosen] += np.where(fits, costs[at], 0)
        flat_room[chosen] -= np.where(fits, size, 0)
        bins[at] = np.where(fits, cheapest, -1)
    return bins


def _costliest_first_heap(sizes: Ints, costs: Ints, num_bins: int, capacity: int) -> Ints:
    """`costliest_first` of one cell; all rows get bin -1 if one of them has no room."""
    ready = list(range(num_bins))  # heap; cost so far * num_bins + bin: one integer to compare
    waiting: list[tuple[int, int]] = []  # heap by room: too full for the current size
    room = [capacity] * num_bins
    bins = []
    for size, cost in zip(sizes.tolist(), costs.tolist(), strict=True):
        while waiting and -waiting[0][0] >= size:
            heappush(ready, heappop(waiting)[1])
        while ready and room[ready[0] % num_bins] < size:
            full = heappop(ready)
            heappush(waiting, (-room[full % num_bins], full))
        if not ready:
            return np.full(len(sizes), -1)
        b = ready[0] % num_bins
        heapreplace(ready, ready[0] + cost * num_bins)
        room[b] -= size
        bins.append(b)
    return np.array(bins, dtype=np.int64)
