"""Short rows that are put together share one value, a block, in which each field is one long vector.

A value costs more than the bytes of a short row; and whoever wants a field of many rows has it joined already. A
block has whole sessions of one round, whose rows all have the same fields, each a vector of one dtype. A long row, or
one with anything else in it, has a value of its own (`row_encoding`), so that nobody reads more than was asked for.
`decode` reads a block like any other value: a tuple of the sizes [fields, rows] and the vectors by name.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from raggedright.arrays import Ints, offsets
from raggedright.ragged import Ragged
from raggedright.store.encoding import decode, encode
from raggedright.store.listing import SHORT, Sessions
from raggedright.store.protocol import StoreError

MOST = 2**17  # bytes of a block


class NewBlock(NamedTuple):
    """A block to put: its round, its value, and the places of its sessions among those that are put."""

    round: int
    value: bytes
    sessions: range


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


def encode_blocks(sessions: Sessions, vectors: Mapping[str, Ragged]) -> list[NewBlock] | None:
    """Sessions with their rows' vectors as blocks, in their order; None where a session is too long for one."""
    ends = offsets(sessions.num_rows)  # of sessions, among the rows
    row_bytes = sum(ragged.sizes * ragged.flat.itemsize for ragged in vectors.values())
    before = offsets(np.asarray(row_bytes))[ends]  # bytes of all sessions before each
    if (before[1:] - before[:-1]).max(initial=0) > SHORT:
        return None
    rounds = [key[0] for key in sessions.key]
    blocks, first = [], 0
    while first < len(rounds):
        last = int(np.searchsorted(before, before[first] + MOST, side="right")) - 1
        last = next((i for i in range(first, last) if rounds[i] != rounds[first]), last)
        value = _encode(slice(ends[first], ends[last]), vectors)
        blocks.append(NewBlock(rounds[first], value, range(first, last)))
        first = last
    return blocks


def _encode(rows: slice, vectors: Mapping[str, Ragged]) -> bytes:
    sizes = np.stack([ragged.sizes[rows] for ragged in vectors.values()])
    return encode((sizes, {name: ragged.run(rows).flat for name, ragged in vectors.items()}))


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
