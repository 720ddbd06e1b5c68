"""The keys and values of trajectories between their generations, so that a turn reads only what is new.

A trajectory's row is kept when its generation ends, under the trajectory's name, and taken out for the next one, whose
context has to begin with the kept tokens. All kept rows together stay within a number of bytes: the least recently used
ones go first. Invariants: what is kept was computed with the current weights (the engine clears all at an update);
taking a row or not changes results by no more than the rounding of matrix products of another shape.

Short contexts are not kept, as reading them again costs less; nor are contexts with images.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

ID_BYTES = 8
"""Of a token id in the rows that are read, which are bytes: that is how the same rows are found among many."""

LEAST_TOKENS = 32


class PastRow(NamedTuple):
    """What the model has computed of a row's first tokens: `ids` as bytes, keys and values by layer, experts."""

    ids: bytes
    layers: list[tuple[Tensor, ...]]  # keys and values, [tokens, heads, size] each
    experts: NDArray[np.integer] | None  # [tokens, layers, topk]

    @property
    def num_bytes(self) -> int:
        """What it takes to keep it."""
        experts = 0 if self.experts is None else self.experts.nbytes
        return len(self.ids) + experts + sum(part.nbytes for layer in self.layers for part in layer)


class TurnCache:
    """Rows by the name of their trajectory; those that were used last stay longest."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._rows: OrderedDict[bytes, PastRow] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def wants(self, num_tokens: int) -> bool:
        """Whether a row of so many tokens is worth keeping."""
        return num_tokens >= LEAST_TOKENS and self.most_bytes > 0

    def take(self, key: bytes, context: bytes) -> PastRow | None:
        """The kept row of a trajectory, no longer kept here; None where the context does not begin with it."""
        if (row := self._pop(key)) is None or not context.startswith(row.ids):
            return None
        # A pass reads one token or more.
        return row if len(row.ids) < len(context) else row._replace(ids=row.ids[:-ID_BYTES])

    def put(self, key: bytes, row: PastRow) -> None:
        """Keep a row, and let go of others while there are too many bytes."""
        self.forget(key)
        self._rows[key] = row
        self.num_bytes += row.num_bytes
        while self.num_bytes > self.most_bytes:
            self._pop(next(iter(self._rows)))

    def forget(self, key: bytes) -> None:
        """Let go of a trajectory's row, if there is one."""
        self._pop(key)

    def clear(self) -> None:
        """Let go of all."""
        self._rows.clear()
        self.num_bytes = 0

    def _pop(self, key: bytes) -> PastRow | None:
        row = self._rows.pop(key, None)
        if row is not None:
            self.num_bytes -= row.num_bytes
        return row
