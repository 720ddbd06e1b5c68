"""Values as TransferQueue's columns, and back: what it would alter goes another way.

A column has one dtype and rank, for TransferQueue casts or loses what differs. Tensors of the usual dtypes go as they
are, everything else (media, text, numbers, None, rare dtypes) as the bytes of `encoding.py`: small ones as bytes, since
every tensor costs a frame of its own on the wire, large ones in a uint8 tensor, which is not copied on the way.

The surprise: tensors go in as a list, not nested. TransferQueue takes that in less than half the time, and what it
returns is joined anew anyway, by the rows that happen to be asked for: nested, dense or a list. So answers are taken
apart into rows, and checked. A tag is copied with every get, so it has few entries, and text for the rest.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor, nn

from raggedright.store.encoding import decode_field, encode_fields, type_name, with_tensors
from raggedright.store.protocol import Fields, Key, NewRow, StoreError
from raggedright.store.ray_round import Column, RowColumns
from raggedright.store.tags import to_json

if TYPE_CHECKING:
    from tensordict import TensorDict

ENCODED, BYTES = "encoded", "bytes"
LARGE = 2**16  # bytes of an encoded value that goes as a tensor
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NATIVE = {dtype: str(dtype).removeprefix("torch.") for dtype in _FLOATS + _WHOLE}


class Cell(NamedTuple):
    """A field's value as it travels."""

    column: Column
    value: Tensor | bytes


def row_name(key: Key, write: int) -> str:
    """A row's key in TransferQueue: the origin's, unique by round, attempt and write."""
    prompt = quote(key.prompt, safe="/ :.,+-").replace("_", "%5F")
    return f"{prompt}_{key.session}_{key.trajectory}@{key.round}.{key.attempt}.{write}"


def to_cells(key: Key, fields: Fields) -> dict[str, Cell]:
    """A row's fields as they travel; an error names the row and the field."""
    fields = with_tensors(fields)
    native = {name: value for name, value in fields.items() if _is_native(value)}
    encode_fields(key, dict.fromkeys(native))  # their names
    cells = {name: _native(value) for name, value in native.items()}
    for name, (type_, data) in encode_fields(key, {n: v for n, v in fields.items() if n not in native}).items():
        if len(data) < LARGE:
            cells[name] = Cell(Column(type_, BYTES), data)
        else:
            cells[name] = Cell(Column(type_, ENCODED), torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return {name: cells[name] for name in fields}


def share_columns(shared: dict[tuple, RowColumns], cells: Mapping[str, Cell]) -> RowColumns:
    """The columns of a row's fields, not yet placed; the same object for rows that are alike."""
    row_columns = {name: cell.column for name, cell in cells.items()}
    return shared.setdefault(tuple(row_columns.items()), row_columns)


def join(rows: Sequence[Mapping[str, Cell]]) -> dict[str, object]:
    """Rows that are alike as TransferQueue takes them, by field."""
    from tensordict import NonTensorStack

    columns = {name: [row[name].value for row in rows] for name in rows[0]}
    return {name: NonTensorStack(*column) for name, column in columns.items()}


def in_columns(joined: Mapping[str, object], row_columns: RowColumns, num_rows: int) -> "TensorDict | None":
    """The same by column; None if there are no fields."""
    from tensordict import TensorDict

    return TensorDict({row_columns[name].name: each for name, each in joined.items()}, num_rows) if joined else None  # type: ignore[arg-type]


def split(
    what: str, keys: Sequence[Key], fields: Sequence[str], columns: Sequence[Column], answer: "TensorDict"
) -> list[dict[str, object]]:
    """The rows of an answer that has all that was asked for, or a StoreError; never a shorter one."""
    names = {column.name for column in columns}
    if answer.batch_size[0] != len(keys) or set(answer.keys()) != names:
        raise StoreError(
            f"{what}: {len(keys):,} rows with the columns {', '.join(sorted(names))} were asked of TransferQueue and "
            f"{answer.batch_size[0]:,} with {', '.join(sorted(map(str, answer.keys()))) or 'none'} came; somebody else "
            "changed them, start a new store"
        )
    by_field = [_values(keys, name, column, answer) for name, column in zip(fields, columns, strict=True)]
    return [dict(zip(fields, values, strict=True)) for values in zip(*by_field, strict=True)]


def tag(row: NewRow, tags: str, num_rows: int, columns: str) -> dict[str, object]:
    """What TransferQueue is told of a row: the origin's `is_padding`, and what others need to read it."""
    counts = f'"prompt_tokens":{row.prompt_tokens},"response_tokens":{row.response_tokens}'
    said = f'{{{counts},"loss_tokens":{row.loss_tokens},"rows":{num_rows},"tags":{tags}}}'
    return {"is_padding": row.is_padding, "row": said, "columns": columns}


def columns_json(columns_of_rows: Sequence[RowColumns]) -> list[str]:
    """Where fields are, for a row's tag; the same text object for rows that are alike."""
    known = {id(each): each for each in columns_of_rows}
    texts = {i: to_json({name: column.name for name, column in each.items()}) for i, each in known.items()}
    return [texts[id(each)] for each in columns_of_rows]


def _values(keys: Sequence[Key], name: str, column: Column, answer: "TensorDict") -> Sequence[object]:
    """A field's values, one a row."""
    joined = answer.get(column.name)
    if column.kind == BYTES:
        raw = joined.tolist() if hasattr(joined, "tolist") and not isinstance(joined, Tensor) else None
        if raw is None or len(raw) != len(keys):
            raise StoreError(f"{keys[0]}: field {name} came back as {type(joined).__name__}; start a new store")
        return [decode_field(key, name, each) for key, each in zip(keys, raw, strict=True)]
    kind = "uint8.1" if column.kind == ENCODED else column.kind
    tensors = _taken_apart(joined, kind)
    for key, tensor in zip(keys, tensors, strict=True):
        if tensor is None:
            raise StoreError(f"{key}: field {name} was put as {kind} and came back as another; start a new store")
    if column.kind == ENCODED:
        return [decode_field(key, name, t.numpy().tobytes()) for key, t in zip(keys, tensors, strict=True)]  # type: ignore[union-attr]
    return tensors


def _taken_apart(joined: object, kind: str) -> Sequence[Tensor | None]:
    """The rows of a column, None for one that is not of this kind."""
    if isinstance(joined, Tensor) and joined.is_nested and kind.endswith(".1") and joined.layout is torch.jagged:
        values, lengths = joined.values(), joined.offsets().diff().tolist()  # type: ignore[attr-defined]
        if f"{NATIVE.get(values.dtype)}.{values.dim()}" != kind:
            return [None] * len(lengths)
        return values.split(lengths)  # one call for all rows
    tensors = joined.unbind() if isinstance(joined, Tensor) else joined
    return [
        t.contiguous() if isinstance(t, Tensor) and f"{NATIVE.get(t.dtype)}.{t.dim()}" == kind else None
        for t in tensors  # type: ignore[union-attr]
    ]


def _is_native(value: object) -> bool:
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
        and value.dtype in NATIVE  # type: ignore[attr-defined]
    )


def _native(value: object) -> Cell:
    assert isinstance(value, Tensor)
    tensor = value.detach().cpu().contiguous()
    return Cell(Column(type_name(value), f"{NATIVE[value.dtype]}.{value.dim()}"), tensor)
