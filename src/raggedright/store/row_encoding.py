"""A row's fields as one value: a dict in the words of `encoding`, with one checksum; large ones stand apart.

One value a row is what makes a put and a get cheap where rows are short; one of its own for a large field is what lets
a pass leave alone the pixels that it does not need. `decode` reads it like any other value. What most rows are, a
dict of plain vectors, is written and read here without a detour; whatever is not takes the encoding's own way.
"""

import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from raggedright.store.checks import Encoded
from raggedright.store.encoding import (
    PLAIN_VECTORS,
    VERSION,
    check_names,
    checked,
    decode,
    encode,
    field_error,
    plain_vector,
    text_item,
    type_name,
    with_tensors,
    write_item,
)
from raggedright.store.protocol import Fields, Key, StoreError

LARGE = 2**16  # bytes of a field that stands apart
_DICT = VERSION + b"d"
_TEXT, _TEXT_HEAD = ord("s"), 9
_U64 = struct.Struct("<Q")


class EncodedRow(NamedTuple):
    """A row's fields as a store keeps them."""

    types: Mapping[str, str]
    value: bytes
    apart: dict[str, Encoded]


def encode_row(key: Key, fields: Fields) -> EncodedRow:
    """A row's fields as bytes; an error names the row and the field."""
    fields = with_tensors(fields)
    check_names(key, fields)
    types: dict[str, str] = {}
    apart: dict[str, Encoded] = {}
    parts: list[bytes | memoryview] = []
    for name, value in fields.items():
        try:
            vector = plain_vector(value)
            if vector is not None and vector.nbytes < LARGE and isinstance(value, Tensor):  # plain vectors are
                types[name], head = _vector_head(name, value.dtype)
                parts += (head, _U64.pack(len(vector)), vector.data)
                continue
            types[name] = kind = type_name(value)
            item: list[bytes | memoryview] = [text_item(name)]
            write_item(value, item, 1)
            if sum(map(len, item)) < LARGE:
                parts += item
            else:
                apart[name] = Encoded(kind, encode(value))
        except StoreError as error:
            raise field_error(key, name, error) from None
    whole = b"".join((_DICT, _U64.pack(len(types) - len(apart)), *parts))
    return EncodedRow(types, whole + zlib.crc32(whole).to_bytes(4, "little"), apart)


def decode_row(key: Key, data: object) -> Mapping[str, object]:
    """The fields of such a value, each in memory of its own; an error names the row."""
    try:
        whole = checked(data)
        found = _vectors(whole)
        if found is None:
            found = decode(whole)
    except StoreError as error:
        raise StoreError(f"{key}: its fields: a value {error}") from None
    if not isinstance(found, dict):
        raise StoreError(f"{key}: its fields are a {type(found).__name__}; the file was altered")
    return found


@lru_cache(maxsize=256)
def _vector_head(name: str, dtype: torch.dtype) -> tuple[str, bytes]:
    """A vector's type, and all that stands before the count of its values; a run's rows have the same few."""
    return str(dtype), text_item(name) + PLAIN_VECTORS[dtype]


@lru_cache(maxsize=256)
def _read_head(head: bytes) -> tuple[str, torch.dtype, int] | None:
    """The name, dtype and bytes a value of a vector, by its head; None for whatever else it may be."""
    (size,) = _U64.unpack_from(head, 1)
    name, of_dtype = head[_TEXT_HEAD : _TEXT_HEAD + size], head[_TEXT_HEAD + size :]
    dtype = _DTYPES.get(of_dtype)
    return None if dtype is None else (name.decode(), dtype, dtype.itemsize)


_DTYPES = {head: dtype for dtype, head in PLAIN_VECTORS.items()}


def _vectors(data: bytes) -> dict[str, Tensor] | None:
    """The fields of a row of plain vectors; None for whatever else the bytes may be."""
    try:
        if data[:2] != _DICT:
            return None
        (count,), at, end = _U64.unpack_from(data, 2), 10, len(data) - 4
        found: dict[str, Tensor] = {}
        for _ in range(count):
            if data[at] != _TEXT:
                return None
            begin, start = at, at + _TEXT_HEAD + data[at + 1]  # longer names than 255 bytes take the other way
            at = start + 3 + data[start + 1]  # the tag, the dtype's length and name, one dim
            head = _read_head(data[begin:at])
            if head is None:
                return None
            name, dtype, itemsize = head
            (length,) = _U64.unpack_from(data, at)
            start, at = at + 8, at + 8 + length * itemsize
            if not length or at > end:
                return None
            found[name] = torch.frombuffer(bytearray(data[start:at]), dtype=dtype)
    except (IndexError, UnicodeDecodeError, struct.error):
        return None
    return found if at == end and len(found) == count else None
