"""The rows of a micro-batch as prefix trees: what several rows begin with is computed once.

Sessions of a prompt begin alike, forks of an agent even more so. A node is a token after a given beginning; the nodes
of a tree stand in depth-first order, its rows in the order of their token ids. Invariants: every token of every row has
a node; two rows of a tree have a node in common where they agree from their first token on, and nowhere else; a node
sees itself and those on its way from the root, which are the same tokens at the same positions as in its row. So a
row's numbers are those of the row alone, up to the rounding of sums of another order.

One tree has the fewest nodes; but each of its nodes is compared with all others, so several smaller ones that repeat a
little can be cheaper, down to one a row, which needs no mask of its own. The trees are cut between rows, to about one
size, as is cheapest by `even_tokens`: at that many tokens a model's attention costs as much as all else in it.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raggedright.arrays import Bools, Ints, offsets

# What attention with a mask takes, as a multiple of plain causal attention of the same length (on a CPU).
_MASK_COST = 4


class PrefixTrees(NamedTuple):
    """Trees side by side, all filled up to the longest, and the place of every token of every row among them."""

    ids: Ints  # [trees, nodes]
    depth: Ints  # [trees, nodes] the position in a row
    ends: Ints  # [trees, nodes] where the nodes that come after this one in some row end; of filling, at itself
    sizes: Ints  # [trees] nodes, without filling
    place: Ints  # [rows, longest row] in the flattened ids; of no meaning behind a row's end

    @classmethod
    def of(cls, ids: Ints, sizes: Ints, *, even_tokens: int, token_id: int = 0) -> "PrefixTrees":
        """The trees of rows whose tokens stand one after another in `ids`; `token_id` fills shorter ones up."""
        longest = int(sizes.max())
        valid = np.arange(longest) < sizes[:, None]
        table = np.zeros(valid.shape, dtype=">u4")  # so that bytes compare as numbers do
        table[valid] = ids + 1
        order = table.view(f"V{table.itemsize * longest}").ravel().argsort(kind="stable")
        table, valid = table[order], valid[order]
        is_new = valid.copy()  # where a row leaves the one before it
        is_new[1:] &= ~np.logical_and.accumulate(table[1:] == table[:-1], axis=1)
        starts = _cut(is_new.sum(1).tolist(), sizes[order].tolist(), even_tokens)
        is_new[starts] = valid[starts]
        return cls._lay_out(table, valid, is_new, starts, order, token_id)

    @classmethod
    def _lay_out(
        cls, table: np.ndarray, valid: Bools, is_new: Bools, starts: list[int], order: Ints, token_id: int
    ) -> "PrefixTrees":
        row, depth = np.nonzero(is_new)
        own = offsets(is_new.sum(1))  # where each row's own nodes begin, all trees one after another
        firsts = own[starts]
        counts = np.diff(np.append(firsts, own[-1]))
        shape = len(starts), int(counts.max())
        shift = np.arange(len(starts)) * shape[1] - firsts  # from the number of a tree's node to its place
        number = np.where(is_new, np.cumsum(is_new).reshape(is_new.shape) - 1, 0)
        number = np.maximum.accumulate(number, axis=0)
        last = own[row + np.bincount(number[valid])]  # the rows that have a node in common are neighbours
        of_node = np.repeat(np.arange(len(starts)), counts)
        at = np.arange(own[-1]) + shift[of_node]
        ids, depths = np.full(shape, token_id), np.zeros(shape, dtype=np.int64)
        ends = np.tile(np.arange(1, shape[1] + 1), (shape[0], 1))
        ids.reshape(-1)[at] = table[is_new].astype(np.int64) - 1
        depths.reshape(-1)[at] = depth
        ends.reshape(-1)[at] = last - firsts[of_node]
        place = np.empty_like(number)
        place[order] = number + np.repeat(shift, np.diff([*starts, len(order)]))[:, None]
        return cls(ids, depths, ends, counts, place)

    def mask(self) -> Tensor:
        """For the model: where nodes are, [trees, nodes], if each row has a tree of its own; else `sees`."""
        if len(self.ids) < len(self.place):
            return self.sees()[:, None]
        return (torch.arange(self.ids.shape[1]) < torch.from_numpy(self.sizes)[:, None]).long()

    def sees(self) -> Tensor:
        """[trees, nodes, nodes]: whether the first attends to the second."""
        at = torch.arange(self.ids.shape[1], dtype=torch.int32)[:, None]
        return (at >= at.T).logical_and(at < torch.from_numpy(self.ends).int()[:, None])


def even_tokens_of(model: nn.Module) -> int:
    """By operations: a token takes two a parameter, a pair of tokens four a layer and unit of its width."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    of_head = getattr(text, "head_dim", None)
    width = of_head * text.num_attention_heads if of_head else text.hidden_size
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return max(1, num_parameters // (2 * text.num_hidden_layers * width))


def _cut(own: list[int], sizes: list[int], even_tokens: int) -> list[int]:
    """The row that each tree begins with: of trees up to once, twice, four times ... the longest row, the cheapest."""
    best, least = [0], float("inf")
    before = [0, *accumulate(own)]  # nodes of all rows before this one
    most, total = max(sizes), before[-1]
    while True:
        starts, row, longest = [], 0, 0
        while row < len(sizes):
            starts.append(row)
            more = sizes[row] - before[row + 1]  # a tree's first row has all its nodes anew
            row = bisect_right(before, most - more) - 1
            longest = max(longest, more + before[row])
        pairs = longest if len(starts) < len(sizes) else longest / _MASK_COST
        cost = len(starts) * longest * (even_tokens + pairs)
        if cost < least:
            best, least = starts, cost
        if most >= total:
            return best
        most *= 2
