"""The axes of charts: series over rounds in as many buckets as a picture can show, scales, and their ticks.

A run of 100,000 rounds has more points than pixels, so neighbouring rounds share a bucket of which mean, minimum and
maximum are drawn: a spike of a single round still shows. Values that are not finite are gaps. Ticks are round numbers
and a scale ends on them; a constant series gets room around it, so that its line is not on the edge.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from raggedright.arrays import Floats, Ints
from raggedright.report.events import EvalEvent, RoundEvent
from raggedright.report.text import with_exponent, with_minus

MAX_VALUE = 1e290  # beyond it the width of a scale, or the sum of a series, would not be finite
MIN_SPREAD = 1e-6  # relative to the values; a smaller spread is rounding, and its ticks would need too many digits
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Buckets(NamedTuple):
    """Rounds in buckets: the first and last round of each, and a series' mean, minimum and maximum in it."""

    first: Ints
    last: Ints
    mean: Floats
    low: Floats
    high: Floats

    @property
    def middle(self) -> Floats:
        """The position of each bucket on the axis."""
        return (self.first + self.last) / 2


def bucketed(rounds: Ints, values: Floats, max_buckets: int) -> Buckets:
    """The series in at most `max_buckets` buckets with the same number of rounds."""
    count = min(len(rounds), max_buckets)
    if not count:
        empty = np.empty(0, dtype=np.int64)
        return Buckets(empty, empty, *[np.empty(0)] * 3)
    starts = np.arange(count) * len(rounds) // count
    ends = np.append(starts[1:], len(rounds)) - 1
    finite = np.isfinite(values)
    num_finite = np.add.reduceat(finite, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    gap = num_finite == 0
    mean = np.where(gap, np.nan, total / np.maximum(num_finite, 1))
    low = np.where(gap, np.nan, np.minimum.reduceat(np.where(finite, values, np.inf), starts))
    high = np.where(gap, np.nan, np.maximum.reduceat(np.where(finite, values, -np.inf), starts))
    return Buckets(rounds[starts], rounds[ends], mean, low, high)


def round_numbers(events: Iterable[RoundEvent | EvalEvent]) -> Ints:
    """The round of each event."""
    return np.array([event.round for event in events], dtype=np.int64)


def metric(events: Iterable[RoundEvent | EvalEvent], name: str) -> Floats:
    """A metric over rounds, NaN where a round does not have it."""
    return numbers(event.metrics.get(name) for event in events)


def numbers(values: Iterable[float | None]) -> Floats:
    """Values as an array: NaN where one is missing or not finite, and clipped so that their sum is finite."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return np.where(np.isfinite(array), np.clip(array, -MAX_VALUE, MAX_VALUE), np.nan)


def spread(values: Floats) -> tuple[float, float] | None:
    """The minimum and maximum of the finite values."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else None


class Scale(NamedTuple):
    """The ends of an axis, and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """The position of a value between the ends, 0 to 1."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    @property
    def step(self) -> float:
        """The distance between ticks."""
        return self.ticks[1] - self.ticks[0]


def scale_of(low: float, high: float, *, zero: bool = False, max_ticks: int = 5, integers: bool = False) -> Scale:
    """A scale that contains low and high, and zero if asked; `integers` keeps ticks to integers."""
    low, high = max(low, -MAX_VALUE), min(high, MAX_VALUE)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(abs(low), abs(high)) * MIN_SPREAD:
        room = abs(high) * 0.1 or 1.0
        low, high = (low if zero and low == 0 else low - room), high + room
    step = _round_step((high - low) / max_ticks)
    step = max(step, 1.0) if integers else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, max(last, first + 1) + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def round_ticks(first: int, last: int, max_ticks: int) -> list[int]:
    """Round numbers between two rounds."""
    step = max(int(_round_step((last - first) / max_ticks)), 1) if last > first else 1
    return list(range(-(-first // step) * step, last + 1, step))


def _round_step(minimum: float) -> float:
    power = 10.0 ** math.floor(math.log10(minimum)) if minimum > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5) if factor * power >= minimum * 0.999), 10 * power)


def tick_text(value: float, step: float) -> str:
    """The number of a tick, with as many digits as tell it from its neighbours."""
    if value == 0 or abs(value) < step * 1e-6:
        return "0"
    if abs(value) >= 1e15 or (step < 1e-3 and abs(value) < 1e-2):
        digits = max(2, math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9))
        return with_exponent(f"{value:.{digits + 1}g}")
    for size, unit in _UNITS:
        if abs(value) >= size and step >= size / 10 and (abs(value) >= 1e4 or step >= 1e3):
            return with_minus(f"{value / size:.{0 if step >= size else 1}f}".removesuffix(".0") + unit)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return with_minus(f"{value:,.{digits}f}")
