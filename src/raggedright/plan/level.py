"""Spread rows over a given number of bins so that ranks in lock-step wait for each other as little as possible.

`width` bins form a slot and run side by side, so a slot takes as long as its dearest bin: bins of one slot
should cost alike, slots may differ. The answer numbers bins by slot (bin // width), dearest slot first.

Invariants: every bin gets a row where there are enough, no bin exceeds its capacity, ties are broken by
position, all arithmetic is in integers. Rows come in descending size; costs descend with them.

The surprise: levelling by cost outright would overfill bins of short rows (quadratic attention makes a long
row's token dearer), so sizes are levelled first, over all bins, and costs second, within each slot.
"""

from bisect import bisect_left
from heapq import heappop, heappush, heapreplace

import numpy as np

from raggedright.arrays import Ints, sum_by
from raggedright.plan.cells import (
    bins_per_cell,
    cell_of_row,
    dearest_first_cells,
    first_fit_cells,
    longest_first_cells,
    rows_of_cells,
    sort_cells,
    split_cells,
)
from raggedright.plan.packing import count_bins, first_fit_decreasing

# With more slots than this, neighbours in a sorted list of bins cost the same to a fraction of a percent.
MANY_SLOTS = 400
# Halvings of the capacity's slack when rows fit too tightly for plain levelling.
TIGHTENINGS = 4
# Bins, and the share of them that a round reaches, below which a heap is quicker than rounds of array operations.
HEAP_BELOW = 32
# A slot within a thousandth of level is left as it is.
LEVEL_ENOUGH = 1_000


def level(sizes: Ints, costs: Ints, packing: Ints, *, num_bins: int, width: int, capacity: int) -> Ints:
    """Bin of each row: `num_bins` bins in slots of `width`; `packing` is a way to fit them in at most that many."""
    if num_bins > MANY_SLOTS * width:
        return sort_into_slots(split_bins(packing, costs, num_bins), costs, num_bins)
    bins = _level_sizes(sizes, costs, packing, num_bins, width, capacity)
    bins = sort_into_slots(bins, costs, num_bins)
    return _level_slots(bins, sizes, costs, num_bins, width, capacity)


