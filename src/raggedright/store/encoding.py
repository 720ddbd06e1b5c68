"""One field's value as bytes, and back: no pickle, the same type, dtype, shape and bits.

A value is a version byte, one item, and the CRC-32 of all that, little-endian throughout. An item is a tag and a body:

    N T F            None, True, False
    i                a whole number: its length in bytes (u64), two's complement
    f                a float: 8 bytes
    s b              text (UTF-8) or bytes: length (u64), then they
    l t d            list, tuple, dict: count (u64), then the items; a dict's keys are plain values, as above
    x a z            torch tensor, numpy array, numpy scalar: dtype (u8 length, name), dims (u8 count, u64 each), raw

Bytes may come from a stranger: every size is checked against the bytes that are there before memory is taken, nesting
and dims are bounded, and whatever is unknown, cut or altered is a StoreError. What comes back owns its memory.

The surprise: exact types only. A subclass (an OrderedDict, a namedtuple, a tensor of its own class) would come back as
something else, so it is refused. Tensors are detached and come back on the CPU.
"""

import struct
import zlib
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raggedright.ragged import ARRAY_CODES
from raggedright.store.checks import Encoded
from raggedright.store.protocol import Fields, Key, StoreError
from raggedright.store.reader import KEY_TYPES, MAX_DEPTH, MAX_DIMS, NUMPY, TORCH, Reader, altered
from raggedright.store.tags import is_text

VERSION = b"\x01"
MAX_BYTES = 1_000_000_000 - 1_024  # SQLite's limit for one value, with room for the rest of its row

_RESIDUE = 0x2144DF1C  # the CRC-32 of any bytes that end with their own CRC-32
_TYPE_NAMES = {dtype: str(dtype) for dtype in TORCH.values()}
_TORCH_HEADS = {dtype: b"x" + bytes([len(name)]) + name.encode() for name, dtype in TORCH.items()}
_LIKE_NUMPY = frozenset(dtype for name, dtype in TORCH.items() if hasattr(np, name) and not dtype.is_complex)
# All that stands before the count of a vector's values; a boolean's values have to be looked at one by one.
PLAIN_VECTORS = {dtype: _TORCH_HEADS[dtype] + b"\x01" for dtype in _LIKE_NUMPY if dtype != torch.bool}
_VECTORS = {VERSION + head: dtype for dtype, head in PLAIN_VECTORS.items()}
_seen_names: set[str] = set()  # that are text; a run's rows have the same few
MOST_SEEN = 1_000
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")


def type_name(value: object) -> str:
    """What a field's type is called; only tensors and arrays have a dot in it."""
    if isinstance(value, Tensor):
        return _TYPE_NAMES.get(value.dtype) or str(value.dtype)
    if isinstance(value, np.ndarray):
        return f"numpy.{value.dtype}"
    return "None" if value is None else type(value).__name__


def with_tensors(fields: Fields) -> Fields:
    """Fields with the vectors that Python's arrays stand for."""
    arrays = {name: value for name, value in fields.items() if type(value) is array and value.typecode in ARRAY_CODES}
    if not arrays:
        return fields
    copies = {name: np.frombuffer(bytearray(value), dtype=value.typecode) for name, value in arrays.items()}
    return {**fields, **{name: torch.from_numpy(copy) for name, copy in copies.items()}}


def encode_fields(key: Key, fields: Fields) -> dict[str, Encoded]:
    """A row's fields as bytes; an error names the row and the field."""
    fields = with_tensors(fields)
    check_names(key, fields)
    encoded = {}
    for name, value in fields.items():
        try:
            encoded[name] = Encoded(type_name(value), encode(value))
        except StoreError as error:
            raise field_error(key, name, error) from None
    return encoded


def check_names(key: Key, fields: Fields) -> None:
    """Refuse field names that are no text."""
    if fields.keys() <= _seen_names:
        return
    for name in fields:
        if not is_text(name):
            raise StoreError(f"{key}: field {name!r:.60} has a name that is no text; a field's name is a string")
    if len(_seen_names) < MOST_SEEN:
        _seen_names.update(fields)


def field_error(key: Key, name: str, error: StoreError) -> StoreError:
    """An error about a value, with the row and the field that it belongs to."""
    return StoreError(f"{key}: field {name} {error}")


def decode_field(key: Key, name: str, data: object) -> object:
    """The value that `encode` was given; an error names the row and the field."""
    try:
        return decode(data)
    except StoreError as error:
        raise field_error(key, name, error) from None


def encode(value: object) -> bytes:
    """One value as bytes; an error says what cannot be one, without a subject."""
    vector = plain_vector(value)
    if vector is not None and vector.nbytes < MAX_BYTES // 2:
        whole = b"".join((VERSION, PLAIN_VECTORS[value.dtype], _U64.pack(len(vector)), vector.data))  # type: ignore[attr-defined]
        return whole + zlib.crc32(whole).to_bytes(4, "little")
    parts: list[bytes | memoryview] = [VERSION]
    write_item(value, parts, 0)
    size = sum(map(len, parts))
    if size > MAX_BYTES:
        raise StoreError(f"has {size:,} bytes and a value takes at most {MAX_BYTES:,}; split it into several fields")
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([*parts, crc.to_bytes(4, "little")])


def plain_vector(value: object) -> np.ndarray | None:
    """The values of a plain vector, which most fields are; None for whatever is not."""
    if type(value) is not Tensor or value.dtype not in PLAIN_VECTORS:
        return None
    try:
        array = value.numpy()
    except (RuntimeError, TypeError):  # on another device, with a gradient, negated by a flag, sparse
        return None
    return array if array.ndim == 1 and array.nbytes and array.strides[0] == array.itemsize else None


