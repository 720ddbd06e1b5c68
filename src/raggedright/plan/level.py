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


def split_bins(bins: Ints, costs: Ints, num_bins: int) -> Ints:
    """Halve the dearest bins that hold two rows or more until there are `num_bins` of them."""
    bins = bins.copy()
    have = count_bins(bins)
    while have < num_bins:
        held = np.bincount(bins, minlength=have)
        dearest = np.argsort(-sum_by(bins, costs, have), kind="stable")
        halved = dearest[held[dearest] >= 2][: num_bins - have]
        if len(halved) == 0:
            break  # one row a bin: fewer rows than bins
        new_number = np.full(have, -1, dtype=np.int64)
        new_number[halved] = have + np.arange(len(halved))
        place = _place_in_bin(bins, held)
        moves = (new_number[bins] >= 0) & (place >= (held[bins] + 1) // 2)
        bins[moves] = new_number[bins[moves]]
        have += len(halved)
    return bins


def sort_into_slots(bins: Ints, costs: Ints, num_bins: int) -> Ints:
    """Number the bins anew by descending cost, so that neighbours share a slot."""
    dearest = np.argsort(-sum_by(bins, costs, num_bins), kind="stable")
    number = np.empty(num_bins, dtype=np.int64)
    number[dearest] = np.arange(num_bins)
    return number[bins]


def _place_in_bin(bins: Ints, held: Ints) -> Ints:
    """How many rows of its bin come before each row."""
    order = np.argsort(bins, kind="stable")
    place = np.empty(len(bins), dtype=np.int64)
    place[order] = np.arange(len(bins)) - np.repeat(np.cumsum(held) - held, held)
    return place


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
    ready = [(0, b) for b in range(num_bins)]  # heap by cost so far
    waiting: list[tuple[int, int, int]] = []  # heap by room: too full for the current size
    room = [capacity] * num_bins
    bins = []
    for size, cost in zip(sizes.tolist(), costs.tolist(), strict=True):
        while waiting and -waiting[0][0] >= size:
            heappush(ready, heappop(waiting)[1:])
        while ready and room[ready[0][1]] < size:
            so_far, b = heappop(ready)
            heappush(waiting, (-room[b], so_far, b))
        if not ready:
            return None
        so_far, b = ready[0]
        heapreplace(ready, (so_far + cost, b))
        room[b] -= size
        bins.append(b)
    return np.array(bins, dtype=np.int64)
