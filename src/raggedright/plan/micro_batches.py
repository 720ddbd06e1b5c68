"""Rows of a step, or of one rank in it, into micro-batches under the layout's rule.

Two moves, because ranks must agree on a count first: `pack` says how few micro-batches hold the rows, `spread`
lays the rows out over a given number of them, slot by slot. Lengths come in descending order and are
as collated (`min_row_tokens` at least). A row over the budget (`over_long = "alone"`) fills a micro-batch.
"""

import numpy as np

from raggedright.arrays import Ints, max_by, sum_by
from raggedright.plan import packing
from raggedright.plan.layout import Layout
from raggedright.plan.level import MANY_SLOTS, level, sort_into_slots, split_bins

# Steps of the search for the least bound on a padded micro-batch's cost.
COST_HALVINGS = 12


def row_costs(lengths: Ints, layout: Layout) -> Ints:
    """Cost of each row on its own."""
    return lengths * (layout.cost_linear + layout.cost_quadratic * lengths)


def micro_batch_tokens(bins: Ints, lengths: Ints, num_bins: int, layout: Layout) -> Ints:
    """Tokens of each micro-batch as it is collated."""
    if layout.collate != "padded":
        return sum_by(bins, lengths, num_bins)
    return np.bincount(bins, minlength=num_bins) * max_by(bins, lengths, num_bins)


def micro_batch_costs(bins: Ints, lengths: Ints, num_bins: int, layout: Layout) -> Ints:
    """Cost of each micro-batch as it is collated."""
    costs = row_costs(lengths, layout)
    if layout.collate != "padded":
        return sum_by(bins, costs, num_bins)
    return np.bincount(bins, minlength=num_bins) * max_by(bins, costs, num_bins)


def pack(lengths: Ints, layout: Layout, *, multiple: int) -> Ints:
    """Micro-batch of each row where there are as few as the packing finds."""
    if layout.collate != "padded":
        return packing.pack(_sizes(lengths, layout), layout.capacity, multiple=multiple)
    starts = packing.pack_padded(_take(lengths, layout))
    return _bins_from_starts(starts, len(lengths))


def spread(lengths: Ints, packed: Ints, *, num_bins: int, width: int, layout: Layout) -> Ints:
    """Micro-batch of each row, numbered by slot (bin // width), given a packing into at most `num_bins`."""
    if len(lengths) <= num_bins:
        return np.arange(len(lengths))
    costs = row_costs(lengths, layout)
    if layout.collate != "padded":
        sizes = _sizes(lengths, layout)
        return level(sizes, costs, packed, num_bins=num_bins, width=width, capacity=layout.capacity)
    return _spread_padded(costs, packed, _take(lengths, layout), num_bins, width)


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
