"""A session as text and bytes: what a table lists of it as JSON, and each row's arrays in safetensors' format.

Every text and every value has a digest over itself, its key and the run's id, so that whatever was altered, mixed up or
copied from another run is an error when it is read. Nothing here can run code: no pickle.
"""

import json
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import NamedTuple

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from raggedright.sessions import (
    RowKey,
    RowLine,
    Session,
    SessionKey,
    SessionLine,
    SessionTable,
    check_session,
    make_table,
    row_lines,
)
from raggedright.store.protocol import StoreError, choose

DIGEST_BYTES = 16
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class EncodedSession(NamedTuple):
    """A session as stores keep it."""

    key: SessionKey
    text: str  # score, cause, metrics and what a table lists of its rows, as JSON
    digest: bytes
    values: list[bytes]  # one per row
    digests: list[bytes]


def encode_session(run: str, session: Session) -> EncodedSession:
    """The session as text and bytes; a SessionError names what cannot be recorded."""
    check_session(session)
    key = SessionKey(*session.key)
    text = _to_json([session.score, session.cause, {**session.metrics}, row_lines(session)])
    values = [save({name: _plain(array) for name, array in t.fields.items()}) for t in session.trajectories]
    digests = [digest_of(run, RowKey(*key, i), value) for i, value in enumerate(values)]
    return EncodedSession(key, text, digest_of(run, key, text), values, digests)


def _plain(array: NDArray) -> NDArray:
    """The array in one piece and in this machine's byte order, as safetensors takes it."""
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def decode_table(run: str, round: int, found: Sequence[tuple[SessionKey, str, bytes]]) -> SessionTable:
    """The table of sessions given as keys, texts and digests, in the order of their keys."""
    lines: list[SessionLine] = []
    rows: list[Sequence[RowLine]] = []
    for key, text, digest in found:
        check_digest(run, key, text, digest)
        score, cause, metrics, of_rows = json.loads(text)
        lines.append((key.prompt, key.session, key.attempt, score, cause, metrics))
        rows.append(of_rows)
    return make_table(round, lines, rows)


def decode_row(
    run: str, key: RowKey, value: bytes, digest: bytes, fields: Collection[str] | None
) -> dict[str, NDArray]:
    """The arrays of a row."""
    check_digest(run, key, value, digest)
    try:
        row = load(value)
    except SafetensorError as error:  # written by another version, since its digest is right
        raise StoreError(f"{key}: cannot be read: {error}") from None
    return choose(key, row, fields)


def digest_of(run: str, key: SessionKey | RowKey, data: bytes | str) -> bytes:
    """What shows that data is this key's, of this run, and as it was written."""
    name = repr((run, *key)).encode("utf-8", "backslashreplace")
    return sha256(b"\0".join((name, data.encode() if isinstance(data, str) else data))).digest()[:DIGEST_BYTES]


def check_digest(run: str, key: SessionKey | RowKey, data: object, digest: object) -> None:
    """A StoreError if the data is not what was written under this key by this run; a damaged file has any types."""
    if not isinstance(data, bytes | str) or digest_of(run, key, data) != digest:
        raise StoreError(
            f"{key}: does not match its checksum; it was altered, or copied from another run: restore a copy of the "
            "file, or start again with --fresh"
        )
