"""Put rows into micro-batches under the layout's rule, for many cells at once (see `packing`).

Two functions, because ranks must agree on a number of micro-batches first: `pack` finds how few micro-batches hold the
rows of a cell, `spread` distributes the rows over a fixed number of them. Lengths are as collated (`min_row_tokens` or
more) and in descending order. A row over the budget (`over_long = "alone"`) gets a micro-batch of its own. Trees keep
prefix groups together if that takes less time, waiting included, than rows spread by length alone.
"""

import numpy as np

from raggedright.arrays import Ints, index_in_run, max_by, sum_by
from raggedright.plan import packing
from raggedright.plan.layout import Layout
from raggedright.plan.level import MANY_SLOTS, level, sort_bins, split_bins
from raggedright.plan.packing import bins_per_cell, cell_of_row, pack_padded, rows_of_cells, split_cells
from raggedright.plan.prefix_groups import PrefixGroups, costs_in_trees, keep_together

# Steps of the search for the smallest limit on the cost of a padded micro-batch.
COST_HALVINGS = 12
# Trees within this share of level are not compared with rows spread by length alone.
NEARLY_LEVEL = 32


def row_costs(lengths: Ints, layout: Layout) -> Ints:
    """Cost of each row by itself."""
    return lengths * (layout.cost_linear + layout.cost_quadratic * lengths)


def micro_batch_tokens(bins: Ints, lengths: Ints, num_bins: int, layout: Layout) -> Ints:
    """Tokens of each micro-batch as it is collated."""
    if layout.collate != "padded":
        return sum_by(bins, lengths, num_bins)
    return np.bincount(bins, minlength=num_bins) * max_by(bins, lengths, num_bins)


def micro_batch_costs(bins: Ints, lengths: Ints, num_bins: int, layout: Layout, groups: PrefixGroups | None) -> Ints:
    """Cost of each micro-batch as it is collated; with the prefix groups of its rows, the cost of their trees."""
    costs = row_costs(lengths, layout)
    if groups is not None:
        costs = costs_in_trees(bins, costs, row_costs(groups.shared, layout), groups.number)
    if layout.collate != "padded":
        return sum_by(bins, costs, num_bins)
    return np.bincount(bins, minlength=num_bins) * max_by(bins, costs, num_bins)


def pack(lengths: Ints, counts: Ints, layout: Layout, *, multiple: int) -> Ints:
    """Micro-batch of each row, with as few micro-batches in each cell as the packing finds."""
    if layout.collate == "padded":
        return pack_padded(_rows_that_fit(lengths, layout), counts)
    return packing.pack(_sizes(lengths, layout), counts, layout.capacity, multiple=multiple)


def spread(
    lengths: Ints,
    packed: Ints,
    counts: Ints,
    *,
    num_bins: Ints,
    width: int | None,
    layout: Layout,
    groups: PrefixGroups | None,
) -> Ints:
    """Micro-batch of each row, with `num_bins` in each cell, which is at least what `packed` has there.

    All micro-batches of a cell form one slot; with `width`, those of a single cell form slots of `width` (see `level`).
    """
    bins = np.where(num_bins[cell_of_row(counts)] == 1, 0, index_in_run(counts))
    cells = np.flatnonzero((counts > num_bins) & (num_bins > 1))
    if len(cells) == 0:
        return bins
    at, counts, num_bins = rows_of_cells(counts, cells), counts[cells], num_bins[cells]
    packed, costs, sizes = packed[at], row_costs(lengths[at], layout), _sizes(lengths[at], layout)
    if layout.collate == "padded":
        bins[at] = _spread_padded(costs, packed, _rows_that_fit(lengths[at], layout), counts, num_bins, width)
    elif groups is None:
        bins[at] = level(sizes, costs, packed, counts, num_bins, layout.capacity, width=width)
    else:
        bins[at] = _spread_trees(sizes, costs, groups.part(at), packed, counts, num_bins, width, layout)
    return bins


