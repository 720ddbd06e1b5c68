"""Packing and levelling of many cells at once gives each cell what it would get alone, in both implementations."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedright.arrays import Ints
from raggedright.plan import level as level_module
from raggedright.plan import packing
from raggedright.plan.layout import Collate, Layout
from raggedright.plan.level import costliest_first, level, longest_first, sort_bins, split_bins
from raggedright.plan.micro_batches import pack, spread
from raggedright.plan.packing import count_bins, first_fit, first_fit_decreasing, pack_padded
from raggedright.plan.prefix_groups import PrefixGroups

CAPACITY = 40
Cells = tuple[list[Ints], Ints]


@st.composite
def cells(draw: st.DrawFn) -> Cells:
    """The sizes of each cell's rows, and numbers of bins that are enough for them."""
    sizes = draw(st.lists(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=30), min_size=1, max_size=8))
    parts = [np.sort(np.array(part))[::-1] for part in sizes]
    more = draw(st.lists(st.integers(0, 3), min_size=len(parts), max_size=len(parts)))
    fewest = [count_bins(first_fit_decreasing(part, CAPACITY)) for part in parts]
    return parts, np.array(fewest) + np.array(more)


@pytest.fixture(scope="module", params=[True, False], ids=["arrays", "loops"], autouse=True)
def implementation(request: pytest.FixtureRequest):
    """Every test runs with array operations over all cells, and with a loop over them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (packing, level_module):
            patch.setattr(module, "worth_arrays", lambda counts, num_bins: request.param)
        yield


def each_alone(parts: list[Ints], num_bins: Ints, function: Callable[[Ints, Ints, Ints], Ints]) -> list[int]:
    """The answers for single cells: function(sizes, counts, num_bins)."""
    alone = [function(part, np.array([len(part)]), num_bins[c : c + 1]) for c, part in enumerate(parts)]
    return np.concatenate(alone).tolist()


@given(cells())
def test_rows_of_many_cells_go_to_the_bins_that_they_would_have_alone(case: Cells) -> None:
    parts, num_bins = case
    sizes, counts = np.concatenate(parts), np.array([len(part) for part in parts])
    packed = first_fit(sizes, counts, np.full(len(parts), CAPACITY))
    assert packed.tolist() == each_alone(parts, num_bins, lambda sizes, *_: first_fit_decreasing(sizes, CAPACITY))

    def split_and_sort(sizes: Ints, counts: Ints, num_bins: Ints) -> Ints:
        bins = first_fit(sizes, counts, np.full(len(counts), CAPACITY))
        return sort_bins(split_bins(bins, sizes**2, counts, num_bins), sizes**2, counts, num_bins)

    def pad(sizes: Ints, counts: Ints, _num_bins: Ints) -> Ints:
        return pack_padded(np.maximum(CAPACITY // sizes, 1), counts)

    for function in (longest_first, split_and_sort, pad):
        assert function(sizes, counts, num_bins).tolist() == each_alone(parts, num_bins, function)


def naive_longest_first(values: list[int], num_bins: int) -> list[int]:
    loads, bins = [0] * num_bins, []
    for value in values:
        bins.append(loads.index(min(loads)))
        loads[bins[-1]] += value
    return bins


def naive_costliest_first(values: list[int], num_bins: int) -> list[int] | None:
    """The cheapest bin with room, by cost = size x (100 + size); None where a row finds no room."""
    loads, room, bins = [0] * num_bins, [CAPACITY] * num_bins, []
    for value in values:
        fits = [b for b in range(num_bins) if room[b] >= value]
        if not fits:
            return None
        bins.append(min(fits, key=lambda b: (loads[b], b)))
        loads[bins[-1]] += value * (100 + value)
        room[bins[-1]] -= value
    return bins


@given(cells())
def test_rows_go_to_the_lightest_and_to_the_cheapest_bin(case: Cells) -> None:
    parts, num_bins = case
    sizes, counts = np.concatenate(parts), np.array([len(part) for part in parts])
    lightest = packing.split_cells(longest_first(sizes, counts, num_bins), counts)
    cheapest = costliest_first(sizes, sizes * (100 + sizes), counts, num_bins, CAPACITY)
    for part, n, by_size, by_cost in zip(
        parts, num_bins.tolist(), lightest, packing.split_cells(cheapest, counts), strict=True
    ):
        assert by_size.tolist() == naive_longest_first(part.tolist(), n)
        expected = naive_costliest_first(part.tolist(), n)
        assert (by_cost < 0).any() if expected is None else by_cost.tolist() == expected


@given(cells())
def test_cells_are_levelled_as_they_would_be_alone(case: Cells) -> None:
    chosen = [(part, int(n)) for part, n in zip(*case, strict=True) if len(part) > n > 1]
    if not chosen:
        return

    def level_squares(sizes: Ints, counts: Ints, num_bins: Ints) -> Ints:
        packed = first_fit(sizes, counts, np.full(len(counts), CAPACITY))
        return level(sizes, sizes**2, packed, counts, num_bins, CAPACITY)

    parts, num_bins = [part for part, _ in chosen], np.array([n for _, n in chosen])
    together = level_squares(np.concatenate(parts), np.array([len(part) for part in parts]), num_bins)
    assert together.tolist() == each_alone(parts, num_bins, level_squares)
    in_one_slot = [
        level(
            part, part**2, first_fit_decreasing(part, CAPACITY), np.array([len(part)]), np.array([n]), CAPACITY, width=n
        )
        for part, n in chosen
    ]
    assert together.tolist() == np.concatenate(in_one_slot).tolist()


@pytest.mark.parametrize("collate", ["packed", "padded", "tree"])
def test_500_cells_are_cut_as_they_would_be_alone(collate: Collate) -> None:
    """In every collation, with cells of no, one and many rows."""
    random = np.random.default_rng(0)
    layout = Layout(dp_size=1, batch_size=1, mini_batch_size=1, micro_batch_tokens=1_000, collate=collate)
    counts = random.integers(0, 25, 500)
    parts = [np.sort(random.integers(2, (1_001, 400)[i % 2], count))[::-1] for i, count in enumerate(counts)]
    lengths = np.concatenate(parts)
    groups = PrefixGroups(random.integers(0, 60, len(lengths)), np.full(len(lengths), 2)) if collate == "tree" else None
    packed = [pack(part, np.array([len(part)]), layout, multiple=2) for part in parts]
    assert pack(lengths, counts, layout, multiple=2).tolist() == np.concatenate(packed).tolist()
    num_bins = np.array([count_bins(bins) for bins in packed]) + random.integers(0, 3, 500)
    ends, expected = np.cumsum(counts), []
    for i, (part, bins) in enumerate(zip(parts, packed, strict=True)):
        of_cell = groups and groups.part(slice(ends[i] - counts[i], ends[i]))
        one = {"num_bins": num_bins[i : i + 1], "width": None, "layout": layout, "groups": of_cell}
        expected.append(spread(part, bins, counts[i : i + 1], **one))
    together = spread(
        lengths, np.concatenate(packed), counts, num_bins=num_bins, width=None, layout=layout, groups=groups
    )
    assert together.tolist() == np.concatenate(expected).tolist()
