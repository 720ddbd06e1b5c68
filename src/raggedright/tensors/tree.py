"""The rows of a micro-batch as one prefix tree: what several rows begin with is computed once.

Sessions of a prompt begin alike, forks of an agent even more so. A node is a token after a given beginning; nodes stand
in depth-first order, each row before those that come after it in the order of token ids. Invariants: every token of
every row has a node; two rows have a node in common where they agree from their first token on, and nowhere else; a
node sees itself and those on its way from the root, which are the same tokens at the same positions as in its row.
So a row's numbers are those of the row alone, up to the rounding of sums of another order.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints


class PrefixTree(NamedTuple):
    """Nodes in depth-first order, and the node of every token of every row."""

    ids: Ints  # [nodes]
    depth: Ints  # [nodes] the position in a row
    ends: Ints  # [nodes] where the nodes that come after this one in some row end
    node: Ints  # [rows, longest]; of no meaning behind a row's end

    @classmethod
    def of(cls, ids: Ints, sizes: Ints) -> "PrefixTree":
        """The tree of rows whose tokens stand one after another in `ids`."""
        columns = np.arange(int(sizes.max()))
        valid = columns < sizes[:, None]
        table = np.zeros(valid.shape, dtype=">u4")  # so that bytes compare as numbers do
        table[valid] = ids + 1
        beginnings = [row.tobytes() for row in table]
        order = np.array(sorted(range(len(sizes)), key=beginnings.__getitem__))
        table, valid = table[order], valid[order]
        is_new = valid.copy()  # where a row leaves the one before it
        is_new[1:] &= ~np.logical_and.accumulate(table[1:] == table[:-1], axis=1)
        number = np.where(is_new, np.cumsum(is_new).reshape(is_new.shape) - 1, 0)
        number = np.maximum.accumulate(number, axis=0)
        row, depth = np.nonzero(is_new)
        starts = np.append(0, np.cumsum(is_new.sum(1)))  # of each row's own nodes
        ends = starts[row + np.bincount(number[valid])]  # the rows that have a node in common are neighbours
        node = np.empty_like(number)
        node[order] = number
        return cls(table[is_new].astype(np.int64) - 1, depth, ends, node)

    def sees(self) -> Tensor:
        """[nodes, nodes]: whether the first attends to the second."""
        at = torch.arange(len(self.ids), dtype=torch.int32)
        return (at <= at[:, None]).logical_and_(at[:, None] < torch.from_numpy(self.ends).int())