def _sizes(lengths: Ints, layout: Layout) -> Ints:
    if layout.micro_batch_tokens is None:
        return np.ones(len(lengths), dtype=np.int64)
    return np.minimum(lengths, layout.capacity)


def _rows_that_fit(lengths: Ints, layout: Layout) -> Ints:
    """For each row: how many rows fit a padded micro-batch of which it is the longest."""
    if layout.micro_batch_tokens is None:
        return np.full(len(lengths), layout.capacity)
    return np.maximum(layout.capacity // lengths, 1)


def _spread_padded(costs: Ints, packed: Ints, take: Ints, counts: Ints, num_bins: Ints, width: int | None) -> Ints:
    """Runs of neighbours in descending length, under the smallest limit on a micro-batch's cost that needs no more."""
    cell, most = cell_of_row(counts), int(num_bins.max())
    key, total = cell * most + packed, len(counts) * most
    low = costs[np.cumsum(counts) - counts]
    high = (np.bincount(key, minlength=total) * max_by(key, costs, total)).reshape(-1, most).max(axis=1)
    for _ in range(0 if width is not None and most > MANY_SLOTS * width else COST_HALVINGS):
        middle = (low + high) // 2
        shorter = pack_padded(np.minimum(take, np.maximum(middle[cell] // costs, 1)), counts)
        fits = bins_per_cell(shorter, counts) <= num_bins
        packed = np.where(fits[cell], shorter, packed)
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    packed = split_bins(packed, costs, counts, num_bins)
    key = cell * most + packed
    return sort_bins(packed, max_by(key, costs, total)[key], counts, num_bins)


def _spread_trees(
    sizes: Ints,
    costs: Ints,
    groups: PrefixGroups,
    packed: Ints,
    counts: Ints,
    num_bins: Ints,
    width: int | None,
    layout: Layout,
) -> Ints:
    """Prefix groups together, except in cells where rows spread by length alone take less time although they repeat."""
    bins, shared, ends = np.empty_like(sizes), row_costs(groups.shared, layout), np.cumsum(counts).tolist()
    cells = [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
    compared: dict[int, int | None] = {}  # time of the cells in question; None if the groups do not fit together
    for c, (at, n) in enumerate(zip(cells, num_bins.tolist(), strict=True)):
        size, cost, share, number = sizes[at], costs[at], shared[at], groups.number[at]
        together = keep_together(size, cost, share, number, num_bins=n, capacity=layout.capacity)
        if together is None:
            compared[c] = None
            continue
        in_trees, ranks = costs_in_trees(together, cost, share, number), width or n
        bins[at] = sort_bins(together, in_trees, counts[c : c + 1], num_bins[c : c + 1])
        time, total = _time(bins[at], in_trees, n, ranks), int(in_trees.sum())
        if time * ranks <= total + total // NEARLY_LEVEL:
            continue
        if time * ranks > costs_in_trees(packed[at], cost, share, number).sum():  # else the packing repeats more
            compared[c] = time
    if compared:
        chosen = np.array([*compared])
        at, in_cell = rows_of_cells(counts, chosen), counts[chosen]
        apart = level(sizes[at], costs[at], packed[at], in_cell, num_bins[chosen], layout.capacity, width=width)
        for (c, time), by_length in zip(compared.items(), split_cells(apart, in_cell), strict=True):
            at, n = cells[c], int(num_bins[c])
            in_trees = costs_in_trees(by_length, costs[at], shared[at], groups.number[at])
            if time is None or _time(by_length, in_trees, n, width or n) < time:
                bins[at] = by_length
    return bins


def _time(bins: Ints, costs: Ints, num_bins: int, width: int) -> int:
    """Of all slots, each as long as its most expensive bin."""
    return int(sum_by(bins, costs, num_bins).reshape(-1, width).max(axis=1).sum())
