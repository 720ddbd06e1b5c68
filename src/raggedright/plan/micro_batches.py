"""Rows of a step, or of one rank in it, into micro-batches under the layout's rule.

Two moves, because ranks must agree on a count first: `pack` says how few micro-batches hold the rows, `spread`
lays the rows out over a given number of them, slot by slot. Lengths come in descending order and are
as collated (`min_row_tokens` at least). A row over the budget (`over_long = "alone"`) fills a micro-batch.
Trees are spread with kin together where that takes less time, waiting included, than rows spread by length alone.
"""

import numpy as np

from raggedright.arrays import Ints, max_by, offsets, sum_by, within
from raggedright.plan import packing
from raggedright.plan.cells import (
    bins_per_cell,
    cell_of_row,
    first_fit_cells,
    pack_padded_cells,
    rows_of_cells,
    sort_cells,
    split_cells,
    worth_arrays,
)
from raggedright.plan.kin import Kin, costs_in_trees, keep_together
from raggedright.plan.layout import Layout
from raggedright.plan.level import MANY_SLOTS, level, level_cells, sort_into_slots, split_bins

# Steps of the search for the least bound on a padded micro-batch's cost.
COST_HALVINGS = 12
# Trees within this part of level are not compared with another way to spread their rows.
NEARLY_LEVEL = 32


def row_costs(lengths: Ints, layout: Layout) -> Ints:
    """Cost of each row on its own."""
    return lengths * (layout.cost_linear + layout.cost_quadratic * lengths)


def micro_batch_tokens(bins: Ints, lengths: Ints, num_bins: int, layout: Layout) -> Ints:
    """Tokens of each micro-batch as it is collated."""
    if layout.collate != "padded":
        return sum_by(bins, lengths, num_bins)
    return np.bincount(bins, minlength=num_bins) * max_by(bins, lengths, num_bins)


def micro_batch_costs(bins: Ints, lengths: Ints, num_bins: int, layout: Layout, kin: Kin | None = None) -> Ints:
    """Cost of each micro-batch as it is collated; given the kin among its rows, of their trees."""
    costs = row_costs(lengths, layout)
    if kin is not None:
        costs = costs_in_trees(bins, costs, row_costs(kin.shared, layout), kin.number)
    if layout.collate != "padded":
        return sum_by(bins, costs, num_bins)
    return np.bincount(bins, minlength=num_bins) * max_by(bins, costs, num_bins)


def pack(lengths: Ints, layout: Layout, *, multiple: int) -> Ints:
    """Micro-batch of each row where there are as few as the packing finds."""
    if layout.collate != "padded":
        return packing.pack(_sizes(lengths, layout), layout.capacity, multiple=multiple)
    starts = packing.pack_padded(_take(lengths, layout))
    return _bins_from_starts(starts, len(lengths))


def spread(lengths: Ints, packed: Ints, *, num_bins: int, width: int, layout: Layout, kin: Kin | None = None) -> Ints:
    """Micro-batch of each row, numbered by slot (bin // width), given a packing into at most `num_bins`."""
    if len(lengths) <= num_bins:
        return np.arange(len(lengths))
    if num_bins == 1:
        return np.zeros(len(lengths), dtype=np.int64)
    costs = row_costs(lengths, layout)
    if layout.collate == "padded":
        return _spread_padded(costs, packed, _take(lengths, layout), num_bins, width)
    sizes, capacity = _sizes(lengths, layout), layout.capacity
    if kin is None:
        return level(sizes, costs, packed, num_bins=num_bins, width=width, capacity=capacity)
    return _spread_trees(sizes, costs, kin, packed, num_bins, width, layout)


