"""Many cells at once: a cell is the rows of one rank in one step, and a plan has steps x ranks of them.

The functions of `packing` and `level`, with the same answers: one array operation handles the k-th row, or bin, of
every cell. Arrays hold the rows of one cell after another, in descending size within a cell; `counts` is the number of
rows of each cell, and cells with more rows come first. Time and memory grow with cells x bins: `worth_arrays` says when
one cell after another is quicker.
"""

from collections.abc import Iterator

import numpy as np

from raggedright.arrays import Ints, max_by, offsets, sum_by, within

CLOSED = np.int64(2**63 - 1)  # the load of a bin that a cell does not have
# What an array operation and a bin cost, counted in rows handled one by one in plain Python.
CALL_COST = 16
BINS_PER_ROW = 1_024


def worth_arrays(counts: Ints, num_bins: Ints) -> bool:
    """Whether array operations over these cells are quicker than one cell after another."""
    num_rows, most = int(counts.sum()), int(num_bins.max(initial=0))
    return CALL_COST * int(counts.max(initial=0)) + num_rows * most // BINS_PER_ROW < num_rows


def cell_of_row(counts: Ints) -> Ints:
    """Number of the cell of each row."""
    return np.repeat(np.arange(len(counts)), counts)


def rows_of_cells(counts: Ints, cells: Ints) -> Ints:
    """Where the rows of these cells stand."""
    starts = np.cumsum(counts) - counts
    return np.repeat(starts[cells], counts[cells]) + within(counts[cells])


def bins_per_cell(bins: Ints, counts: Ints) -> Ints:
    """Bins of each cell, numbered from 0 without gaps."""
    return max_by(cell_of_row(counts), bins + 1, len(counts))


