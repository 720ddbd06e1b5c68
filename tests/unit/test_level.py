import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedright.arrays import Ints, sum_by
from raggedright.plan.level import level, longest_first, sort_bins, split_bins
from raggedright.plan.packing import count_bins, first_fit_decreasing


def one(number: int) -> Ints:
    """The number of rows or bins of a single cell."""
    return np.array([number])


def level_one(sizes: Ints, costs: Ints, num_bins: int, width: int, capacity: int) -> Ints:
    packing = first_fit_decreasing(sizes, capacity)
    return level(sizes, costs, packing, one(len(sizes)), one(num_bins), capacity, width=width)


def costs_of(sizes: Ints) -> Ints:
    return sizes * (100 + sizes)


def lengths(low: int, high: int, count: int, *, seed: int = 0) -> Ints:
    return np.sort(np.random.default_rng(seed).integers(low, high + 1, count))[::-1]


def check_level(sizes: Ints, num_bins: int, width: int, capacity: int) -> Ints:
    """Level the rows and check that no bin is empty, over capacity or out of range; the bins' costs by slot."""
    bins = level_one(sizes, costs_of(sizes), num_bins, width, capacity)
    assert len(bins) == len(sizes)
    assert sorted(set(bins.tolist())) == list(range(num_bins))
    assert sum_by(bins, sizes, num_bins).max() <= capacity
    return sum_by(bins, costs_of(sizes), num_bins).reshape(-1, width)


@st.composite
def level_cases(draw: st.DrawFn) -> tuple[Ints, int, int, int]:
    """Sizes, bins, width and capacity such that there are more rows than bins and a packing fits."""
    capacity, width = draw(st.integers(2, 80)), draw(st.integers(1, 6))
    least = draw(st.sampled_from([1, max(1, capacity // 3)]))
    sizes = np.array(sorted(draw(st.lists(st.integers(least, capacity), min_size=2, max_size=50)), reverse=True))
    fewest = width * -(-count_bins(first_fit_decreasing(sizes, capacity)) // width)
    num_bins = fewest + width * draw(st.integers(0, 3))
    small = np.ones(max(0, num_bins + 1 - len(sizes)), dtype=np.int64)
    sizes = np.append(sizes, small)  # a row more than bins; a bin more may be needed for the small ones
    return sizes, max(num_bins, width * -(-count_bins(first_fit_decreasing(sizes, capacity)) // width)), width, capacity


@given(level_cases())
def test_levels_fill_every_bin_and_exceed_no_capacity(case: tuple[Ints, int, int, int]) -> None:
    sizes, num_bins, width, capacity = case
    if len(sizes) > num_bins:
        check_level(sizes, num_bins, width, capacity)


def test_levels_exceed_no_capacity_by_as_little_as_one() -> None:
    """Small numbers, where a bin that is one over is likely."""
    for seed in range(400):
        random = np.random.default_rng(seed)
        capacity, width = int(random.integers(6, 30)), int(random.integers(1, 5))
        sizes = lengths(1, int(random.integers(2, capacity + 1)), int(random.integers(10, 60)), seed=seed)
        num_bins = width * -(-count_bins(first_fit_decreasing(sizes, capacity)) // width)
        if num_bins < len(sizes):
            check_level(sizes, num_bins, width, capacity)


@pytest.mark.parametrize(("low", "high"), [(300, 1_000), (1, 1_000), (240, 260), (334, 500), (1, 20)])
@pytest.mark.parametrize("width", [1, 8])
def test_levels_stay_in_capacity_where_rows_fit_tightly(low: int, high: int, width: int) -> None:
    for seed in range(5):
        sizes = lengths(low, high, 400, seed=seed)
        num_bins = width * -(-count_bins(first_fit_decreasing(sizes, 1_000)) // width)
        if num_bins < len(sizes):
            check_level(sizes, num_bins, width, 1_000)


def test_the_most_expensive_slots_come_first() -> None:
    costs = check_level(lengths(1, 500, 300), 104, 8, 1_000)
    assert (np.diff(costs.max(axis=1)) <= 0).all()


def test_bins_of_a_slot_have_about_equal_costs() -> None:
    costs = check_level(lengths(1, 100, 2_000), 160, 8, 1_000)
    assert costs.max(axis=1).sum() * 8 <= 1.01 * costs.sum()


def test_one_giant_row_leaves_the_other_slots_level() -> None:
    sizes = np.append(1_000, lengths(1, 100, 2_000))
    costs = check_level(sizes, 160, 8, 1_000)
    assert costs[1:].max(axis=1).sum() * 8 <= 1.01 * costs[1:].sum()


def test_rows_of_a_slot_are_assigned_again_by_cost_where_that_makes_it_cheaper() -> None:
    """By size the 3 goes with the 10 (13 and 12); by squares the three 4s still cost less than the 10 alone."""
    sizes = np.array([10, 4, 4, 4, 3])
    bins = level_one(sizes, sizes**2, 2, 2, 20)
    assert sorted(sum_by(bins, sizes**2, 2).tolist()) == [57, 100]
    tight = level_one(sizes, sizes**2, 2, 2, 14)
    assert sorted(sum_by(tight, sizes, 2).tolist()) == [12, 13]


def test_equal_rows_are_assigned_equally() -> None:
    costs = check_level(np.full(64, 10), 16, 4, 100)
    assert len(set(costs.ravel().tolist())) == 1


def test_with_many_slots_bins_are_split_and_sorted() -> None:
    costs = check_level(lengths(1, 100, 3_000), 1_000, 2, 300)
    assert (np.diff(costs.ravel()) <= 0).all()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(0, 45))
def test_split_bins_only_divides(values: list[int], more: int) -> None:
    sizes = np.array(sorted(values, reverse=True))
    bins = first_fit_decreasing(sizes, 40)
    wanted = count_bins(bins) + more
    split = split_bins(bins, sizes, one(len(bins)), one(wanted))
    assert count_bins(split) == max(count_bins(bins), min(wanted, len(sizes)))
    assert sorted(set(split.tolist())) == list(range(count_bins(split)))
    for b in range(count_bins(split)):
        assert len(set(bins[split == b].tolist())) == 1, "rows of two bins were merged"


@pytest.mark.parametrize("num_bins", [1, 7, 31, 32, 64, 200])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 4), (1, 1_000), (500, 1_000)])
def test_assigning_in_rounds_equals_assigning_row_by_row(num_bins: int, low: int, high: int) -> None:
    for num_rows in (0, 1, num_bins, 3 * num_bins + 5, 900):
        values = np.sort(np.append(lengths(low, high, num_rows), lengths(low, 20 * high, num_rows // 10)))[::-1]
        loads = [0] * num_bins
        expected = []
        for value in values.tolist():
            lightest = loads.index(min(loads))
            loads[lightest] += value
            expected.append(lightest)
        assert longest_first(values, one(len(values)), one(num_bins)).tolist() == expected


def test_split_bins_halves_the_most_expensive() -> None:
    bins = np.array([0, 0, 1, 1, 2])
    assert split_bins(bins, np.array([9, 9, 5, 5, 1]), one(5), one(4)).tolist() == [0, 3, 1, 1, 2]
    assert bins.tolist() == [0, 0, 1, 1, 2]


def test_sort_bins_numbers_bins_by_cost_and_ties_by_number() -> None:
    assert sort_bins(np.array([0, 1, 2, 3]), np.array([1, 7, 7, 9]), one(4), one(4)).tolist() == [3, 1, 2, 0]
