"""The encoding of a session: every array is decoded exactly, and every altered bit is detected."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raggedright.sessions import NUMBER_TYPES
from raggedright.store.encoding import decode_row, decode_table, encode_session
from raggedright.store.session_store import StoreError
from store.values import VALUES, finished, key, row, tokens

DTYPE = st.sampled_from(sorted({np.dtype(kind) for kind in NUMBER_TYPES}, key=str))


@given(hnp.arrays(DTYPE, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)))
def test_arrays_of_every_dtype_and_shape_are_decoded_exactly(array: np.ndarray) -> None:
    encoded = encode_session("run", finished(key(), tokens(1, extra={"x": array})))
    decoded = decode_row("run", row(key()), encoded.rows[0], encoded.row_digests[0], ["x"])["x"]
    assert (decoded.dtype, decoded.shape) == (array.dtype, array.shape)
    assert decoded.tobytes() == array.tobytes()


def test_views_and_other_byte_orders_are_decoded_as_values() -> None:
    views = (np.arange(12).reshape(3, 4).T, np.arange(9)[::2], np.broadcast_to(np.ones(1), 5))
    for array in (*views, np.arange(3, dtype=">i4")):
        encoded = encode_session("run", finished(key(), tokens(1, extra={"x": array})))
        assert np.array_equal(decode_row("run", row(key()), encoded.rows[0], encoded.row_digests[0], ["x"])["x"], array)


@pytest.mark.parametrize("other", [{"run": "other"}, {"key": row(key("q"))}, {"key": row(key(attempt=1))}])
def test_a_row_of_another_run_or_key_is_refused(other: dict) -> None:
    encoded = encode_session("run", finished(key(), tokens(2, extra=VALUES)))
    arguments = {"run": "run", "key": row(key()), **other}
    with pytest.raises(StoreError, match="checksum"):
        decode_row(arguments["run"], arguments["key"], encoded.rows[0], encoded.row_digests[0], None)


@given(st.data())
def test_every_altered_bit_is_detected(data: st.DataObject) -> None:
    encoded = encode_session("run", finished(key(), tokens(3, extra=VALUES), exact=1.0))
    whole = [encoded.text.encode(), encoded.digest, encoded.rows[0], encoded.row_digests[0]]
    which = data.draw(st.integers(0, 3))
    altered = bytearray(whole[which])
    altered[data.draw(st.integers(0, len(altered) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    whole[which] = bytes(altered)
    text, digest, value, value_digest = whole
    with pytest.raises((StoreError, UnicodeDecodeError)):
        decode_all(text, digest, value, value_digest)


def decode_all(text: bytes, digest: bytes, value: bytes, value_digest: bytes) -> None:
    decode_table("run", 0, [(key(), text.decode(), digest)], every_attempt=False)
    decode_row("run", row(key()), value, value_digest, None)