def first_fit_cells(sizes: Ints, counts: Ints, capacity: Ints) -> Ints:
    """`first_fit_decreasing` of each cell at its own capacity."""
    fewest = int((sum_by(cell_of_row(counts), sizes, len(counts)) // capacity).max()) + 1
    bins, fits = _first_fit_into(fewest + fewest // 4 + 1, sizes, counts, capacity)
    if not fits:  # two neighbouring bins hold more than one capacity, so twice the fewest is always enough
        bins, _ = _first_fit_into(2 * fewest, sizes, counts, capacity)
    return bins


def _first_fit_into(num_bins: int, sizes: Ints, counts: Ints, capacity: Ints) -> tuple[Ints, bool]:
    """Bin of each row, and whether so many bins are enough for every cell."""
    room = np.repeat(capacity[:, None], num_bins, axis=1)
    flat, bins = room.ravel(), np.empty(len(sizes), dtype=np.int64)
    for first_bin, at in _positions(counts, num_bins):
        size = sizes[at]
        first = (room[: len(at)] >= size[:, None]).argmax(axis=1)
        flat[first_bin + first] -= size
        bins[at] = first
    return bins, bool(room.min() >= 0)


def longest_first_cells(sizes: Ints, counts: Ints, num_bins: Ints) -> Ints:
    """Each row, in descending order, to the bin of its cell with the smallest sum so far."""
    most = int(num_bins.max())
    loads = np.where(np.arange(most) < num_bins[:, None], 0, CLOSED)
    flat, bins = loads.ravel(), np.empty(len(sizes), dtype=np.int64)
    for first_bin, at in _positions(counts, most):
        lightest = loads[: len(at)].argmin(axis=1)
        flat[first_bin + lightest] += sizes[at]
        bins[at] = lightest
    return bins


def dearest_first_cells(sizes: Ints, costs: Ints, counts: Ints, num_bins: Ints, capacity: int) -> Ints:
    """Each row to the cheapest bin of its cell with room for it; a row that finds no room has -1."""
    most = int(num_bins.max())
    so_far = np.where(np.arange(most) < num_bins[:, None], 0, CLOSED)
    room = np.full_like(so_far, capacity)
    flat, flat_room, bins = so_far.ravel(), room.ravel(), np.empty(len(sizes), dtype=np.int64)
    for first_bin, at in _positions(counts, most):
        size = sizes[at]
        cheapest = so_far[: len(at)].argmin(axis=1)
        full = np.flatnonzero(flat_room[first_bin + cheapest] < size)
        if len(full):  # few: the cheapest bin is seldom a full one
            cheapest[full] = np.where(room[full] >= size[full, None], so_far[full], CLOSED).argmin(axis=1)
        chosen = first_bin + cheapest
        found = (flat[chosen] < CLOSED) & (flat_room[chosen] >= size)
        flat[chosen] += np.where(found, costs[at], 0)
        flat_room[chosen] -= np.where(found, size, 0)
        bins[at] = np.where(found, cheapest, -1)
    return bins


def pack_padded_cells(take: Ints, counts: Ints) -> Ints:
    """Bin of each row where a bin led by row i holds at most `take[i]` rows, its neighbours in the cell."""
    ends = np.cumsum(counts)
    leads = np.zeros(len(take), dtype=np.int64)
    at, ends = (ends - counts)[counts > 0], ends[counts > 0]
    while len(at):
        leads[at] = 1
        at = at + take[at]
        at, ends = at[at < ends], ends[at < ends]
    before = offsets(leads)
    return before[1:] - 1 - np.repeat(before[np.cumsum(counts) - counts], counts)


def split_cells(bins: Ints, costs: Ints, counts: Ints, num_bins: Ints) -> Ints:
    """Halve the dearest bins of each cell that hold two rows or more until it has its `num_bins`."""
    most, cell = int(num_bins.max(initial=1)), cell_of_row(counts)
    bins, have = bins.copy(), bins_per_cell(bins, counts)
    while (have < num_bins).any():
        key = cell * most + bins
        held = np.bincount(key, minlength=len(counts) * most)
        dearest = np.argsort(-sum_by(key, costs, len(held)).reshape(-1, most), axis=1, kind="stable")
        halved = np.take_along_axis(held.reshape(-1, most), dearest, axis=1) >= 2
        number = np.cumsum(halved, axis=1)
        halved &= number <= (num_bins - have)[:, None]
        if not halved.any():
            break  # one row per bin: fewer rows than bins
        new_number = np.full((len(counts), most), -1)
        in_cell, place = np.nonzero(halved)
        new_number[in_cell, dearest[in_cell, place]] = (have[:, None] + number - 1)[in_cell, place]
        moves = (new_number.ravel()[key] >= 0) & (_place_in_bin(key, held) >= (held[key] + 1) // 2)
        bins[moves] = new_number.ravel()[key[moves]]
        have += halved.sum(axis=1)
    return bins


def sort_cells(bins: Ints, costs: Ints, counts: Ints, num_bins: Ints) -> Ints:
    """Number the bins of each cell again by descending cost; ties keep their order."""
    most = int(num_bins.max(initial=1))
    key = cell_of_row(counts) * most + bins
    dearest = np.argsort(-sum_by(key, costs, len(counts) * most).reshape(-1, most), axis=1, kind="stable")
    number = np.empty_like(dearest)
    np.put_along_axis(number, dearest, np.arange(most)[None, :], axis=1)
    return number.ravel()[key]


def _place_in_bin(bins: Ints, held: Ints) -> Ints:
    """How many rows of its bin come before each row."""
    order = np.argsort(bins, kind="stable")
    place = np.empty(len(bins), dtype=np.int64)
    place[order] = np.arange(len(bins)) - np.repeat(np.cumsum(held) - held, held)
    return place


def _positions(counts: Ints, bins_per_cell: int) -> Iterator[tuple[Ints, Ints]]:
    """For k = 0, 1, ...: the first bin of each cell that has a k-th row, and where this row stands."""
    first_bin, starts = np.arange(len(counts)) * bins_per_cell, np.cumsum(counts) - counts
    for k in range(int(counts.max(initial=0))):
        have = int(np.searchsorted(-counts, -k, side="left"))
        yield first_bin[:have], starts[:have] + k
