"""How few micro-batches the rows need: bins of one capacity, filled with whole rows.

A cell is a set of rows that is packed separately: the rows of a step, or of one rank in a step. The functions here and
in `level` handle many cells in one call. Their arrays contain the rows of one cell after another, in descending size
within a cell, and `counts` is the number of rows of each cell. Bins are numbered from 0 in every cell. A size is the
number of tokens of a row, or 1 under a row-count rule, and never above the capacity. All arithmetic is in integers and
ties are broken by position, so every machine computes the same packing.

Note: the loops over rows exist twice, with equal results. A cell of a million rows needs heaps in plain Python; 16,000
cells of 60 rows need array operations, each over the k-th rows of all cells. `worth_arrays` chooses.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from raggedright.arrays import Ints, index_in_run, max_by, offsets, starts_run, sum_by

# The search for a tighter packing than first-fit-decreasing's is limited to a few milliseconds.
SEARCH_MAX_ROWS = 256
SEARCH_MAX_LOOKS = 30_000
# The cost of an array operation, and of a bin in it, compared with that of one row in plain Python.
CALL_COST = 16
BINS_PER_ROW = 1_024


def cell_of_row(counts: Ints) -> Ints:
    """Number of the cell of each row."""
    return np.repeat(np.arange(len(counts)), counts)


def rows_of_cells(counts: Ints, cells: Ints) -> Ints:
    """Positions of the rows of these cells."""
    starts = np.cumsum(counts) - counts
    return np.repeat(starts[cells], counts[cells]) + index_in_run(counts[cells])


def split_cells(values: Ints, counts: Ints) -> list[Ints]:
    """The values of each cell."""
    return np.split(values, np.cumsum(counts)[:-1])


def count_bins(bins: Ints) -> int:
    """Number of bins of one cell."""
    return int(bins.max(initial=-1)) + 1


def bins_per_cell(bins: Ints, counts: Ints) -> Ints:
    """Number of bins of each cell."""
    return max_by(cell_of_row(counts), bins + 1, len(counts))


def worth_arrays(counts: Ints, num_bins: Ints) -> bool:
    """Whether array operations over all cells are faster than a loop over their rows."""
    num_rows, most_bins = int(counts.sum()), int(num_bins.max(initial=0))
    return CALL_COST * int(counts.max(initial=0)) + num_rows * most_bins // BINS_PER_ROW < num_rows


def kth_rows(counts: Ints, by_count: Ints, num_bins: int) -> Iterator[tuple[Ints, Ints]]:
    """For k = 0, 1, ...: the first bin of each cell that has a k-th row, and the position of that row.

    Cells are in the order `by_count`, those with most rows first, and have `num_bins` bins each.
    """
    first_bin, starts = np.arange(len(counts)) * num_bins, (np.cumsum(counts) - counts)[by_count]
    for k in range(int(counts.max(initial=0))):
        num_cells = int(np.searchsorted(-counts[by_count], -k, side="left"))
        yield first_bin[:num_cells], starts[:num_cells] + k


def pack(sizes: Ints, counts: Ints, capacity: int, *, multiple: int) -> Ints:
    """Bin of each row, by first-fit-decreasing, improved where a tighter packing would save a whole `multiple`."""
    bins = np.zeros(len(sizes), dtype=np.int64)
    fewest = -(-sum_by(cell_of_row(counts), sizes, len(counts)) // capacity)
    large = np.flatnonzero(fewest > 1)
    if len(large) == 0:
        return bins
    at = rows_of_cells(counts, large)
    bins[at] = first_fit(sizes[at], counts[large], np.full(len(large), capacity))
    num_bins, starts = bins_per_cell(bins, counts), np.cumsum(counts) - counts
    saves = (counts <= SEARCH_MAX_ROWS) & (-(-num_bins // multiple) > -(-fewest // multiple))
    for cell in np.flatnonzero(saves).tolist():
        rows = slice(starts[cell], starts[cell] + counts[cell])
        tighter = fullest_bin_first(sizes[rows], capacity)
        if tighter is not None and count_bins(tighter) < num_bins[cell]:
            bins[rows] = tighter
    return bins


def first_fit(sizes: Ints, counts: Ints, capacity: Ints) -> Ints:
    """`first_fit_decreasing` of each cell with the capacity of that cell."""
    fewest = -(-sum_by(cell_of_row(counts), sizes, len(counts)) // capacity)
    if worth_arrays(counts, fewest):
        most = int(fewest.max())
        return _first_fit_arrays(sizes, counts, capacity, most + most // 4 + 1)
    cells = zip(split_cells(sizes, counts), capacity.tolist(), strict=True)
    return np.concatenate([first_fit_decreasing(size, limit) for size, limit in cells])


def _first_fit_arrays(sizes: Ints, counts: Ints, capacity: Ints, num_bins: int) -> Ints:
    by_count = np.argsort(-counts, kind="stable")
    room = np.repeat(capacity[by_count, None], num_bins, axis=1)
    flat, bins = room.ravel(), np.empty(len(sizes), dtype=np.int64)
    for first_bin, at in kth_rows(counts, by_count, num_bins):
        size = sizes[at]
        first = (room[: len(at)] >= size[:, None]).argmax(axis=1)
        flat[first_bin + first] -= size
        bins[at] = first
    return bins if room.min() >= 0 else _first_fit_arrays(sizes, counts, capacity, 2 * num_bins)


def first_fit_decreasing(sizes: Ints, capacity: int) -> Ints:
    """Bin of each row of one cell: the first bin with room for it, in descending order of size.

    Sizes only fall, so a bin that is too full for the current size waits until the sizes have fallen to its room.
    """
    values, counts = _runs(sizes)
    ready: list[int] = []  # heap of the bins with room for the current size
    waiting: dict[int, list[int]] = {}  # the other bins, by their room
    room: list[int] = []
    filled: list[int] = []  # bins in the order in which they get rows ...
    num_rows: list[int] = []  # ... and how many rows each time
    floor = capacity + 1
    for size, count in zip(values, counts, strict=True):
        if waiting:
            rooms = range(size, floor) if floor - size < len(waiting) else [r for r in waiting if r >= size]
            for r in rooms:
                for b in waiting.pop(r, ()):
                    heappush(ready, b)
        floor = size
        while count:
            if ready:
                b = ready[0]
            else:
                b = len(room)
                room.append(capacity)
                heappush(ready, b)
            take = min(room[b] // size, count)
            room[b] -= take * size
            filled.append(b)
            num_rows.append(take)
            count -= take
            if room[b] < size:
                heappop(ready)
                if room[b]:
                    waiting.setdefault(room[b], []).append(b)
    return np.repeat(np.array(filled, dtype=np.int64), np.array(num_rows, dtype=np.int64))


def _runs(sizes: Ints) -> tuple[list[int], list[int]]:
    """Each size that occurs, in order, and the number of rows that have it."""
    starts = np.flatnonzero(starts_run(sizes))
    return sizes[starts].tolist(), np.diff(np.append(starts, len(sizes))).tolist()


def fullest_bin_first(sizes: Ints, capacity: int, max_looks: int = SEARCH_MAX_LOOKS) -> Ints | None:
    """Bin of each row of one cell: each bin takes the largest row left and the set of others that leaves least room.

    It avoids a weakness of first-fit-decreasing, which puts equal rows together: 4+4, 3+3+3 and 3, where 4+3+3 twice
    would be full. None if the search would look at more than `max_looks` rows.
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
    """Positions, the first among them, whose sum is closest to the capacity (values descend), and the looks."""
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


def pack_padded(take: Ints, counts: Ints) -> Ints:
    """Bin of each row where a bin that starts at row i has at most `take[i]` rows, which are neighbours in the cell.

    With `take = capacity // length` this is the smallest number of padded micro-batches.
    """
    ends, is_start = np.cumsum(counts), np.zeros(len(take), dtype=np.int64)
    if worth_arrays(counts, counts[:0]):
        starts, cell_ends = (ends - counts)[counts > 0], ends[counts > 0]
        while len(starts):
            is_start[starts] = 1
            starts = starts + take[starts]
            starts, cell_ends = starts[starts < cell_ends], cell_ends[starts < cell_ends]
    else:
        next_start = np.minimum(np.arange(len(take)) + take, np.repeat(ends, counts)).data
        row = 0
        while row < len(next_start):
            is_start[row] = 1
            row = next_start[row]
    before = offsets(is_start)
    return before[1:] - 1 - np.repeat(before[ends - counts], counts)
