"""The schema of a batch: what each field of its rows is, so that bad rows are refused and padding rows can be made.

The kind of a field is the one that the caller declared, else the one decided earlier in the run, else that of its
well-known name, else the one that the shapes in all rows allow. Invariants: the schema does not depend on the order of
the rows; a field keeps its kind, dtype and dims (other than the tokens) for the run; a field is not lost because some
row lacks it; padding rows pass every check that real rows pass.

Note: a field that is None in every row so far is kept, but decides nothing for the run.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from raggedright.errors import RowsError
from raggedright.rows import PADDING_GROUP, Rows
from raggedright.tensors.row_fields import (
    LOSS_MASKS,
    TOKEN_IDS,
    TOKENS_FIRST_OR_LAST,
    WELL_KNOWN,
    Column,
    Fields,
    Kind,
    check_constant,
    check_finite,
    check_ids,
    check_lengths,
    check_loss_mask,
    declared_kind,
    gather_columns,
    infer_kind,
)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the rows: all that is needed to make its value for a padding row."""

    name: str
    kind: Kind
    dtype: torch.dtype | np.dtype | None  # of tensors or numpy arrays
    dim: int  # the dim of the tokens, 0 or -1
    shape: tuple[int, ...]  # per-token kinds: the other dims; per-row kinds: the whole shape; else of an empty value
    value_type: type | None  # `object` if the rows have several, None if no row has a value


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
) -> Schema:
    """The schema of a batch, with all of its fields checked; `known` is the schema of the run so far.

    `declared` gives the kinds of fields by name, `required` names fields that every row must have.
    """
    kinds = {name: declared_kind(name, kind) for name, kind in (declared or {}).items()}
    columns = gather_columns(rows, fields)
    if known is not None and not len(rows):
        return known
    _check_required(rows, columns, required)
    before = known.decided if known else {}
    new_fields = {}
    for name, column in columns.items():
        old = before.get(name)
        kind = kinds.get(name) or (old.kind if old else WELL_KNOWN.get(name)) or infer_kind(column)
        new_fields[name] = _checked_field(column, kind, old)
        if name in TOKEN_IDS and column.tensors:
            check_ids(column)
    decided = Schema(new_fields).decided
    return Schema(new_fields, {name: old for name, old in before.items() if name not in decided})


def _check_required(rows: Rows, columns: Mapping[str, Column], required: Collection[str]) -> None:
    """Every row has its tokens, and the fields that the caller requires."""
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


def _checked_field(column: Column, kind: Kind, old: Field | None) -> Field:
    """The field of a column of this kind, after all checks; `old` is the field as it was earlier in the run."""
    if not column.values:
        return Field(column.name, kind, None, 0, (), None)
    _check_dtype(column, old)
    if old is not None and (old.kind is not kind or not column.tensors):
        old = None  # only the dtype of the old field applies
    if kind.by_token:
        return _checked_token_field(column, kind, old)
    shape: tuple[int, ...] = ()
    if column.tensors and kind in (Kind.ROW, Kind.GROUP):
        check_constant(column, column.sizes, "the dims of a per-row value")
        shape = column.shape()
        _check_shape(column, shape, old)
    elif column.tensors or _common_type(column) is np.ndarray:
        shape = _empty_shape([tuple(value.shape) for value in column.values if isinstance(value, Tensor | np.ndarray)])
    if kind is Kind.GROUP:
        _check_group(column)
    dtypes = {value.dtype for value in column.values if isinstance(value, np.ndarray)}
    dtype = column.dtype or (dtypes.pop() if len(dtypes) == 1 else None)
    return Field(column.name, kind, dtype, 0, shape, _common_type(column))


def _checked_token_field(column: Column, kind: Kind, old: Field | None) -> Field:
    if not column.tensors:
        what = type(column.values[0]).__name__
        raise column.error(0, f"is a {what}; give a torch tensor with one value per token of the {kind.tokens}")
    sizes = column.sizes
    dim = -1 if kind is Kind.POSITIONS else 0
    if old is not None:
        dim = old.dim
    elif kind in TOKENS_FIRST_OR_LAST and sizes.shape[1] > 1:
        dim = max((0, -1), key=lambda dim: int((sizes[:, dim] == column.num_tokens(kind)).sum()))
    check_lengths(column, dim, kind)
    shape = tuple(np.delete(sizes[0], dim).tolist())
    _check_shape(column, shape, old)
    dtype = column.tensors[0].dtype
    if kind is Kind.ROUTING and (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or not shape):
        raise column.error(0, f"is {dtype} of shape {column.shape()}; routing is integers [tokens, layers, topk]")
    if dtype.is_floating_point:
        check_finite(column, dim)
    if column.name in LOSS_MASKS:
        check_loss_mask(column)
    return Field(column.name, kind, dtype, dim, shape, Tensor)


def _check_dtype(column: Column, old: Field | None) -> None:
    """Tensors stay tensors, of the same dtype, for the run."""
    old_dtype = old.dtype if old is not None and old.value_type is Tensor else None
    if old is not None and column.dtype != old_dtype:
        names = [str(dtype) if dtype else "no tensor" for dtype in (column.dtype, old_dtype)]
        raise column.error(0, f"is {names[0]} and was {names[1]} earlier in the run; a field keeps its dtype")


def _check_shape(column: Column, shape: tuple[int, ...], old: Field | None) -> None:
    if old is not None and shape != old.shape:
        raise column.error(
            0, f"has dims {shape} and had {old.shape} earlier in the run (tokens left out); a field keeps its dims"
        )


def _check_group(column: Column) -> None:
    """Group ids are strings or integers, and differ from those of padding rows."""
    ids = [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in column.values]
    is_padding = column.rows.is_padding[column.at]
    expected = str if isinstance(ids[0], str) else Integral
    if column.dtype is not None and not column.dtype.is_signed:
        raise column.error(0, f"is {column.dtype}; a group id is a string, or an integer of a signed dtype")
    for i, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, expected):
            raise column.error(i, f"is {value!r:.40}; group ids are strings in all rows, or integers in all rows")
        is_reserved = value.startswith(PADDING_GROUP) if isinstance(value, str) else value < 0
        if is_reserved and not is_padding[i]:
            raise column.error(
                i, f"is {value!r:.40}; ids that begin with {PADDING_GROUP} or a minus are reserved for padding rows"
            )


def _common_type(column: Column) -> type:
    """The type of all values; for several of Python's numeric types the widest one; else `object`."""
    types = {Tensor} if column.tensors else {type(value) for value in column.values}
    if len(types) == 1:
        return types.pop()
    if types <= {bool, int, float}:
        return float if float in types else int
    return object


def _empty_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of an empty value that can be concatenated with these along the first dim: dims that vary are zero."""
    if len({len(shape) for shape in shapes}) > 1:
        return (0,)
    return tuple(0 if dim == 0 or len(set(ns)) > 1 else ns[0] for dim, ns in enumerate(zip(*shapes, strict=True)))
