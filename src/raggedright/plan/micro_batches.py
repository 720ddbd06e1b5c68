"""Rows of a step, or of one rank in it, into micro-batches under the layout's rule.

Two moves, because ranks must agree on a count first: `pack` says how few micro-batches hold the rows, `spread`
lays the rows out over a given number of them, slot by slot. Lengths come in descending order and are
as collated (`min_row_tokens` at least). A row over the budget (`over_long = "alone"`) fills a micro-batch.
Trees are spread with kin together where that takes less time, waiting included, than rows spread by length alone.
"""

import numpy as np

from raggedright.arrays import Ints, max_by, sum_by
from raggedright.plan import packing
from raggedright.plan.kin import Kin, costs_in_trees, keep_together
from raggedright.plan.layout import Layout
from raggedright.plan.level import MANY_SLOTS, level, sort_into_slots, split_bins

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


def _spread_trees(sizes: Ints, costs: Ints, kin: Kin, packed: Ints, num_bins: int, width: int, layout: Layout) -> Ints:
    """Kin together, unless rows spread by length alone would take less time in spite of all they repeat."""
    shared, capacity = row_costs(kin.shared, layout), layout.capacity
    together = keep_together(sizes, costs, shared, kin.number, num_bins=num_bins, capacity=capacity)
    time = 0
    if together is not None:
        in_trees = costs_in_trees(together, costs, shared, kin.number)
        together = sort_into_slots(together, in_trees, num_bins)
        time, total = _time(together, in_trees, num_bins, width), int(in_trees.sum())
        if time * width <= total + total // NEARLY_LEVEL:
            return together
        if time * width <= costs_in_trees(packed, costs, shared, kin.number).sum():
            return together  # the packing repeats more than these wait
    apart = level(sizes, costs, packed, num_bins=num_bins, width=width, capacity=capacity)
    in_trees = costs_in_trees(apart, costs, shared, kin.number)
    return apart if together is None or _time(apart, in_trees, num_bins, width) < time else together


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


def _bins_from_starts(starts: Ints, num_rows: int) -> Ints:
    return np.repeat(np.arange(len(starts)), np.diff(np.append(starts, num_rows)))
