"""Rows that begin alike, kept in one micro-batch for `collate = "tree"`, which computes once what they share.

A plan sees no token, so it guesses: rows of one prompt are kin where their own prompts are equally long, and have that
prompt in common. Rows stand in a line, prompt after prompt and kin beside kin. Micro-batches are runs of it, so that a
cut tears one prompt at most, and they are level in what a tree computes: one may hold more rows than another.

Invariants: no bin exceeds its capacity, which counts whole rows (a wrong guess must not break a budget); there are no
more bins than the packing allows, and each gets a row where there are enough; all arithmetic is in integers.

The surprise: a good packing leaves runs no room. Then each bin takes what comes next in the line and fills up with
smaller rows from a little further on, which tears more prompts, but takes few rows from each.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from raggedright.arrays import Ints, changes, offsets
from raggedright.plan.level import LEVEL_ENOUGH, split_bins
from raggedright.plan.packing import count_bins, first_fit_decreasing
from raggedright.rows import Rows

# Rows that a bin passes over, too large for its room, before it is left as it is.
LOOK_AHEAD = 64


class Kin(NamedTuple):
    """Of each row: the number of its kin, in the order of the line, and the tokens they share. Padding is the last."""

    number: Ints
    shared: Ints

    @classmethod
    def of(cls, rows: Rows) -> "Kin":
        """The kin among these rows."""
        longest = int(rows.prompt_tokens.max(initial=0))
        found, number = np.unique(rows.prompt_index * (longest + 1) + rows.prompt_tokens, return_inverse=True)
        return cls(np.append(number, len(found)), np.append(rows.prompt_tokens, 0))

    def take(self, row: Ints) -> "Kin":
        """The kin of the rows at these positions; those past the end are padding."""
        return self.part(np.minimum(row, len(self.number) - 1))

    def part(self, at: Ints | slice) -> "Kin":
        """Those of some of the rows that these are of."""
        return Kin(self.number[at], self.shared[at])


def costs_in_trees(bins: Ints, costs: Ints, shared: Ints, number: Ints) -> Ints:
    """Cost of each row where only the first of its kin in a bin pays for what they share."""
    mark = bins * (int(number.max(initial=0)) + 1) + number
    order = np.argsort(mark, kind="stable")
    first = order[changes(mark[order])]
    paid = costs - shared
    paid[first] = costs[first]
    return paid


def keep_together(sizes: Ints, costs: Ints, shared: Ints, number: Ints, *, num_bins: int, capacity: int) -> Ints | None:
    """Bin of each row with kin together, or None where they do not fit so. Rows come in descending size.

    `shared` is the part of a row's cost that it has in common with the rows of its `number`.
    """
    line = np.argsort(number, kind="stable")
    own = costs[line] - np.where(changes(number[line]), 0, shared[line])
    in_line = _cut_line(sizes[line], own, costs[line] - own, num_bins, capacity)
    if in_line is None:
        in_line = _fill_along(sizes[line], num_bins, capacity)
    if in_line is None:
        return None
    bins = np.empty(len(line), dtype=np.int64)
    bins[line] = split_bins(in_line, own, num_bins)
    return bins


def _cut_line(sizes: Ints, own: Ints, again: Ints, num_bins: int, capacity: int) -> Ints | None:
    """Runs of the line under the least bound on a run's cost, to a thousandth, that makes no more than `num_bins`.

    A row costs its own part, and where it begins a run `again` what it shares with kin before it.
    """
    num_rows, size_to = len(sizes), offsets(sizes)
    last = np.searchsorted(size_to, size_to[:-1] + capacity, side="right").tolist()
    cost_to = offsets(own).tolist()
    begin = (offsets(own)[:-1] - again).tolist()

    def starts_under(bound: int) -> list[int]:
        starts, at = [], 0
        while at < num_rows and len(starts) <= num_bins:
            starts.append(at)
            at = max(at + 1, bisect_right(cost_to, begin[at] + bound, at + 1, last[at]) - 1)
        return starts

    def dearest(starts: list[int]) -> int:
        return max(cost_to[end] - begin[start] for start, end in pairwise([*starts, num_rows]))

    low, high = cost_to[-1] // num_bins, cost_to[-1] + int(again.max())
    starts = starts_under(high)
    if len(starts) > num_bins:
        return None
    enough = dearest(starts)  # any bound from here to `high` makes the same runs
    while high - low > high // LEVEL_ENOUGH + 1:
        middle = (low + high) // 2
        found = starts if middle >= enough else starts_under(middle)
        if len(found) > num_bins:
            low = middle
            continue
        if found is not starts:
            starts, enough = found, dearest(found)
        high = middle
    return np.repeat(np.arange(len(starts)), np.diff([*starts, num_rows]))


def _fill_along(sizes: Ints, num_bins: int, capacity: int) -> Ints | None:
    """Bins that take the next rows of the line; where these are too many, the last ones are packed by size alone."""
    bins = _take_next(sizes.tolist(), num_bins, capacity)
    for anew in (0, num_bins // 8, num_bins // 4, num_bins // 2, num_bins * 3 // 4):
        rest = np.flatnonzero(bins >= num_bins - anew)
        rest = rest[np.argsort(-sizes[rest], kind="stable")]
        packed = first_fit_decreasing(sizes[rest], capacity)
        if count_bins(packed) <= anew:
            bins[rest] = num_bins - anew + packed
            return bins
    return None


def _take_next(sizes: list[int], num_bins: int, capacity: int) -> Ints:
    """Each bin takes the first rows left and, of those behind them, what fits its room; `num_bins`: no room at all."""
    num_rows = len(sizes)
    left: Iterator[int] = (size * num_rows + i for i, size in enumerate(sizes))  # one integer to compare
    waiting: list[int] = []
    order: list[int] = []
    held: list[int] = []
    for _ in range(num_bins):
        limit = (capacity + 1) * num_rows  # of what fits the room
        taken, passed = [], []
        for row in waiting:
            if row < limit:
                limit -= row - row % num_rows
                taken.append(row)
            else:
                passed.append(row)
        if len(passed) <= LOOK_AHEAD:
            for row in left:
                if row < limit:
                    limit -= row - row % num_rows
                    taken.append(row)
                else:
                    passed.append(row)
                    if len(passed) > LOOK_AHEAD:
                        break
        order += taken
        held.append(len(taken))
        waiting = passed
    bins = np.full(num_rows, num_bins)
    bins[np.array(order, dtype=np.int64) % max(num_rows, 1)] = np.repeat(np.arange(num_bins), held)
    return bins
