"""Array types, and functions that numpy does not have: sums by group, means that do not overflow, runs, a hash."""

from math import copysign, frexp, ldexp
from sys import float_info

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Strings = NDArray[np.object_]

MIX64_STEP = np.uint64(0x9E3779B97F4A7C15)  # splitmix64 adds it to its state for each number

ROUNDING = 2.0**-48
"""Scores that differ by at most this share of the largest score differ only by rounding."""


def sum_by(group: Ints, values: Ints, num_groups: int) -> Ints:
    """Sum of the values of each group, in int64 (bincount would convert to float64)."""
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums


def number_names(names: Strings) -> Ints:
    """Number of each name, if all different names are counted in their sorted order."""
    listed = names.tolist()
    number = {name: i for i, name in enumerate(sorted({*listed}))}
    return np.fromiter(map(number.__getitem__, listed), dtype=np.int64, count=len(listed))


def max_by(group: Ints, values: Ints, num_groups: int) -> Ints:
    """Largest value of each group; 0 for an empty one."""
    largest = np.zeros(num_groups, dtype=np.int64)
    np.maximum.at(largest, group, values)
    return largest


def exponents_by(group: Ints, values: Floats) -> Ints:
    """For each value an e with |v| <= 2**e for all v of its group: dividing by 2**e is exact, and squares stay finite.

    e is at least -1,000, so that 2**-e is finite too.
    """
    largest = np.zeros(group.max(initial=-1) + 1)
    np.maximum.at(largest, group, np.abs(values))
    return np.maximum(np.frexp(largest)[1], -1000)[group]


def mean_of(values: Ints | Floats) -> float:
    """The mean of finite numbers; its sum does not overflow."""
    exponent = _exponent(values)
    return _times_power(float(np.ldexp(values.astype(np.float64), -exponent).mean()), exponent)


def std_of(values: Floats) -> float:
    """The standard deviation of a sample of two finite numbers or more; no square overflows."""
    exponent = _exponent(values)
    return _times_power(float(np.ldexp(values, -exponent).std(ddof=1)), exponent)


def _exponent(values: Ints | Floats) -> int:
    return max(-1000, frexp(float(np.abs(values).max()))[1])


def _times_power(value: float, exponent: int) -> float:
    """value * 2**exponent, or the largest float if the product is too large for a float."""
    try:
        return ldexp(value, exponent)
    except OverflowError:
        return copysign(float_info.max, value)


def offsets(sizes: Ints) -> Ints:
    """Start of each run, for consecutive runs of these sizes, and the end of the last one."""
    bounds = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds


def starts_run(values: Ints) -> Bools:
    """True where a value differs from the one before it, and at the first value."""
    differs = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def index_in_run(sizes: Ints) -> Ints:
    """Position of each item within its run, for consecutive runs of these sizes."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The last part of splitmix64: neighbouring numbers give unrelated ones."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