def decode(data: object) -> object:
    """The value that `encode` was given; an error says what is wrong with the bytes, without a subject."""
    whole = checked(data)
    if (vector := _decode_vector(whole)) is not None:
        return vector
    if whole[:1] != VERSION:
        raise StoreError(f"is in format {whole[0]} and this version reads {VERSION[0]}; read it with its own version")
    reader = Reader(memoryview(whole)[1:-4])
    value = reader.item(0)
    if reader.left:
        raise altered(f"{reader.left:,} bytes after its end")
    return value


def _decode_vector(data: bytes) -> Tensor | None:
    """The plain vector in bytes whose checksum is right; None for whatever else they may be."""
    start = 4 + data[2]
    dtype = _VECTORS.get(data[:start])
    if dtype is None or len(data) < start + 12:
        return None
    (count,) = _U64.unpack_from(data, start)
    if not count or count * dtype.itemsize != len(data) - start - 12:
        return None
    return torch.frombuffer(bytearray(data[start + 8 : -4]), dtype=dtype)


def checked(data: object) -> bytes:
    """Bytes that fit their checksum."""
    if not isinstance(data, bytes):
        raise StoreError(f"is a {type(data).__name__} where bytes were stored; the file was altered")
    if len(data) < 6 or zlib.crc32(data) != _RESIDUE:
        raise StoreError(f"has {len(data):,} bytes that do not fit their checksum; the file was cut or altered")
    return data


def text_item(text: str) -> bytes:
    """Text as an item."""
    body = text.encode("utf-8", "surrogatepass")
    return b"s" + _U64.pack(len(body)) + body


def write_item(value: object, parts: list[bytes | memoryview], depth: int) -> None:
    """Append an item's bytes at this depth; an error says what cannot be one, without a subject."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise StoreError(f"is nested more than {MAX_DEPTH} deep; flatten it")
    if value is None or kind is bool:
        parts.append({None: b"N", True: b"T", False: b"F"}[value])  # type: ignore[index]
    elif isinstance(value, Tensor):
        _write_tensor(value, parts)
    elif isinstance(value, np.ndarray | np.generic):
        _write_array(value, parts)
    elif kind in _PLAIN:
        tag, to_bytes = _PLAIN[kind]
        body = to_bytes(value)
        parts += [tag + _U64.pack(len(body)), body] if tag != b"f" else [tag, body]
    elif kind is list or kind is tuple:
        parts.append((b"l" if kind is list else b"t") + _U64.pack(len(value)))  # type: ignore[arg-type]
        for item in value:  # type: ignore[attr-defined]
            write_item(item, parts, depth + 1)
    elif kind is dict:
        parts.append(b"d" + _U64.pack(len(value)))  # type: ignore[arg-type]
        for name, item in value.items():  # type: ignore[attr-defined]
            if type(name) not in KEY_TYPES:
                raise StoreError(f"has a dict with a key of type {type(name).__name__}; use text or numbers")
            write_item(name, parts, depth + 1)
            write_item(item, parts, depth + 1)
    else:
        raise _refused(value)


_PLAIN: dict[type, tuple[bytes, Callable]] = {
    int: (b"i", lambda n: n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)),
    float: (b"f", _F64.pack),
    str: (b"s", lambda text: text.encode("utf-8", "surrogatepass")),
    bytes: (b"b", bytes),
}


def _refused(value: object) -> StoreError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return StoreError(
        f"is or has in it a {kind}, which a store does not keep; give tensors, numpy arrays, dicts, lists, tuples, "
        "text, bytes, numbers, booleans or None"
    )


def _write_tensor(value: Tensor, parts: list[bytes | memoryview]) -> None:
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_nested:
        raise _refused(value)
    head = _TORCH_HEADS.get(value.dtype)
    if head is None:
        raise StoreError(f"is a tensor of {value.dtype}, which a store does not keep; convert it")
    parts.append(head + _dims(tuple(value.shape)))
    value = value.detach()
    plain = value.dtype in _LIKE_NUMPY and value.is_cpu and value.is_contiguous() and not value.is_neg()
    if plain and value.numel():  # most are, and need no copy
        parts.append(memoryview(value.numpy()).cast("B"))  # type: ignore[arg-type]
        return
    flat = value.cpu().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # as those of no or one value may be
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    raw: Any = flat.view(torch.uint8).numpy()
    parts.append(memoryview(raw))


def _write_array(value: np.ndarray | np.generic, parts: list[bytes | memoryview]) -> None:
    name = value.dtype.str
    if NUMPY.get(name) != value.dtype or (isinstance(value, np.ndarray) and type(value) is not np.ndarray):
        raise StoreError(
            f"is or has in it a numpy {type(value).__name__} of {value.dtype}, which a store does not keep"
        )
    tag = b"a" if isinstance(value, np.ndarray) else b"z"
    parts += [tag + bytes([len(name)]) + name.encode() + _dims(value.shape), value.tobytes()]


def _dims(shape: tuple[int, ...]) -> bytes:
    if len(shape) == 1:
        return b"\x01" + _U64.pack(shape[0])
    if len(shape) > MAX_DIMS:
        raise StoreError(f"has {len(shape)} dims and a value takes at most {MAX_DIMS}; reshape it")
    return bytes([len(shape)]) + struct.pack(f"<{len(shape)}Q", *shape)