def level_cells(sizes: Ints, costs: Ints, packing: Ints, counts: Ints, num_bins: Ints, capacity: int) -> Ints:
    """`level` of each cell (see `cells`), all of whose bins form one slot."""
    cell, most = cell_of_row(counts), int(num_bins.max())
    bins = longest_first_cells(sizes, counts, num_bins)
    loads = sum_by(cell * most + bins, sizes, len(counts) * most).reshape(-1, most)
    over = np.flatnonzero(loads.max(axis=1) > capacity)
    if len(over):
        at, held = rows_of_cells(counts, over), counts[over]
        tighter = _tighten_cells(sizes[at], packing[at], held, num_bins[over], capacity)
        bins[at] = split_cells(tighter, costs[at], held, num_bins[over])
    bins = sort_cells(bins, costs, counts, num_bins)
    bin_costs = sum_by(cell * most + bins, costs, len(counts) * most).reshape(-1, most)
    slot_cost, mean = bin_costs.max(axis=1), bin_costs.sum(axis=1) // num_bins
    uneven = np.flatnonzero(slot_cost - mean > mean // LEVEL_ENOUGH)
    if len(uneven):
        at, held = rows_of_cells(counts, uneven), counts[uneven]
        dealt = dearest_first_cells(sizes[at], costs[at], held, num_bins[uneven], capacity)
        new = cell_of_row(held)
        room = np.bincount(new, dealt < 0, len(uneven)) == 0
        new_costs = sum_by(new * most + np.maximum(dealt, 0), costs[at], len(uneven) * most).reshape(-1, most)
        better = room & (new_costs.max(axis=1) < slot_cost[uneven])
        bins[at[better[new]]] = dealt[better[new]]
    return bins


def split_bins(bins: Ints, costs: Ints, num_bins: int) -> Ints:
    """Halve the dearest bins that hold two rows or more until there are `num_bins` of them."""
    return split_cells(bins, costs, np.array([len(bins)]), np.array([num_bins]))


def sort_into_slots(bins: Ints, costs: Ints, num_bins: int) -> Ints:
    """Number the bins again by descending cost, so that neighbours share a slot."""
    return sort_cells(bins, costs, np.array([len(bins)]), np.array([num_bins]))


def _level_sizes(sizes: Ints, costs: Ints, packing: Ints, num_bins: int, width: int, capacity: int) -> Ints:
    """Bins of like size: the longest rows seed slots of their own, the others go to the emptiest bin."""
    for bins in (_seed_slots(sizes, costs, num_bins, width, capacity), np.full(len(sizes), -1, dtype=np.int64)):
        num_seeded = count_bins(bins)
        rest = bins < 0
        if rest.sum() < num_bins - num_seeded:
            continue  # the seeded slots would leave other bins empty
        bins[rest] = num_seeded + _longest_first(sizes[rest], num_bins - num_seeded)
        if sum_by(bins, sizes, num_bins).max() <= capacity:
            return bins
    return split_bins(_tighten(sizes, packing, num_bins, capacity), costs, num_bins)


def _seed_slots(sizes: Ints, costs: Ints, num_bins: int, width: int, capacity: int) -> Ints:
    """While the dearest row left costs more than an average bin, its slot can be no cheaper: fill that slot up.

    The `width` longest rows left each start a bin, and each bin takes the largest rows that fit its room
    and stay below the slot's dearest row. Rows that no such slot takes have bin -1.
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


def _longest_first(values: Ints, num_bins: int) -> Ints:
    """Each row, in descending order, to the bin with the smallest sum so far.

    The lightest bins take the next rows together, up to the first that would find a bin of this round lighter
    again. Where rounds are short, a heap deals the rows that are left; both give the same answer.
    """
    bins = np.empty(len(values), dtype=np.int64)
    values = values * num_bins
    loads = np.arange(num_bins)  # ascending; sum * num_bins + bin: one integer to compare
    dealt, worth_it = 0, num_bins >= HEAP_BELOW
    while worth_it and dealt < len(values):
        batch = values[dealt : dealt + num_bins]
        before = loads[: len(batch)]
        after = before + batch
        too_late = before[1:] > np.minimum.accumulate(after)[:-1]
        take = int(too_late.argmax()) + 1 if too_late.any() else len(batch)
        bins[dealt : dealt + take] = before[:take] % num_bins
        loads[:take] = after[:take]
        loads.sort(kind="stable")
        dealt, worth_it = dealt + take, take * HEAP_BELOW >= num_bins
    heap, rest = loads.tolist(), []
    for value in values[dealt:].tolist():
        lightest = heap[0]
        rest.append(lightest % num_bins)
        heapreplace(heap, lightest + value)
    bins[dealt:] = rest
    return bins


def _tighten(sizes: Ints, packing: Ints, num_bins: int, capacity: int) -> Ints:
    """First-fit-decreasing at the smallest capacity, to a sixteenth of the slack, that still needs no more bins."""
    low, high = -(-int(sizes.sum()) // num_bins), capacity
    for _ in range(TIGHTENINGS):
        middle = (low + high) // 2
        if middle < sizes[0]:
            break
        tighter = first_fit_decreasing(sizes, middle)
        if count_bins(tighter) <= num_bins:
            packing, high = tighter, middle
        else:
            low = middle
    return packing


def _tighten_cells(sizes: Ints, packing: Ints, counts: Ints, num_bins: Ints, capacity: int) -> Ints:
    """`_tighten` of each cell."""
    packing, longest = packing.copy(), sizes[np.cumsum(counts) - counts]
    low = -(-sum_by(cell_of_row(counts), sizes, len(counts)) // num_bins)
    high, tries = np.full(len(counts), capacity), np.arange(len(counts))
    for _ in range(TIGHTENINGS):
        tries = tries[(low + high)[tries] // 2 >= longest[tries]]
        if len(tries) == 0:
            break
        at, middle = rows_of_cells(counts, tries), (low + high)[tries] // 2
        tighter = first_fit_cells(sizes[at], counts[tries], middle)
        fits = bins_per_cell(tighter, counts[tries]) <= num_bins[tries]
        kept = np.repeat(fits, counts[tries])
        packing[at[kept]] = tighter[kept]
        high[tries[fits]], low[tries[~fits]] = middle[fits], middle[~fits]
    return packing


def _level_slots(bins: Ints, sizes: Ints, costs: Ints, num_bins: int, width: int, capacity: int) -> Ints:
    """Within each slot, deal the rows anew by cost where that makes the slot cheaper."""
    slot = bins // width
    order = np.argsort(slot, kind="stable")  # keeps the descending order of size within a slot
    ends = np.cumsum(np.bincount(slot, minlength=num_bins // width))
    bin_costs = sum_by(bins, costs, num_bins).reshape(-1, width)
    slot_cost, mean = bin_costs.max(axis=1), bin_costs.sum(axis=1) // width
    uneven = slot_cost - mean > mean // LEVEL_ENOUGH
    bins = bins.copy()
    rows_of_slot = np.split(order, ends[:-1])
    for j in np.flatnonzero(uneven).tolist():
        rows = rows_of_slot[j]
        dealt = _dearest_first(sizes[rows], costs[rows], width, capacity)
        if dealt is not None and sum_by(dealt, costs[rows], width).max() < slot_cost[j]:
            bins[rows] = j * width + dealt
    return bins


def _dearest_first(sizes: Ints, costs: Ints, num_bins: int, capacity: int) -> Ints | None:
    """Each row to the cheapest bin with room for it; None where a row finds no room."""
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
            return None
        b = ready[0] % num_bins
        heapreplace(ready, ready[0] + cost * num_bins)
        room[b] -= size
        bins.append(b)
    return np.array(bins, dtype=np.int64)
