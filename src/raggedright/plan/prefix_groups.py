"""Rows with a shared prefix, kept in one micro-batch for `collate = "tree"`, which computes the prefix only once.

A plan sees no tokens, so it assumes: rows of one prompt whose own prompts have equal lengths form a prefix group and
share that prompt. Rows are sorted by prompt, then by prefix length, into a line. Micro-batches are runs of this line,
so a cut divides at most one prompt, and they are level in what a tree computes: one may have more rows than another.

Invariants: no bin exceeds its capacity, which counts whole rows (a wrong assumption must not break a budget); there are
no more bins than the packing allows, and each gets a row if there are enough; all arithmetic is in integers.

Note: a good packing leaves no room for runs. Then each bin takes the next rows of the line and fills up with smaller
rows from a little further on, which divides more prompts, but takes few rows from each.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from raggedright.arrays import Ints, offsets, starts_run
from raggedright.plan.level import LEVEL_ENOUGH, split_bins
from raggedright.plan.packing import count_bins, first_fit_decreasing
from raggedright.rows import Rows

# Rows that a bin passes over, because they are too large for its room, before the next bin is started.
LOOK_AHEAD = 64


class PrefixGroups(NamedTuple):
    """For each row: the number of its group, in the order of the line, and the tokens that the group shares.

    The last entry is for padding rows.
    """

    number: Ints
    shared: Ints

    @classmethod
    def of(cls, rows: Rows) -> "PrefixGroups":
        """The prefix groups of these rows."""
        longest = int(rows.prompt_tokens.max(initial=0))
        groups, number = np.unique(rows.prompt_index * (longest + 1) + rows.prompt_tokens, return_inverse=True)
        return cls(np.append(number, len(groups)), np.append(rows.prompt_tokens, 0))

    def take(self, row: Ints) -> "PrefixGroups":
        """The entries of the rows at these positions; positions past the end are padding rows."""
        return self.part(np.minimum(row, len(self.number) - 1))

    def part(self, at: Ints | slice) -> "PrefixGroups":
        """Some of the entries."""
        return PrefixGroups(self.number[at], self.shared[at])


def costs_in_trees(bins: Ints, costs: Ints, shared: Ints, number: Ints) -> Ints:
    """Cost of each row if only the first row of its group in a bin pays for what the group shares."""
    group_in_bin = bins * (int(number.max(initial=0)) + 1) + number
    order = np.argsort(group_in_bin, kind="stable")
    first = order[starts_run(group_in_bin[order])]
    in_tree = costs - shared
    in_tree[first] = costs[first]
    return in_tree


def keep_together(sizes: Ints, costs: Ints, shared: Ints, number: Ints, *, num_bins: int, capacity: int) -> Ints | None:
    """Bin of each row with groups kept together, or None if they do not fit. Rows are in descending size.

    `shared` is the part of a row's cost that it has in common with the rows of its group `number`.
    """
    line = np.argsort(number, kind="stable")
    size, shared_before = sizes[line], np.where(starts_run(number[line]), 0, shared[line])
    cost = costs[line] - shared_before
    in_line = _cut_line(size, cost, shared_before, num_bins, capacity)
    if in_line is None:
        in_line = _fill_along(size, num_bins, capacity)
    if in_line is None:
        return None
    bins = np.empty(len(line), dtype=np.int64)
    bins[line] = split_bins(in_line, cost, np.array([len(line)]), np.array([num_bins]))
    return bins


def _cut_line(sizes: Ints, costs: Ints, shared_before: Ints, num_bins: int, capacity: int) -> Ints | None:
    """Runs of the line under the smallest limit on the cost of a run, to a thousandth, that needs at most `num_bins`.

    The first row of a run also costs what it shares with rows before it in the line.
    """
    num_rows, size_to, cost_until = len(sizes), offsets(sizes), offsets(costs)
    last = np.searchsorted(size_to, size_to[:-1] + capacity, side="right").tolist()
    cost_to, begin = cost_until.tolist(), (cost_until[:-1] - shared_before).tolist()

    def starts_under(limit: int) -> list[int]:
        starts, at = [], 0
        while at < num_rows and len(starts) <= num_bins:
            starts.append(at)
            at = max(at + 1, bisect_right(cost_to, begin[at] + limit, at + 1, last[at]) - 1)
        return starts

    def highest_cost(starts: list[int]) -> int:
        return max(cost_to[end] - begin[start] for start, end in pairwise([*starts, num_rows]))

    low, high = cost_to[-1] // num_bins, cost_to[-1] + int(shared_before.max())
    starts = starts_under(high)
    if len(starts) > num_bins:
        return None
    enough = highest_cost(starts)  # any limit from here to `high` makes the same runs
    while high - low > high // LEVEL_ENOUGH + 1:
        middle = (low + high) // 2
        shorter = starts if middle >= enough else starts_under(middle)
        if len(shorter) > num_bins:
            low = middle
            continue
        if shorter is not starts:
            starts, enough = shorter, highest_cost(shorter)
        high = middle
    return np.repeat(np.arange(len(starts)), np.diff([*starts, num_rows]))


def _fill_along(sizes: Ints, num_bins: int, capacity: int) -> Ints | None:
    """Bins that take the next rows of the line; if these are too many, the last bins are packed by size alone."""
    bins = _take_next(sizes.tolist(), num_bins, capacity)
    for num_last in (0, num_bins // 8, num_bins // 4, num_bins // 2, num_bins * 3 // 4):
        rest = np.flatnonzero(bins >= num_bins - num_last)
        rest = rest[np.argsort(-sizes[rest], kind="stable")]
        packed = first_fit_decreasing(sizes[rest], capacity)
        if count_bins(packed) <= num_last:
            bins[rest] = num_bins - num_last + packed
            return bins
    return None


def _take_next(sizes: list[int], num_bins: int, capacity: int) -> Ints:
    """Each bin takes the first rows left and, of the rows behind them, those that fit; others get bin `num_bins`."""
    num_rows = len(sizes)
    left: Iterator[int] = (size * num_rows + i for i, size in enumerate(sizes))  # one integer to compare
    waiting: list[int] = []
    order: list[int] = []
    in_bin: list[int] = []
    for _ in range(num_bins):
        limit = (capacity + 1) * num_rows  # of what fits the room
        taken, passed = [], []
        for row in waiting:
            if row < limit:
                limit -= row - row % num_rows
                taken.append(row)
            else:
                passed.append(row)
        while len(passed) <= LOOK_AHEAD and (row := next(left, None)) is not None:
            if row < limit:
                limit -= row - row % num_rows
                taken.append(row)
            else:
                passed.append(row)
        order += taken
        in_bin.append(len(taken))
        waiting = passed
    bins = np.full(num_rows, num_bins)
    bins[np.array(order, dtype=np.int64) % max(num_rows, 1)] = np.repeat(np.arange(num_bins), in_bin)
    return bins
