"""One field over all rows that have it, and the checks that need no more than that.

Every error names a row and the field. Checks of values look at the rows in bulk, never token by token.

The surprise: None is the same as no field, so a column holds only the rows with a value, and `at` says which.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints, offsets
from raggedright.errors import RowsError
from raggedright.ragged import Ragged
from raggedright.rows import Rows

Fields = Mapping[str, object]
"""What a row carries beside its numbers: name -> tensor or any other value."""

_CHUNK = 2**20  # elements looked at in one go


@dataclass(frozen=True, slots=True)
class Column:
    """The values of a field, one for each row at `at`; all of them tensors where `tensors` is not empty."""

    name: str
    rows: Rows
    at: Ints
    values: Sequence[object]
    tensors: Sequence[Tensor]
    sizes: Ints  # [values, rank], of tensors
    flat: Tensor | None = None  # all values, one after another, where they are joined already

    @property
    def in_every_row(self) -> bool:
        """Whether no row lacks the field."""
        return len(self.at) == len(self.rows)

    @property
    def dtype(self) -> torch.dtype | None:
        """The one dtype of the tensors."""
        return self.tensors[0].dtype if self.tensors else None

    def key(self, i: int) -> str:
        """The key of the row that value i belongs to."""
        return str(self.rows.key[self.at[i]])

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """The shape of tensor i."""
        return tuple(self.tensors[i].shape)

    def error(self, i: int, what: str) -> RowsError:
        """An error about value i."""
        return RowsError(f"row {self.key(i)}: field {self.name} {what}")


def gather_columns(rows: Rows, fields: Sequence[Fields]) -> dict[str, Column]:
    """One column for each name that a row has, in the order of the names."""
    if len(fields) != len(rows):
        raise RowsError(f"{len(fields):,} rows have fields and {len(rows):,} have numbers; give each row both")
    names = sorted(set().union(*fields))
    return {name: _gather(name, rows, [row.get(name) for row in fields]) for name in names}


def joined_column(name: str, rows: Rows, ragged: Ragged) -> Column:
    """The column of a field that every row has, joined already."""
    if len(ragged.sizes) != len(rows):
        raise RowsError(f"field {name} is joined of {len(ragged.sizes):,} rows and {len(rows):,} have numbers")
    tensors = _Parts(ragged)
    return Column(name, rows, np.arange(len(rows)), tensors, tensors, ragged.sizes[:, None], ragged.flat)


class _Parts(Sequence[Tensor]):
    """The rows of a long vector; most are never looked at one by one."""

    def __init__(self, ragged: Ragged) -> None:
        self._ragged = ragged

    def __len__(self) -> int:
        return len(self._ragged.sizes)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, i: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(i, slice):
            return self._ragged.split()[i]
        return self._ragged.flat.narrow(0, int(self._ragged.starts[i]), int(self._ragged.sizes[i]))


def _gather(name: str, rows: Rows, of_rows: list[object]) -> Column:
    """The column of a field: either all values are tensors, of one dtype and rank, or none is."""
    at = [i for i, value in enumerate(of_rows) if value is not None]
    values = [of_rows[i] for i in at]
    tensors = [value for value in values if isinstance(value, Tensor)]
    positions = np.array(at, dtype=np.int64)
    if not tensors:
        return Column(name, rows, positions, values, [], np.empty((len(values), 0), dtype=np.int64))
    column = Column(name, rows, positions, values, tensors, np.empty((0, 0), dtype=np.int64))
    _check_same(column, [isinstance(value, Tensor) for value in values], "is a {}", lambda i: type(values[i]).__name__)
    _check_same(column, [tensor.dtype for tensor in tensors], "is {}", lambda i: str(tensors[i].dtype))
    _check_same(column, [tensor.dim() for tensor in tensors], "has shape {}", lambda i: str(column.shape(i)))
    sizes = np.fromiter(chain.from_iterable(tensor.shape for tensor in tensors), dtype=np.int64)
    sizes = sizes.reshape(len(tensors), tensors[0].dim())
    return Column(name, rows, positions, values, tensors, sizes)


def _check_same(column: Column, marks: Sequence[object], what: str, word: Callable[[int], str]) -> None:
    if len(set(marks)) > 1:
        i = next(i for i, mark in enumerate(marks) if mark != marks[0])
        others = f"in row {column.key(0)} {what.format(word(0))}"
        raise column.error(i, f"{what.format(word(i))} and {others}; a field has one type and one rank in all rows")


def check_lengths(column: Column, dim: int, lengths: Ints, what: str) -> None:
    """Each tensor has as many tokens along `dim` as its row, and its other dims are those of every row."""
    if not column.sizes.shape[1]:
        raise column.error(0, f"is a single number; give a tensor with one value a token of the {what}")
    wrong = np.flatnonzero(column.sizes[:, dim] != lengths)
    if len(wrong):
        i = int(wrong[0])
        raise column.error(
            i,
            f"has {column.sizes[i, dim]:,} tokens and the {what} {lengths[i]:,}; give one value a token of the {what}",
        )
    if column.sizes.shape[1] > 1:
        check_constant(column, np.delete(column.sizes, dim, axis=1), "dims beside the tokens")


def check_constant(column: Column, sizes: Ints, what: str) -> None:
    """These sizes are the same in every row."""
    wrong = np.flatnonzero((sizes != sizes[:1]).any(axis=1))
    if len(wrong):
        i = int(wrong[0])
        raise column.error(
            i,
            f"has shape {column.shape(i)} and in row {column.key(0)} {column.shape()}; {what} are the same in all rows",
        )


def check_finite(column: Column, dim: int) -> None:
    """No value of a floating field is NaN or infinite."""
    for start, end, flat in _chunks(column):
        lowest, highest = torch.aminmax(flat.float() if flat.dtype.itemsize == 1 else flat)
        if bool(torch.isfinite(lowest) & torch.isfinite(highest)):
            continue
        for i in range(start, end):
            finite = torch.isfinite(column.tensors[i].detach().double())
            if not finite.all():
                token = int(finite.logical_not().nonzero()[:, dim].min())
                value = column.tensors[i].detach().double().select(dim, token).flatten()
                worst = value[~torch.isfinite(value)][0].item()
                raise column.error(i, f"is {worst} at token {token:,}; values by token are finite")


def check_ids(column: Column) -> None:
    """Token ids are 0 or more; that they are in the vocabulary is checked with the model, in `forward`."""
    for start, end, flat in _chunks(column):
        if int(flat.min()) >= 0:
            continue
        for i in range(start, end):
            ids = column.tensors[i].flatten()
            if (ids < 0).any():
                token = int((ids < 0).int().argmax())
                raise column.error(i, f"has id {int(ids[token]):,} at token {token:,}; token ids are 0 or more")


def check_loss_mask(column: Column) -> None:
    """A loss mask is 0 or 1, and marks as many tokens as its row has loss tokens."""
    loss_tokens = column.rows.loss_tokens[column.at]
    for start, end, flat in _chunks(column):
        ones = (flat == 1).cpu().numpy()
        marked = offsets(ones)
        ends = offsets(column.sizes[start:end].prod(axis=1))
        odd = np.flatnonzero((flat != 0).cpu().numpy() != ones)
        if len(odd):
            i = int(np.searchsorted(ends, odd[0], side="right")) - 1
            token = int(odd[0] - ends[i])
            raise column.error(start + i, f"is {flat[odd[0]].item()} at token {token:,}; a loss mask is 0 or 1")
        sums = marked[ends[1:]] - marked[ends[:-1]]
        wrong = np.flatnonzero(sums != loss_tokens[start:end])
        if len(wrong):
            i = int(wrong[0])
            raise column.error(
                start + i,
                f"marks {sums[i]:,} tokens and the row has loss_tokens {loss_tokens[start + i]:,}; "
                "a loss mask does not change once its row is counted",
            )


def _chunks(column: Column) -> Iterator[tuple[int, int, Tensor]]:
    """Neighbouring tensors of some rows as one flat tensor, with the first row and the row after the last."""
    ends = np.cumsum(column.sizes.prod(axis=1))
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + _CHUNK, side="right")))
        if ends[end - 1] > before:
            if column.flat is not None:
                yield start, end, column.flat[before : ends[end - 1]]
            else:
                tensors = column.tensors[start:end]
                with torch.no_grad():
                    yield start, end, torch.cat([tensor.flatten() for tensor in tensors])
        start = end
