"""The schema of a batch: what each field of its rows is, so that bad rows are refused and padding rows can be made.

A field's kind is what the caller declared, else what the run decided before, else that of its well-known name, else
what the shapes say in all rows that have it. Invariants: the same schema for every order of the rows; a kind, a dtype
and the dims beside the tokens stay as they are for the run; no field vanishes because some row lacks it; padding rows
pass every check that real rows pass.

The surprise: None is no value. A field that is None in every row so far is carried, but decides nothing for the run.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from raggedright.errors import RowsError
from raggedright.ragged import Ragged
from raggedright.rows import PADDING_GROUP, Rows
from raggedright.tensors.column import (
    Column,
    Fields,
    check_constant,
    check_finite,
    check_ids,
    check_lengths,
    check_loss_mask,
    gather_columns,
    joined_column,
)
from raggedright.tensors.kinds import (
    FIRST_OR_LAST,
    LOSS_MASKS,
    TOKEN_IDS,
    WELL_KNOWN,
    Kind,
    declared_kind,
    infer_kind,
    token_lengths,
)

__all__ = ["Field", "Fields", "Kind", "Schema", "infer_schema"]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the rows: all that a padding row needs to know of it."""

    name: str
    kind: Kind
    dtype: torch.dtype | np.dtype | None  # of tensors or numpy arrays
    dim: int  # where the tokens are, 0 or -1
    shape: tuple[int, ...]  # the other dims of a kind by token, the whole shape of a row's own, else an empty one
    value_type: type | None  # `object` where they differ, None where no row has one
    in_every_row: bool


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields that rows of this batch have, by name, and those that only earlier batches of the run had."""

    fields: Mapping[str, Field]
    earlier: Mapping[str, Field] = field(default_factory=dict)

    @property
    def decided(self) -> dict[str, Field]:
        """The fields that some row of the run had a value for."""
        return {**self.earlier, **{name: new for name, new in self.fields.items() if new.value_type is not None}}


def infer_schema(
    rows: Rows,
    fields: Sequence[Fields],
    *,
    declared: Mapping[str, Kind | str] | None = None,
    known: Schema | None = None,
    required: Collection[str] = (),
    joined: Mapping[str, Ragged] | None = None,
) -> Schema:
    """The schema of a batch, all of its fields checked; `known` is the schema of the run so far.

    `joined` has fields that every row has, as vectors that are joined already.
    """
    kinds = {name: declared_kind(name, kind) for name, kind in (declared or {}).items()}
    columns = gather_columns(rows, fields)
    columns |= {name: joined_column(name, rows, ragged) for name, ragged in (joined or {}).items()}
    if known is not None and not len(rows):
        return known
    _check_required(rows, columns, required)
    before = known.decided if known else {}
    found = {}
    for name, column in columns.items():
        old = before.get(name)
        kind = kinds.get(name) or (old.kind if old else WELL_KNOWN.get(name)) or infer_kind(column)
        found[name] = _field(column, kind, old)
        if name in TOKEN_IDS and column.tensors:
            check_ids(column)
    decided = Schema(found).decided
    return Schema(found, {name: old for name, old in before.items() if name not in decided})


def _check_required(rows: Rows, columns: Mapping[str, Column], required: Collection[str]) -> None:
    """Every row has its tokens, and what else the caller asks for."""
    has = {name: np.zeros(len(rows), dtype=bool) for name in ("input_ids", "prompts", "responses", *required)}
    for name in has.keys() & columns.keys():
        has[name][columns[name].at] = True
    has_tokens = has["input_ids"] | (has["prompts"] & has["responses"])
    if not has_tokens.all():
        key = rows.key[np.argmin(has_tokens)]
        raise RowsError(f"row {key}: field input_ids is missing; give it, or prompts and responses")
    for name in required:
        if not has[name].all():
            raise RowsError(f"row {rows.key[np.argmin(has[name])]}: field {name} is missing and every row needs it")


def _field(column: Column, kind: Kind, old: Field | None) -> Field:
    """The field that a column of this kind is, once checked; `old` is what it was earlier in the run."""
    if not column.values:
        return Field(column.name, kind, None, 0, (), None, False)
    _check_dtype(column, old)
    if old is not None and (old.kind is not kind or not column.tensors):
        old = None  # nothing else of it binds
    if kind.by_token:
        return _token_field(column, kind, old)
    shape: tuple[int, ...] = ()
    if column.tensors and kind in (Kind.ROW, Kind.GROUP):
        check_constant(column, column.sizes, "the dims of a row's own value")
        shape = column.shape()
        _check_shape(column, shape, old)
    elif column.tensors or _common_type(column) is np.ndarray:
        shape = _empty_shape([tuple(value.shape) for value in column.values if isinstance(value, Tensor | np.ndarray)])
    if kind is Kind.GROUP:
        _check_group(column)
    return Field(column.name, kind, _dtype(column), 0, shape, _common_type(column), column.in_every_row)


def _token_field(column: Column, kind: Kind, old: Field | None) -> Field:
    if not column.tensors:
        what = type(column.values[0]).__name__
        raise column.error(0, f"is a {what}; give a torch tensor with one value a token of the {kind.tokens}")
    lengths = token_lengths(column, kind)
    dim = -1 if kind is Kind.POSITIONS else 0
    if old is not None:
        dim = old.dim
    elif kind in FIRST_OR_LAST and column.sizes.shape[1] > 1:
        dim = max((0, -1), key=lambda dim: int((column.sizes[:, dim] == lengths).sum()))
    check_lengths(column, dim, lengths, kind.tokens)
    shape = tuple(np.delete(column.sizes[0], dim).tolist()) if column.sizes.shape[1] > 1 else ()
    _check_shape(column, shape, old)
    dtype = column.tensors[0].dtype
    if kind is Kind.ROUTING and (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or not shape):
        raise column.error(0, f"is {dtype} of shape {column.shape()}; routing is whole numbers [tokens, layers, topk]")
    if dtype.is_floating_point:
        check_finite(column, dim)
    if column.name in LOSS_MASKS:
        check_loss_mask(column)
    return Field(column.name, kind, dtype, dim, shape, Tensor, column.in_every_row)


def _check_dtype(column: Column, old: Field | None) -> None:
    """Tensors stay tensors of their dtype for the run."""
    new = column.dtype
    was = old.dtype if old is not None and old.value_type is Tensor else None
    if old is not None and new != was:
        names = [str(dtype) if dtype else "no tensor" for dtype in (new, was)]
        raise column.error(0, f"is {names[0]} and was {names[1]} earlier in the run; a field keeps its dtype")


def _check_shape(column: Column, shape: tuple[int, ...], old: Field | None) -> None:
    if old is not None and shape != old.shape:
        raise column.error(
            0, f"has dims {shape} and had {old.shape} earlier in the run (tokens left out); a field keeps its dims"
        )


def _check_group(column: Column) -> None:
    """Group ids are strings or whole numbers, and unlike those of padding rows."""
    ids = [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in column.values]
    is_padding = column.rows.is_padding[column.at]
    text = isinstance(ids[0], str)
    if column.dtype is not None and not column.dtype.is_signed:
        raise column.error(0, f"is {column.dtype}; a group id is a string, or a whole number of a signed dtype")
    for i, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, str if text else Integral):
            raise column.error(i, f"is {value!r:.40}; group ids are strings, or whole numbers, in all rows alike")
        taken = value.startswith(PADDING_GROUP) if isinstance(value, str) else value < 0
        if taken and not is_padding[i]:
            raise column.error(i, f"is {value!r:.40}; ids that begin with {PADDING_GROUP} or a minus are padding rows'")


def _common_type(column: Column) -> type:
    """The type of all values; of Python's numbers the widest; `object` where they have nothing in common."""
    types = {Tensor} if column.tensors else {type(value) for value in column.values}
    if len(types) == 1:
        return types.pop()
    if types <= {bool, int, float}:
        return float if float in types else int
    return object


def _dtype(column: Column) -> torch.dtype | np.dtype | None:
    """The dtype of tensors, or of numpy arrays where it is one."""
    arrays = {value.dtype for value in column.values if isinstance(value, np.ndarray)}
    return column.dtype or (arrays.pop() if len(arrays) == 1 else None)


def _empty_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of nothing that can be joined to these along the first dim: dims that vary are zero too."""
    if len({len(shape) for shape in shapes}) > 1:
        return (0,)
    return tuple(0 if dim == 0 or len(set(ns)) > 1 else ns[0] for dim, ns in enumerate(zip(*shapes, strict=True)))
