"""A field of many rows as one long vector: what a store hands over, a schema checks and a micro-batch is cut from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints, within
from raggedright.errors import RowsError


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

    def spread(self, at: Ints, num_rows: int) -> "Ragged":
        """The same rows at these ascending places among `num_rows`; the others are empty."""
        sizes = np.zeros(num_rows, dtype=np.int64)
        sizes[at] = self.sizes
        return Ragged.of(self.flat, sizes)


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