def pack_cells(lengths: Ints, counts: Ints, layout: Layout, *, multiple: int) -> Ints:
    """`pack` of each cell: `counts` rows of `lengths`, one cell after another (see `cells`)."""
    sizes, capacity = _sizes(lengths, layout), layout.capacity
    fewest = -(-sum_by(cell_of_row(counts), sizes, len(counts)) // capacity)
    bins = np.zeros(len(lengths), dtype=np.int64)
    chosen = np.flatnonzero(fewest > 1 if layout.collate != "padded" else counts > 1)
    chosen = chosen[np.argsort(-counts[chosen], kind="stable")]
    if len(chosen) == 0:
        return bins
    at, held = rows_of_cells(counts, chosen), counts[chosen]
    if not worth_arrays(held, fewest[chosen]):
        ends = offsets(held)[1:-1]
        bins[at] = np.concatenate([pack(part, layout, multiple=multiple) for part in np.split(lengths[at], ends)])
    elif layout.collate == "padded":
        bins[at] = pack_padded_cells(_take(lengths[at], layout), held)
    else:
        found = first_fit_cells(sizes[at], held, np.full(len(held), capacity))
        bins[at] = packing.improve_cells(found, sizes[at], held, capacity, multiple=multiple)
    return bins


def spread_cells(
    lengths: Ints, packed: Ints, counts: Ints, *, num_bins: Ints, layout: Layout, kin: Kin | None = None
) -> Ints:
    """`spread` of each cell over its own number of bins, which all form one slot."""
    bins = np.where(num_bins[cell_of_row(counts)] == 1, 0, within(counts))
    chosen = np.flatnonzero((counts > num_bins) & (num_bins > 1))
    chosen = chosen[np.argsort(-counts[chosen], kind="stable")]
    if len(chosen) == 0:
        return bins
    at, held, most = rows_of_cells(counts, chosen), counts[chosen], num_bins[chosen]
    length, packed = lengths[at], packed[at]
    if not worth_arrays(held, most):
        ends = offsets(held)[1:-1]
        parts = zip(np.split(length, ends), np.split(packed, ends), np.split(at, ends), most.tolist(), strict=True)
        bins[at] = np.concatenate([
            spread(part, found, num_bins=n, width=n, layout=layout, kin=kin and kin.part(where))
            for part, found, where, n in parts
        ])  # fmt: skip
    elif layout.collate == "padded":
        bins[at] = _spread_padded_cells(row_costs(length, layout), packed, _take(length, layout), held, most)
    elif kin is not None:
        sizes, costs = _sizes(length, layout), row_costs(length, layout)
        bins[at] = _spread_trees_cells(sizes, costs, kin.part(at), packed, held, most, layout)
    else:
        sizes, costs = _sizes(length, layout), row_costs(length, layout)
        bins[at] = level_cells(sizes, costs, packed, held, most, layout.capacity)
    return bins


def _spread_trees(sizes: Ints, costs: Ints, kin: Kin, packed: Ints, num_bins: int, width: int, layout: Layout) -> Ints:
    """Kin together, unless rows spread by length alone would take less time in spite of all they repeat."""
    together, time = _trees_together(sizes, costs, kin, packed, num_bins, width, layout)
    if together is not None and time is None:
        return together
    apart = level(sizes, costs, packed, num_bins=num_bins, width=width, capacity=layout.capacity)
    return _quicker_trees(together, time, apart, costs, kin, num_bins, width, layout)


def _spread_trees_cells(
    sizes: Ints, costs: Ints, kin: Kin, packed: Ints, counts: Ints, num_bins: Ints, layout: Layout
) -> Ints:
    """`_spread_trees` of each cell."""
    bins, ends = np.empty(len(sizes), dtype=np.int64), np.cumsum(counts).tolist()
    compared: dict[int, tuple[Ints | None, int | None]] = {}
    parts = [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
    for c, (at, n) in enumerate(zip(parts, num_bins.tolist(), strict=True)):
        found = _trees_together(sizes[at], costs[at], kin.part(at), packed[at], n, n, layout)
        if found[0] is not None and found[1] is None:
            bins[at] = found[0]
        else:
            compared[c] = found
    chosen = np.array([*compared], dtype=np.int64)
    if len(chosen) == 0:
        return bins
    rows, held = rows_of_cells(counts, chosen), counts[chosen]
    bins[rows] = level_cells(sizes[rows], costs[rows], packed[rows], held, num_bins[chosen], layout.capacity)
    for c, (together, time) in compared.items():
        at, n = parts[c], int(num_bins[c])
        bins[at] = _quicker_trees(together, time, bins[at], costs[at], kin.part(at), n, n, layout)
    return bins


def _trees_together(
    sizes: Ints, costs: Ints, kin: Kin, packed: Ints, num_bins: int, width: int, layout: Layout
) -> tuple[Ints | None, int | None]:
    """Kin together, if they fit so, and their time, if rows spread by length alone might take less."""
    shared = row_costs(kin.shared, layout)
    together = keep_together(sizes, costs, shared, kin.number, num_bins=num_bins, capacity=layout.capacity)
    if together is None:
        return None, None
    in_trees = costs_in_trees(together, costs, shared, kin.number)
    together = sort_into_slots(together, in_trees, num_bins)
    time, total = _time(together, in_trees, num_bins, width), int(in_trees.sum())
    if time * width <= total + total // NEARLY_LEVEL:
        return together, None
    if time * width <= costs_in_trees(packed, costs, shared, kin.number).sum():
        return together, None  # the packing repeats more than these wait
    return together, time


def _quicker_trees(
    together: Ints | None,
    time: int | None,
    apart: Ints,
    costs: Ints,
    kin: Kin,
    num_bins: int,
    width: int,
    layout: Layout,
) -> Ints:
    """Rows spread by length alone, if they take less time."""
    if together is None or time is None:
        return apart
    in_trees = costs_in_trees(apart, costs, row_costs(kin.shared, layout), kin.number)
    return apart if _time(apart, in_trees, num_bins, width) < time else together


def _time(bins: Ints, costs: Ints, num_bins: int, width: int) -> int:
    """Of all slots, each as long as its dearest bin."""
    return int(sum_by(bins, costs, num_bins).reshape(-1, width).max(axis=1).sum())


def _sizes(lengths: Ints, layout: Layout) -> Ints:
    if layout.micro_batch_tokens is None:
        return np.ones(len(lengths), dtype=np.int64)
    return np.minimum(lengths, layout.capacity)


def _take(lengths: Ints, layout: Layout) -> Ints:
    """How many rows fit a padded micro-batch that each row leads."""
    if layout.micro_batch_tokens is None:
        return np.full(len(lengths), layout.capacity)
    return np.maximum(layout.capacity // lengths, 1)


def _spread_padded(costs: Ints, packed: Ints, take: Ints, num_bins: int, width: int) -> Ints:
    """Runs of neighbours in descending length, under the least bound on a micro-batch's cost that needs no more."""
    low, high = int(costs[0]), int((np.bincount(packed) * max_by(packed, costs, packing.count_bins(packed))).max())
    for _ in range(COST_HALVINGS if num_bins <= MANY_SLOTS * width else 0):
        middle = (low + high) // 2
        starts = packing.pack_padded(np.minimum(take, np.maximum(middle // costs, 1)))
        if len(starts) <= num_bins:
            packed, high = _bins_from_starts(starts, len(costs)), middle
        else:
            low = middle
    packed = split_bins(packed, costs, num_bins)
    longest = max_by(packed, costs, num_bins)
    return sort_into_slots(packed, longest[packed], num_bins)


def _spread_padded_cells(costs: Ints, packed: Ints, take: Ints, counts: Ints, num_bins: Ints) -> Ints:
    """`_spread_padded` of each cell."""
    cell, most = cell_of_row(counts), int(num_bins.max())
    key, total = cell * most + packed, len(counts) * most
    low = costs[np.cumsum(counts) - counts]
    high = (np.bincount(key, minlength=total) * max_by(key, costs, total)).reshape(-1, most).max(axis=1)
    for _ in range(COST_HALVINGS):
        middle = (low + high) // 2
        found = pack_padded_cells(np.minimum(take, np.maximum(middle[cell] // costs, 1)), counts)
        fits = bins_per_cell(found, counts) <= num_bins
        packed = np.where(fits[cell], found, packed)
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    packed = split_cells(packed, costs, counts, num_bins)
    key = cell * most + packed
    return sort_cells(packed, max_by(key, costs, total)[key], counts, num_bins)


def _bins_from_starts(starts: Ints, num_rows: int) -> Ints:
    return np.repeat(np.arange(len(starts)), np.diff(np.append(starts, num_rows)))
