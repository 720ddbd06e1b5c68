"""A value comes back from its bytes as it was, and bytes of anybody give a value or a StoreError."""

import random
import zlib
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raggedright.store.encoding import MAX_DEPTH, NUMPY, TORCH, decode, encode
from raggedright.store.protocol import StoreError
from store.values import VALUES, same

SHAPES = [(), (0,), (5,), (0, 3), (4, 3, 2), (3, 7), (4, 7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TORCH)
def test_a_tensor_of_every_dtype_and_shape_comes_back(name: str, shape: tuple[int, ...]) -> None:
    dtype = TORCH[name]
    raw = torch.randint(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    back = decode(encode(tensor))
    assert same(back, tensor)
    assert isinstance(back, torch.Tensor)
    assert back.is_contiguous()
    back.zero_()  # it is the reader's own


@pytest.mark.parametrize("name", NUMPY)
def test_a_numpy_array_and_number_of_every_dtype_comes_back(name: str) -> None:
    for shape in SHAPES:
        array = np.ones(shape, dtype=NUMPY[name])
        back = decode(encode(array))
        assert same(back, array)
        assert isinstance(back, np.ndarray)
        assert back.flags.writeable
    assert same(decode(encode(NUMPY[name].type(1))), NUMPY[name].type(1))


def test_views_conjugates_parameters_and_gradients_come_back_as_values() -> None:
    z = torch.view_as_complex(torch.rand(4, 2))
    for tensor in (
        torch.arange(12).reshape(3, 4).T,
        torch.arange(9)[::2],
        torch.zeros(1).expand(5),
        torch.ones(1).expand(5)[:1],
        z.conj(),
        z.conj().imag,
    ):
        assert torch.equal(decode(encode(tensor)), tensor)  # type: ignore[arg-type]
    weight = torch.nn.Parameter(torch.rand(3))
    assert same(decode(encode(weight)), weight.detach())


def leaves() -> st.SearchStrategy:
    arrays = hnp.arrays(st.sampled_from(list(NUMPY.values())), hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
    tensors = hnp.arrays(np.int64, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)).map(torch.from_numpy)
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text(st.characters())
    return plain | arrays | tensors


def containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    names = st.text() | st.integers() | st.none()
    return st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(names, inner)


VALUE = st.recursive(leaves(), containers, max_leaves=12)


@given(VALUE)
def test_any_nested_value_comes_back(value: object) -> None:
    assert same(decode(encode(value)), value)


@given(VALUE, st.randoms(use_true_random=False))
def test_altered_or_cut_bytes_are_an_error(value: object, chance: random.Random) -> None:
    data = bytearray(encode(value))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    for bad in (bytes(data), encode(value)[: chance.randrange(len(data))], encode(value) + b"\0"):
        with pytest.raises(StoreError):
            decode(bad)


def resealed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "little")


@given(VALUE, st.randoms(use_true_random=False))
def test_bytes_that_a_stranger_made_to_fit_give_a_value_or_an_error(value: object, chance: random.Random) -> None:
    for _ in range(20):
        body = bytearray(encode(value)[:-4])
        for _ in range(chance.randint(1, 4)):
            body[chance.randrange(1, len(body))] = chance.choice(b"\0\1\x7f\xff\x80NTFifsbltdxaz") & 0xFF
        cut = chance.randrange(1, len(body) + 1) if chance.random() < 0.3 else len(body)
        try:
            again = decode(resealed(bytes(body[:cut])))
        except StoreError:
            continue
        assert same(decode(encode(again)), again)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_an_error(raw: bytes) -> None:
    for data in (raw, resealed(b"\x01" + raw)):
        try:
            decode(data)
        except StoreError:
            continue


def big(n: int) -> bytes:
    return n.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"x\x07float32\x01" + big(2**60), "announced"),
        (b"x\x07float32\x03" + big(0) + big(2**62) + big(2**62), "shape"),
        (b"x\x07float32\x01" + big(3) + b"\0" * 8, "announced"),
        (b"x\x06object\x00", "dtype"),
        (b"a\x02|O\x00" + b"\0" * 8, "dtype"),
        (b"x\x04bool\x01" + big(1) + b"\x02", "boolean"),
        (b"x\x05uint8\xff", "dims"),
        (b"l" + big(2**50), "announced"),
        (b"s" + big(2**50), "announced"),
        (b"s" + big(1) + b"\xff", "UTF-8"),
        ((b"l" + big(1)) * 5_000 + b"N", "nested"),
        (b"d" + big(2) + b"NN" * 2, "twice"),
        (b"d" + big(1) + b"l" + big(0) + b"N", "key of type list"),
        (b"NN", "after its end"),
        (b"Q", "tag"),
        (b"z\x03<f4\x01" + big(1) + b"\0" * 4, "number of shape"),
    ],
)
def test_a_strangers_sizes_are_checked_before_memory_is_taken(body: bytes, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        decode(resealed(b"\x01" + body))


def test_another_version_is_named() -> None:
    with pytest.raises(StoreError, match="format 9"):
        decode(resealed(b"\x09N"))


def deep(levels: int) -> object:
    value: object = None
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        OrderedDict(a=1),
        namedtuple("Pair", "a b")(1, 2),
        np.array(["a"]),
        np.array([object()]),
        np.ones(2, dtype=np.longdouble),
        np.ma.masked_array([1]),
        torch.ones(2, 2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        {(1, 2): 3},
        deep(MAX_DEPTH + 1),
        torch.zeros((1,) * 33),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused(value: object) -> None:
    with pytest.raises(StoreError):
        encode({"in": value})


def test_the_deepest_value_that_is_taken_is_given_back() -> None:
    assert same(decode(encode(deep(MAX_DEPTH))), deep(MAX_DEPTH))


def test_a_tensor_costs_its_bytes_and_a_few_more() -> None:
    assert len(encode(torch.zeros(1000))) < 4_000 + 40


@pytest.mark.parametrize("name", VALUES)
def test_encoding_is_the_same_each_time(name: str) -> None:
    assert encode(VALUES[name]) == encode(VALUES[name])
