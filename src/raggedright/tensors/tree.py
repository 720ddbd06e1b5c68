"""The rows of a micro-batch as prefix trees: a prefix that several rows share is computed once.

Sessions of a prompt share a prefix, and forks of an agent share an even longer one. A node is a token after a given
prefix; the nodes of a tree are in depth-first order, its rows in the order of their token ids. Invariants: every token
of every row has a node; two rows of a tree share the nodes of their common prefix and no others; a node attends to
itself and to the nodes on its path from the root, which are the same tokens at the same positions as in its row. So a
row's numbers are those of the row alone, up to rounding from another order of summation.

A single tree has the fewest nodes, but attention compares each node with all others, so several smaller trees that
repeat a few tokens can be cheaper, down to one tree per row, which needs no mask of its own. The trees are cut between
rows, into trees of about one size; `even_tokens`, the number of tokens at which a model's attention costs as much as
the rest of the model, decides which size is cheapest.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raggedright.arrays import Bools, Ints, offsets

# The cost of attention with a mask, as a multiple of plain causal attention of the same length (on a CPU).
_MASK_COST = 4


class PrefixTrees(NamedTuple):
    """Trees in a rectangle, filled up to the longest, and the place of every token of every row in it."""

    ids: Ints  # [trees, nodes]
    depth: Ints  # [trees, nodes] the position in a row
    ends: Ints  # [trees, nodes] where the subtree of a node ends
    sizes: Ints  # [trees] nodes, without filling
    place: Ints  # [rows, longest row] in the flattened ids; undefined after a row's end

    @classmethod
    def of(cls, ids: Ints, sizes: Ints, *, even_tokens: int, token_id: int = 0) -> "PrefixTrees":
        """The trees of rows whose tokens are stored one after another in `ids`; `token_id` fills shorter trees up."""
        longest = int(sizes.max())
        valid = np.arange(longest) < sizes[:, None]
        table = np.zeros(valid.shape, dtype=">u4")  # big-endian: bytes compare like numbers
        table[valid] = ids + 1
        order = table.view(f"V{table.itemsize * longest}").ravel().argsort(kind="stable")
        table, valid = table[order], valid[order]
        is_new = valid.copy()  # where a row differs from the row before it
        is_new[1:] &= ~np.logical_and.accumulate(table[1:] == table[:-1], axis=1)
        starts = _cut(is_new.sum(1).tolist(), sizes[order].tolist(), even_tokens)
        is_new[starts] = valid[starts]
        return cls._lay_out(table, valid, is_new, starts, order, token_id)

    @classmethod
    def _lay_out(
        cls, table: np.ndarray, valid: Bools, is_new: Bools, starts: list[int], order: Ints, token_id: int
    ) -> "PrefixTrees":
        row, depth = np.nonzero(is_new)
        node_starts = offsets(is_new.sum(1))  # where each row's new nodes begin, all trees one after another
        firsts = node_starts[starts]
        counts = np.diff(np.append(firsts, node_starts[-1]))
        shape = len(starts), int(counts.max())
        shift = np.arange(len(starts)) * shape[1] - firsts  # from a node's number to its place
        number = np.where(is_new, np.cumsum(is_new).reshape(is_new.shape) - 1, 0)
        number = np.maximum.accumulate(number, axis=0)
        last = node_starts[row + np.bincount(number[valid])]  # rows that share a node are neighbours
        tree = np.repeat(np.arange(len(starts)), counts)  # of each node
        at = np.arange(node_starts[-1]) + shift[tree]
        ids, depths = np.full(shape, token_id), np.zeros(shape, dtype=np.int64)
        ends = np.tile(np.arange(1, shape[1] + 1), (shape[0], 1))
        ids.reshape(-1)[at] = table[is_new].astype(np.int64) - 1
        depths.reshape(-1)[at] = depth
        ends.reshape(-1)[at] = last - firsts[tree]
        place = np.empty_like(number)
        place[order] = number + np.repeat(shift, np.diff([*starts, len(order)]))[:, None]
        return cls(ids, depths, ends, counts, place)

    def mask(self) -> Tensor:
        """The model's attention mask: [trees, nodes] if each row has its own tree, else `sees`."""
        if len(self.ids) < len(self.place):
            return self.sees()[:, None]
        return (torch.arange(self.ids.shape[1]) < torch.from_numpy(self.sizes)[:, None]).long()

    def sees(self) -> Tensor:
        """[trees, nodes, nodes]: whether the first node attends to the second."""
        at = torch.arange(self.ids.shape[1], dtype=torch.int32)[:, None]
        return (at >= at.T).logical_and(at < torch.from_numpy(self.ends).int()[:, None])


def even_tokens_of(model: nn.Module) -> int:
    """By operations: a token takes 2 per parameter, a pair of tokens 4 per layer and unit of its width."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None)
    width = head_dim * text.num_attention_heads if head_dim else text.hidden_size
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return max(1, num_parameters // (2 * text.num_hidden_layers * width))


def _cut(new_nodes: list[int], sizes: list[int], even_tokens: int) -> list[int]:
    """The first row of each tree: the cheapest cut into trees of up to 1, 2, 4, ... times the longest row."""
    best, least = [0], float("inf")
    before = [0, *accumulate(new_nodes)]  # nodes of all rows before this one
    most, total = max(sizes), before[-1]
    while True:
        starts, row, longest = [], 0, 0
        while row < len(sizes):
            starts.append(row)
            shift = sizes[row] - before[row + 1]  # all nodes of a tree's first row are new
            row = bisect_right(before, most - shift) - 1
            longest = max(longest, shift + before[row])
        pairs = longest if len(starts) < len(sizes) else longest / _MASK_COST
        cost = len(starts) * longest * (even_tokens + pairs)
        if cost < least:
            best, least = starts, cost
        if most >= total:
            return best
        most *= 2
