"""Array types, and what numpy leaves to its callers: exact integer sums by group, runs, and counting within them."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Strings = NDArray[np.object_]


def sum_by(group: Ints, values: Ints, num_groups: int) -> Ints:
    """Sum of the values of each group, in int64 (bincount would go through float64)."""
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums


def max_by(group: Ints, values: Ints, num_groups: int) -> Ints:
    """Largest value of each group; 0 for an empty one."""
    largest = np.zeros(num_groups, dtype=np.int64)
    np.maximum.at(largest, group, values)
    return largest


def offsets(sizes: Ints) -> Ints:
    """Where each of some runs of these sizes begins, and where the last one ends."""
    found = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def changes(values: Ints) -> Bools:
    """True where a value differs from the one before it, and at the first."""
    found = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=found[1:])
    return found


def within(sizes: Ints) -> Ints:
    """0, 1, ... anew for each of some runs of these sizes."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
