"""Short rows that are put together share one value, a block, in which each field is one long vector.

A value costs more than the bytes of a short row; and whoever wants a field of many rows has it joined already. A
block has whole sessions of one round, whose rows all have the same fields, each a vector of one dtype. A long row, or
one with anything else in it, has a value of its own (`row_encoding`), so that nobody reads more than was asked for.
`decode` reads a block like any other value: a tuple of the sizes [fields, rows] and the vectors by name.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints
from raggedright.store.encoding import decode, encode
from raggedright.store.protocol import NewRow, StoreError
from raggedright.store.reader import TORCH

SHORT = 2**13  # bytes of a session whose rows share a block
MOST = 2**17  # bytes of a block
_DTYPES = frozenset(TORCH.values())


class Block:
    """Rows by field: the vectors of all rows, one after another, and how long each is."""

    def __init__(self, sizes: Ints, vectors: Mapping[str, Tensor]) -> None:
        self.sizes = dict(zip(vectors, sizes, strict=True))
        self.vectors = vectors
        self.num_rows: int = sizes.shape[1]

    @cached_property
    def _rows(self) -> list[Sequence[Tensor]]:
        return [vector.split(self.sizes[name].tolist()) for name, vector in self.vectors.items()]

    def row(self, i: int) -> dict[str, Tensor]:
        """The fields of a row, each in memory of its own."""
        return {name: rows[i].clone() for name, rows in zip(self.vectors, self._rows, strict=True)}


class Alike(NamedTuple):
    """Rows that can share a block: the fields that each of them has, and the vectors of all, row after row."""

    kinds: tuple[tuple[str, torch.dtype], ...]
    vectors: list[Tensor]
    num_bytes: int


def alike(rows: Sequence[NewRow]) -> Alike | None:
    """A session's rows, if they can share a block."""
    vectors, known, total = [], None, 0
    for row in rows:
        kinds = []
        for name, value in row.fields.items():
            if type(value) is not Tensor or value.dim() != 1 or not value.is_cpu or value.dtype not in _DTYPES:
                return None
            if value.layout is not torch.strided or value.requires_grad:
                return None
            kinds.append((name, value.dtype))
            vectors.append(value)
            total += value.nbytes
        if known is None:
            known = kinds
        if kinds != known or total > SHORT:
            return None
    return Alike(tuple(known), vectors, total) if known else None


def encode_block(sessions: Sequence[Alike]) -> bytes:
    """Sessions whose rows are alike as one value."""
    kinds, vectors = sessions[0].kinds, [*chain.from_iterable(session.vectors for session in sessions)]
    sizes = np.array([vector.numel() for vector in vectors], dtype=np.int64).reshape(-1, len(kinds)).T.copy()
    return encode((sizes, {name: torch.cat(vectors[i :: len(kinds)]) for i, (name, _) in enumerate(kinds)}))


def decode_block(number: int, data: object) -> Block:
    """The rows of such a value; an error says which block it is."""
    try:
        found = decode(data)
    except StoreError as error:
        raise StoreError(f"block {number}: {error}") from None
    sizes, vectors = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if not isinstance(vectors, dict) or not isinstance(sizes, np.ndarray) or sizes.shape[:1] != (len(vectors),):
        raise StoreError(f"block {number}: it has no rows in it; the file was altered")
    whole = sizes.ndim == 2 and sizes.dtype == np.int64 and (sizes >= 0).all()
    for of_field, vector in zip(sizes, vectors.values(), strict=True):
        if not whole or not isinstance(vector, Tensor) or vector.dim() != 1 or of_field.sum() != len(vector):
            raise StoreError(f"block {number}: its vectors do not fit their sizes; the file was altered")
    return Block(sizes, vectors)
