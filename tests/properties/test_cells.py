"""What `cells` does for many ranks and steps at once is what the other modules do for one after another."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raggedright.arrays import Ints
from raggedright.plan import packing
from raggedright.plan.cells import (
    dearest_first_cells,
    first_fit_cells,
    longest_first_cells,
    pack_padded_cells,
    sort_cells,
    split_cells,
)
from raggedright.plan.kin import Kin
from raggedright.plan.layout import Layout
from raggedright.plan.level import (
    _dearest_first,
    _longest_first,
    level,
    level_cells,
    sort_into_slots,
    split_bins,
)
from raggedright.plan.micro_batches import pack, pack_cells, spread, spread_cells

CAPACITY = 40


@st.composite
def cells(draw: st.DrawFn) -> tuple[list[Ints], Ints]:
    """Sizes of each cell's rows, the cells with most rows first, and bins that hold them."""
    sizes = draw(st.lists(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=30), min_size=1, max_size=8))
    parts = [np.sort(np.array(part))[::-1] for part in sorted(sizes, key=len, reverse=True)]
    more = draw(st.lists(st.integers(0, 3), min_size=len(parts), max_size=len(parts)))
    fewest = [packing.count_bins(packing.first_fit_decreasing(part, CAPACITY)) for part in parts]
    return parts, np.array(fewest) + np.array(more)


@given(cells())
def test_rows_of_many_cells_go_to_the_bins_that_they_would_have_alone(case: tuple[list[Ints], Ints]) -> None:
    parts, num_bins = case
    sizes, counts = np.concatenate(parts), np.array([len(part) for part in parts])
    costs = sizes * (100 + sizes)
    bins_of = dict(enumerate(num_bins.tolist()))
    alone = [packing.first_fit_decreasing(part, CAPACITY) for part in parts]
    packed = first_fit_cells(sizes, counts, np.full(len(parts), CAPACITY))
    assert packed.tolist() == np.concatenate(alone).tolist()
    expected = [_longest_first(part, bins_of[c]) for c, part in enumerate(parts)]
    assert longest_first_cells(sizes, counts, num_bins).tolist() == np.concatenate(expected).tolist()
    dealt = np.split(dearest_first_cells(sizes, costs, counts, num_bins, CAPACITY), np.cumsum(counts)[:-1])
    for c, part in enumerate(parts):
        dearest = _dearest_first(part, part * (100 + part), bins_of[c], CAPACITY)
        assert (dealt[c] < 0).any() if dearest is None else dealt[c].tolist() == dearest.tolist()
    expected = [
        sort_into_slots(split_bins(found, part**2, bins_of[c]), part**2, bins_of[c])
        for c, (found, part) in enumerate(zip(alone, parts, strict=True))
    ]
    split = split_cells(packed, sizes**2, counts, num_bins)
    assert sort_cells(split, sizes**2, counts, num_bins).tolist() == np.concatenate(expected).tolist()
    take = np.maximum(CAPACITY // sizes, 1)
    starts = [packing.pack_padded(CAPACITY // part) for part in parts]
    expected = [np.searchsorted(starts[c], np.arange(len(part)), side="right") - 1 for c, part in enumerate(parts)]
    assert pack_padded_cells(take, counts).tolist() == np.concatenate(expected).tolist()


@given(cells())
def test_cells_are_levelled_as_they_would_be_alone(case: tuple[list[Ints], Ints]) -> None:
    chosen = [(part, int(n)) for part, n in zip(*case, strict=True) if len(part) > n > 1]
    if not chosen:
        return
    expected, packings = [], []
    for part, n in chosen:
        packings.append(packing.first_fit_decreasing(part, CAPACITY))
        expected.append(level(part, part**2, packings[-1], num_bins=n, width=n, capacity=CAPACITY))
    sizes, counts = np.concatenate([part for part, _ in chosen]), np.array([len(part) for part, _ in chosen])
    num_bins = np.array([n for _, n in chosen])
    found = level_cells(sizes, sizes**2, np.concatenate(packings), counts, num_bins, CAPACITY)
    assert found.tolist() == np.concatenate(expected).tolist()


def test_500_cells_are_cut_as_they_would_be_alone() -> None:
    """So many that array operations are worth it, in every collation, with cells of no, one and many rows."""
    random = np.random.default_rng(0)
    for collate in ("packed", "padded", "tree"):
        layout = Layout(dp_size=1, batch_size=1, mini_batch_size=1, micro_batch_tokens=1_000, collate=collate)
        counts = random.integers(0, 25, 500)
        parts = [np.sort(random.integers(2, (1_001, 400)[i % 2], count))[::-1] for i, count in enumerate(counts)]
        lengths = np.concatenate(parts)
        kin = Kin(random.integers(0, 60, len(lengths)), np.full(len(lengths), 2)) if collate == "tree" else None
        packed = [pack(part, layout, multiple=2) for part in parts]
        assert pack_cells(lengths, counts, layout, multiple=2).tolist() == np.concatenate(packed).tolist()
        num_bins = np.array([packing.count_bins(found) for found in packed]) + random.integers(0, 3, 500)
        ends, expected = np.cumsum(counts), []
        for i, (part, found, n) in enumerate(zip(parts, packed, num_bins.tolist(), strict=True)):
            kin_of_cell = kin and kin.part(slice(ends[i] - counts[i], ends[i]))
            expected.append(spread(part, found, num_bins=n, width=n, layout=layout, kin=kin_of_cell))
        bins = spread_cells(lengths, np.concatenate(packed), counts, num_bins=num_bins, layout=layout, kin=kin)
        assert bins.tolist() == np.concatenate(expected).tolist()
