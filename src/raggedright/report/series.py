"""Numbers over rounds, cut down to as many points as a picture can show.

A run of 100,000 rounds has more points than pixels. Neighbours share a bucket of which mean, least and most are drawn,
so that a spike of a single round still shows. What is not finite is a gap.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from raggedright.arrays import Floats, Ints
from raggedright.report.axes import LARGEST
from raggedright.report.run_events import Eval, RoundEvent


class Buckets(NamedTuple):
    """Rounds in buckets: the first and last round of each, and a series' mean, least and most in it."""

    first: Ints
    last: Ints
    mean: Floats
    low: Floats
    high: Floats

    @property
    def middle(self) -> Floats:
        """Where on the axis a bucket stands."""
        return (self.first + self.last) / 2


def bucketed(rounds: Ints, values: Floats, most: int) -> Buckets:
    """The series in at most `most` buckets of equally many rounds."""
    count = min(len(rounds), most)
    starts = np.arange(count) * len(rounds) // max(count, 1)
    ends = np.append(starts[1:], len(rounds)) - 1 if count else starts
    if not count:
        return Buckets(starts, starts, *[np.empty(0)] * 3)
    finite = np.isfinite(values)
    known = np.add.reduceat(finite, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    mean = np.where(known > 0, total / np.maximum(known, 1), np.nan)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    gap = known == 0
    low[gap], high[gap] = np.nan, np.nan
    return Buckets(rounds[starts], rounds[ends], mean, low, high)


def round_numbers(events: Iterable[RoundEvent | Eval]) -> Ints:
    """The rounds that events are of."""
    return np.array([event.round for event in events], dtype=np.int64)


def metric(events: Iterable[RoundEvent | Eval], name: str) -> Floats:
    """A metric over rounds, NaN where one has none."""
    return numbers(event.metrics.get(name) for event in events)


def numbers(values: Iterable[float | None]) -> Floats:
    """Values as an array: what is missing or not finite is NaN, and the largest are cut so that they can be added."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return np.where(np.isfinite(array), np.clip(array, -LARGEST, LARGEST), np.nan)


def spread(values: Floats) -> tuple[float, float] | None:
    """The least and the most of what is finite."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else None
