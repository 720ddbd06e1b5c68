from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.naive import naive_first_fit_decreasing
from raggedright import Layout, Rows, make_plan
from raggedright.arrays import Ints
from raggedright.plan.packing import count_bins, first_fit_decreasing, fullest_bin_first, pack, pack_padded

PEERS_EXAMPLE = [10] * 6 + [4, 4, 3, 3, 3, 3]


def pack_one(sizes: Ints, capacity: int, multiple: int) -> Ints:
    """The packing of a single cell."""
    return pack(sizes, np.array([len(sizes)]), capacity, multiple=multiple)


def descending(sizes: list[int]) -> Ints:
    return np.array(sorted(sizes, reverse=True), dtype=np.int64)


@st.composite
def sizes_and_capacity(draw: st.DrawFn, most: int = 60) -> tuple[Ints, int]:
    capacity = draw(st.integers(1, 120))
    least = draw(st.sampled_from([1, max(1, capacity // 4)]))
    return descending(draw(st.lists(st.integers(least, capacity), max_size=most))), capacity


def fewest_bins(sizes: tuple[int, ...], capacity: int) -> int:
    """The least number of bins, by trying every set of rows that can share a bin with the first."""

    @cache
    def search(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        others = left[1:]
        best = len(left)
        for mask in range(1 << len(others)):
            chosen = [i for i in range(len(others)) if mask >> i & 1]
            if left[0] + sum(others[i] for i in chosen) <= capacity:
                best = min(best, 1 + search(tuple(v for i, v in enumerate(others) if i not in chosen)))
        return best

    return search(sizes)


def fewest_padded_bins(lengths: list[int], capacity: int) -> int:
    """The least number of padded bins over every partition of the rows, neighbours or not."""
    best = len(lengths)

    def place(i: int, bins: list[list[int]]) -> None:
        nonlocal best
        if i == len(lengths):
            best = min(best, len(bins))
            return
        for held in [*bins, []]:
            if (len(held) + 1) * max(lengths[i], *held, 0) <= capacity:
                grown = bins if held else [*bins, held]
                held.append(lengths[i])
                place(i + 1, grown)
                held.pop()

    place(0, [])
    return best


@given(sizes_and_capacity())
def test_first_fit_decreasing_equals_the_naive_one_bin_for_bin(case: tuple[Ints, int]) -> None:
    sizes, capacity = case
    assert first_fit_decreasing(sizes, capacity).tolist() == naive_first_fit_decreasing(sizes.tolist(), capacity)


@pytest.mark.parametrize(("low", "high"), [(1, 1_000), (300, 1_000), (200, 500), (1, 40), (333, 334)])
def test_first_fit_decreasing_equals_the_naive_one_for_many_rows(low: int, high: int) -> None:
    sizes = np.sort(np.random.default_rng(low + high).integers(low, high + 1, 700))[::-1]
    assert first_fit_decreasing(sizes, 1_000).tolist() == naive_first_fit_decreasing(sizes.tolist(), 1_000)


def test_first_fit_decreasing_equals_the_naive_one_where_rows_fit_exactly() -> None:
    """Small numbers, where the room of a bin often equals a size."""
    for seed in range(400):
        random = np.random.default_rng(seed)
        capacity = int(random.integers(4, 40))
        sizes = np.sort(random.integers(1, int(random.integers(1, capacity + 1)) + 1, 60))[::-1]
        assert first_fit_decreasing(sizes, capacity).tolist() == naive_first_fit_decreasing(sizes.tolist(), capacity)


@given(sizes_and_capacity(), st.sampled_from([1, 2, 8]))
def test_a_packing_has_no_gaps_stays_in_capacity_and_needs_no_more_bins(case: tuple[Ints, int], multiple: int) -> None:
    sizes, capacity = case
    for bins in (pack_one(sizes, capacity, multiple), fullest_bin_first(sizes, capacity)):
        if bins is None:
            continue  # the search gave up
        assert len(bins) == len(sizes)
        assert sorted(set(bins.tolist())) == list(range(count_bins(bins)))
        assert all(int(sizes[bins == b].sum()) <= capacity for b in range(count_bins(bins)))
    fewest = count_bins(first_fit_decreasing(sizes, capacity))
    assert count_bins(pack_one(sizes, capacity, multiple)) <= fewest


@given(sizes_and_capacity(most=8))
def test_a_packing_is_never_below_the_true_minimum(case: tuple[Ints, int]) -> None:
    sizes, capacity = case
    fewest = fewest_bins(tuple(sizes.tolist()), capacity)
    assert fewest <= count_bins(pack_one(sizes, capacity, 1))


def test_the_search_saves_a_bin_that_first_fit_decreasing_wastes() -> None:
    """PEERS: cap 10, rows 10 x 6, 4, 4, 3, 3, 3, 3: first-fit-decreasing needs 9 bins, 8 would do."""
    sizes = descending(PEERS_EXAMPLE)
    assert count_bins(first_fit_decreasing(sizes, 10)) == 9
    assert count_bins(pack_one(sizes, 10, 8)) == fewest_bins((4, 4, 3, 3, 3, 3), 10) + 6 == 8


def test_the_search_gives_up_rather_than_take_long() -> None:
    sizes = descending(PEERS_EXAMPLE)
    assert fullest_bin_first(sizes, 10) is not None
    assert fullest_bin_first(sizes, 10, max_looks=3) is None


def test_eight_micro_batches_and_no_padding_where_first_fit_decreasing_would_pad() -> None:
    """PEERS: the same rows at dp 8 would be 16 micro-batches with 4 padding rows."""
    rows = Rows.from_columns(
        prompt=[f"p{i}" for i in range(12)],
        session=[0] * 12,
        trajectory=[0] * 12,
        prompt_tokens=[1] * 12,
        response_tokens=[size - 1 for size in PEERS_EXAMPLE],
    )
    plan = make_plan(rows, Layout(dp_size=8, batch_size=12, mini_batch_size=12, micro_batch_tokens=10))
    (step,) = plan.steps("actor")
    assert (step.num_micro_batches, plan.num_padding_rows) == (8, 0)


@given(st.lists(st.integers(1, 30), max_size=7), st.integers(30, 90))
def test_padded_packing_is_minimal(lengths: list[int], capacity: int) -> None:
    sizes = descending(lengths)
    bins = pack_padded(capacity // sizes, np.array([len(sizes)]))
    assert count_bins(bins) == fewest_padded_bins(sizes.tolist(), capacity)
    assert (np.diff(bins) >= 0).all()
    for b in range(count_bins(bins)):
        assert (bins == b).sum() * sizes[bins == b].max() <= capacity


def test_nothing_packs_into_no_bins() -> None:
    empty = descending([])
    assert count_bins(first_fit_decreasing(empty, 5)) == 0
    assert count_bins(pack_one(empty, 5, 4)) == 0
    assert len(pack_padded(empty, np.array([0]))) == 0


def test_the_search_for_a_tighter_packing_gives_up_in_time() -> None:
    """Even sizes never fill an odd capacity, so that no search ends early; one bin after another took 10 s a plan."""
    sizes = -np.sort(-(np.random.default_rng(0).integers(1_638, 4_914, 256) // 2 * 2))
    assert fullest_bin_first(sizes, 16_383) is None
    assert count_bins(pack_one(sizes, 16_383, 8)) == count_bins(first_fit_decreasing(sizes, 16_383))
