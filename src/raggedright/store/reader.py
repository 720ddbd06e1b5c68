"""Reads the items of raggedright.store.encoding off bytes that may be a stranger's.

Every size is checked against the bytes that are there before memory is taken; nesting, dims and dtypes are bounded by
what stands here. Whatever is unknown is a StoreError, whose sentence lacks the subject: the row and the field.
"""

import math
import struct

import numpy as np
import torch

from raggedright.store.protocol import StoreError

MAX_DEPTH = 32
MAX_DIMS = 32
KEY_TYPES = (str, int, float, bool, bytes, type(None))
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_FLOATS = ("float64", "float32", "float16", "bfloat16", *_FLOAT8, "complex64", "complex128")
_WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _FLOATS + _WHOLE if hasattr(torch, name)}
_NUMPY_CODES = ("f2", "f4", "f8", "c8", "c16", "i2", "i4", "i8", "u2", "u4", "u8")
NUMPY: dict[str, np.dtype] = {
    name: np.dtype(name) for name in ("|b1", "|i1", "|u1", *(order + c for order in "<>" for c in _NUMPY_CODES))
}
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")


def altered(what: str) -> StoreError:
    """That bytes are not what `encode` makes."""
    return StoreError(f"cannot be read: {what}; the file was altered")


class Reader:
    """Reads items off bytes that may be anybody's."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at, self.size = data, 0, len(data)

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        return self.size - self.at

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        at, end = self.at, self.at + size
        if end > self.size:
            raise altered(f"{size:,} bytes are announced and {self.left:,} are there")
        self.at = end
        return self.data[at:end]

    def number(self) -> int:
        """The next size or count."""
        return _U64.unpack(self.take(8))[0]

    def item(self, depth: int) -> object:
        """The next item, at this depth."""
        if depth > MAX_DEPTH:
            raise altered(f"it is nested more than {MAX_DEPTH} deep")
        tag = bytes(self.take(1))
        if tag in _SINGLE:
            return _SINGLE[tag]
        if tag in b"xaz":
            return self.array(tag)
        if tag == b"f":
            return _F64.unpack(self.take(8))[0]
        if tag in b"isb":
            return _plain(tag, bytes(self.take(self.number())))
        if tag in b"ltd":
            return self.container(tag, depth)
        raise altered(f"a tag {tag!r} that does not exist")

    def container(self, tag: bytes, depth: int) -> object:
        """The items of a list, tuple or dict."""
        count = self.number()
        if count > self.left:  # an item has a byte at least
            raise altered(f"{count:,} items are announced and {self.left:,} bytes are there")
        if tag != b"d":
            items = [self.item(depth + 1) for _ in range(count)]
            return items if tag == b"l" else tuple(items)
        found: dict[object, object] = {}
        for _ in range(count):
            name = self.item(depth + 1)
            if type(name) not in KEY_TYPES:
                raise altered(f"a dict with a key of type {type(name).__name__}")
            found[name] = self.item(depth + 1)
        if len(found) != count:
            raise altered("a dict with a key twice")
        return found

    def array(self, tag: bytes) -> object:
        """A tensor, an array or a numpy number, in memory of its own."""
        *letters, num_dims = self.take(self.take(1)[0] + 1)
        name = bytes(letters).decode("latin-1")
        if num_dims > MAX_DIMS:
            raise altered(f"{num_dims} dims")
        shape = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        dtype = (TORCH if tag == b"x" else NUMPY).get(name)
        if dtype is None:
            raise altered(f"a dtype {name!r:.40} that this version does not know")
        count = math.prod(shape)
        if not count and math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
            raise altered(f"the shape {shape}")
        raw = bytearray(self.take(count * dtype.itemsize))  # the value's own memory
        if name in ("bool", "|b1") and raw.translate(None, b"\0\1"):
            raise altered("a boolean that is neither 0 nor 1")
        if isinstance(dtype, torch.dtype):
            if not raw:
                return torch.empty(shape, dtype=dtype)
            flat = torch.frombuffer(raw, dtype=dtype)
            return flat if num_dims == 1 else flat.reshape(shape)
        array = np.frombuffer(raw, dtype=dtype).reshape(shape)
        if tag == b"z" and shape:
            raise altered(f"a number of shape {shape}")
        return array if tag == b"a" else array[()]


_SINGLE: dict[bytes, object] = {b"N": None, b"T": True, b"F": False}


def _plain(tag: bytes, raw: bytes) -> object:
    if tag == b"i":
        return int.from_bytes(raw, "little", signed=True)
    if tag == b"b":
        return raw
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise altered("text that is not UTF-8") from None
