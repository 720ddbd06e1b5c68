"""How few micro-batches a set of rows needs: bins of one capacity, filled by whole rows.

Decides the count; `level` then spreads the rows over that many bins by cost. A packed micro-batch holds the
sum of its rows' sizes (a size is a row's tokens, or 1 under a row-count rule), a padded one its row count
times its longest row. Every function takes sizes in descending order and no size above the capacity, works
in integers, and breaks ties by position, so that every machine packs alike.

The surprise: first-fit-decreasing is exact here in the order of its bins, yet costs about O(n log n) in
plain Python, because sizes only fall: a bin too full for the current size waits, sorted by its room, until
sizes have fallen to it.
"""

from heapq import heappop, heappush

import numpy as np

from raggedright.arrays import Ints, sum_by
from raggedright.plan.cells import bins_per_cell, cell_of_row

# The search for a tighter packing than first-fit-decreasing's is for small steps, where one micro-batch in a few is
# worth it, and looks at no more rows than this in all: a few milliseconds.
SEARCH_MAX_ROWS = 256
SEARCH_MAX_LOOKS = 30_000


def pack(sizes: Ints, capacity: int, *, multiple: int) -> Ints:
    """Bin of each row, by first-fit-decreasing, improved where a tighter packing would save a whole `multiple`."""
    if int(sizes.sum()) <= capacity:
        return np.zeros(len(sizes), dtype=np.int64)
    return improve(first_fit_decreasing(sizes, capacity), sizes, capacity, multiple=multiple)


def improve(bins: Ints, sizes: Ints, capacity: int, *, multiple: int) -> Ints:
    """A tighter packing of a small step where it would save a whole `multiple`, else the given one."""
    num_bins, fewest = count_bins(bins), -(-int(sizes.sum()) // capacity)
    if len(sizes) <= SEARCH_MAX_ROWS and -(-num_bins // multiple) > -(-fewest // multiple):
        tighter = fullest_bin_first(sizes, capacity)
        if tighter is not None and count_bins(tighter) < num_bins:
            return tighter
    return bins


def improve_cells(bins: Ints, sizes: Ints, counts: Ints, capacity: int, *, multiple: int) -> Ints:
    """`improve` of each cell (see `cells`)."""
    num_bins = bins_per_cell(bins, counts)
    fewest = -(-sum_by(cell_of_row(counts), sizes, len(counts)) // capacity)
    ends = np.cumsum(counts)
    for c in np.flatnonzero((counts <= SEARCH_MAX_ROWS) & (-(-num_bins // multiple) > -(-fewest // multiple))).tolist():
        part = slice(ends[c] - counts[c], ends[c])
        bins[part] = improve(bins[part], sizes[part], capacity, multiple=multiple)
    return bins


def count_bins(bins: Ints) -> int:
    """Bins are numbered from 0 without gaps."""
    return int(bins.max()) + 1 if len(bins) else 0


def first_fit_decreasing(sizes: Ints, capacity: int) -> Ints:
    """Bin of each row: the first bin with room for it, in descending order of size."""
    values, counts = _runs(sizes)
    ready: list[int] = []  # heap of the bins with room for the current size
    waiting: dict[int, list[int]] = {}  # room -> bins that have just that much, less than the current size
    room: list[int] = []
    filled: list[int] = []  # the bins in the order in which they are given rows ...
    given: list[int] = []  # ... and how many rows each time
    floor = capacity + 1
    for size, count in zip(values, counts, strict=True):
        if waiting:
            rooms = range(size, floor) if floor - size < len(waiting) else [r for r in waiting if r >= size]
            for r in rooms:
                for b in waiting.pop(r, ()):
                    heappush(ready, b)
        floor = size
        while count and ready:
            b = ready[0]
            take = min(room[b] // size, count)
            left = room[b] - take * size
            room[b] = left
            filled.append(b)
            given.append(take)
            count -= take
            if left < size:
                heappop(ready)
                if left:
                    waiting.setdefault(left, []).append(b)
        while count:
            take = min(capacity // size, count)
            left = capacity - take * size
            b = len(room)
            room.append(left)
            filled.append(b)
            given.append(take)
            count -= take
            if left >= size:
                heappush(ready, b)
            elif left:
                waiting.setdefault(left, []).append(b)
    return np.repeat(np.array(filled, dtype=np.int64), np.array(given, dtype=np.int64))


def fullest_bin_first(sizes: Ints, capacity: int, max_looks: int = SEARCH_MAX_LOOKS) -> Ints | None:
    """Bin of each row: each bin takes the largest row left and the set of others that leaves least room.

    It repairs first-fit-decreasing's habit of pairing equals (4+4 beside 3+3+3 and 3, where 4+3+3 twice is full). None
    where the search would look at more than `max_looks` rows.
    """
    bins = np.full(len(sizes), -1, dtype=np.int64)
    left = list(range(len(sizes)))
    values = sizes.tolist()
    number = 0
    while left:
        chosen, looks = _fullest([values[i] for i in left], capacity, max_looks)
        max_looks -= looks
        if max_looks <= 0:
            return None
        bins[[left[j] for j in chosen]] = number
        taken = set(chosen)
        left = [i for j, i in enumerate(left) if j not in taken]
        number += 1
    return bins


def _fullest(values: list[int], capacity: int, max_looks: int) -> tuple[list[int], int]:
    """Positions, the first among them, whose sum comes closest to the capacity (values descend), and the looks."""
    best, best_sum, looks = [0], values[0], 0
    stack = [([0], values[0])]
    while stack and best_sum < capacity and looks < max_looks:
        chosen, total = stack.pop()
        if total > best_sum:
            best, best_sum = chosen, total
        branches = []
        previous = 0
        looks += len(values) - chosen[-1]
        for j in range(chosen[-1] + 1, len(values)):
            if values[j] != previous and total + values[j] <= capacity:
                branches.append(([*chosen, j], total + values[j]))
            previous = values[j]
        stack.extend(reversed(branches))
    return best, looks


def pack_padded(take: Ints) -> Ints:
    """First row of each bin where a bin led by row i holds at most `take[i]` rows, its neighbours in the order.

    With `take = capacity // length` this is the least number of padded micro-batches.
    """
    starts, position, num_rows = [], 0, len(take)
    limits = take.tolist()
    while position < num_rows:
        starts.append(position)
        position += limits[position]
    return np.array(starts, dtype=np.int64)


def _runs(sizes: Ints) -> tuple[list[int], list[int]]:
    if len(sizes) == 0:
        return [], []
    starts = np.flatnonzero(np.concatenate(([True], sizes[1:] != sizes[:-1])))
    return sizes[starts].tolist(), np.diff(np.append(starts, len(sizes))).tolist()
