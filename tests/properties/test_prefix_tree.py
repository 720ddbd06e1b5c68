"""Whatever the rows: every beginning has one node, and a node sees its own way from the root and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raggedright.tensors.tree import PrefixTree

ROWS = st.lists(st.lists(st.integers(0, 2) | st.just(2**31), min_size=1, max_size=7), min_size=1, max_size=9)


@given(ROWS)
def test_a_tree_has_every_beginning_once_and_every_row_sees_itself_alone(rows: list[list[int]]) -> None:
    tree = PrefixTree.of(np.concatenate(rows), np.array([*map(len, rows)]))
    assert len(tree.ids) == len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})
    sees = tree.sees()
    for way, row in zip(tree.node.tolist(), rows, strict=True):
        way = way[: len(row)]
        assert tree.ids[way].tolist() == row
        assert tree.depth[way].tolist() == [*range(len(row))]
        for n, node in enumerate(way):
            assert sees[node].nonzero().flatten().tolist() == sorted(way[: n + 1])
