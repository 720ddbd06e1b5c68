"""A field of many rows as one long vector: what a store hands over, a schema checks and a micro-batch is cut from."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.arrays import Ints, within
from raggedright.errors import RowsError

_LIKE_NUMPY = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)
ARRAY_CODES = frozenset("hiqfd")
"""Types of `array.array` that stand for vectors."""


class Ragged(NamedTuple):
    """Rows that stand one after another in a long vector."""

    flat: Tensor
    sizes: Ints
    starts: Ints

    @classmethod
    def of(cls, flat: Tensor, sizes: Ints) -> "Ragged":
        """A vector with the sizes of its rows."""
        return cls(flat, sizes, np.cumsum(sizes) - sizes)

    def take(self, at: Ints) -> Tensor:
        """These rows, one after another."""
        sizes = self.sizes[at]
        return self.flat[torch.from_numpy(np.repeat(self.starts[at], sizes) + within(sizes))]

    def rows(self, at: Ints) -> "Ragged":
        """The rows at these places, joined in this order."""
        return Ragged.of(self.take(at), self.sizes[at])

    def run(self, rows: slice) -> "Ragged":
        """Neighbouring rows, a part of the long vector."""
        sizes, starts = self.sizes[rows], self.starts[rows]
        first = int(starts[0]) if len(starts) else 0
        return Ragged(self.flat.narrow(0, first, int(sizes.sum())), sizes, starts - first)

    def split(self) -> Sequence[Tensor]:
        """Each row, a part of the long vector."""
        return self.flat.split(self.sizes.tolist())

    def spread(self, at: Ints, num_rows: int) -> "Ragged":
        """The same rows at these ascending places among `num_rows`; the others are empty."""
        sizes = np.zeros(num_rows, dtype=np.int64)
        sizes[at] = self.sizes
        return Ragged.of(self.flat, sizes)


def of_array(flat: NDArray, sizes: Ints) -> Ragged:
    """A vector of numpy's with the sizes of its rows."""
    return Ragged.of(torch.from_numpy(flat), sizes)


def join_alike(rows: Sequence[object]) -> Ragged | None:
    """Rows that are vectors of one dtype, tensors or Python's arrays, joined; None where one is something else."""
    types = {*map(type, rows)}
    if types == {array}:
        arrays: Any = rows
        codes = {row.typecode for row in arrays}
        if len(codes) > 1 or not codes <= ARRAY_CODES:
            return None
        flat = np.frombuffer(bytearray(b"").join(arrays), dtype=codes.pop())
        return of_array(flat, np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays)))
    tensors = [row for row in rows if isinstance(row, Tensor)] if types == {Tensor} else []
    kinds = {(row.dtype, row.layout, row.dim(), row.device.type, row.requires_grad) for row in tensors}
    plain = len(kinds) == 1 and kinds <= {(dtype, torch.strided, 1, "cpu", False) for dtype in _LIKE_NUMPY}
    return join(tensors) if plain else None


def concatenate(parts: Sequence[Ragged]) -> Ragged:
    """The rows of all of them."""
    flat, sizes = torch.cat([part.flat for part in parts]), np.concatenate([part.sizes for part in parts])
    return Ragged.of(flat, sizes)


def join(values: Sequence[object]) -> Ragged:
    """The tensors among these, one after another; whatever is none is an empty row."""
    parts = [value for value in values if isinstance(value, Tensor)]
    sizes = np.array([value.shape[0] if isinstance(value, Tensor) else 0 for value in values], dtype=np.int64)
    return Ragged.of(torch.cat(parts) if parts else torch.empty(0), sizes)


def join_vectors(keys: Sequence[object], name: str, values: Sequence[object]) -> Ragged:
    """A field of rows that all have it, each a vector of one dtype; an error names the row."""
    first = values[0].dtype if values and isinstance(values[0], Tensor) else None
    for key, value in zip(keys, values, strict=True):
        if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != first:
            what = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise RowsError(f"{key}: field {name} is {what}; to be joined it is a vector of one dtype in all rows")
    return join(values)
