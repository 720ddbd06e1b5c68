"""Whatever the rows: a beginning has one node in a tree, and a node sees its own way from the root and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raggedright.tensors.tree import PrefixTrees

ROWS = st.lists(st.lists(st.integers(0, 2) | st.just(2**31), min_size=1, max_size=7), min_size=1, max_size=9)


def trees_of(rows: list[list[int]], even_tokens: int) -> PrefixTrees:
    return PrefixTrees.of(np.concatenate(rows), np.array([*map(len, rows)]), even_tokens=even_tokens, token_id=9)


@given(ROWS, st.sampled_from([1, 10, 10**9]))
def test_every_row_is_in_one_tree_and_sees_itself_alone(rows: list[list[int]], even_tokens: int) -> None:
    trees = trees_of(rows, even_tokens)
    sees = trees.sees()
    used: dict[int, tuple[int, ...]] = {}
    for places, row in zip(trees.place.tolist(), rows, strict=True):
        places = places[: len(row)]
        tree = places[0] // trees.ids.shape[1]
        way = [place - tree * trees.ids.shape[1] for place in places]
        assert trees.ids[tree, way].tolist() == row
        assert trees.depth[tree, way].tolist() == [*range(len(row))]
        for n, node in enumerate(way):
            assert sees[tree, node].nonzero().flatten().tolist() == sorted(way[: n + 1])
            assert used.setdefault(places[n], tuple(row[: n + 1])) == tuple(row[: n + 1])
    assert sees.diagonal(dim1=1, dim2=2).all()  # filling too: a softmax over nothing is no number
    assert trees.mask().dim() == (4 if len(trees.ids) < len(rows) else 2)
    assert int(trees.sizes.sum()) == len(used)
    assert set(trees.ids.reshape(-1)[[*({*range(trees.ids.size)} - used.keys())]].tolist()) <= {9}


@given(ROWS)
def test_where_attention_costs_nothing_no_beginning_is_there_twice(rows: list[list[int]]) -> None:
    assert trees_of(rows, 10**9).ids.size <= len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


def test_where_attention_is_dear_trees_are_small_and_where_it_is_cheap_there_is_one() -> None:
    rows = [[prompt] * 64 + [session] * 64 for prompt in range(2) for session in range(3, 11)]
    shapes = [trees_of(rows, even_tokens).ids.shape for even_tokens in (1, 2_000, 10**6)]
    assert shapes[0] == (16, 128)  # no longer than the rows are, so that nothing is shared
    assert shapes[-1] == (1, 2 * 64 + 16 * 64)
    assert 128 < shapes[1][1] < shapes[-1][1]
