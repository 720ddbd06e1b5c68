"""Encode a session as text and bytes: the columns of a SessionTable as JSON, the arrays of each row as safetensors.

Each text and each value has a digest over itself, its key and the run's id, so anything that was altered, mixed up or
copied from another run is an error when it is read. Decoding cannot run code: there is no pickle.
"""

import json
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Generic, NamedTuple, TypeVar

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from raggedright.sessions import (
    RowKey,
    Session,
    SessionEntry,
    SessionKey,
    SessionTable,
    check_session,
)
from raggedright.store.session_store import StoreError

DIGEST_BYTES = 16
T = TypeVar("T")
TableLine = tuple[SessionKey, str, bytes]  # key, text (the rest of its SessionEntry as JSON) and digest
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class EncodedSession(NamedTuple, Generic[T]):
    """A session as stores keep it; `rows` has the value of each row, or a reference to where it is stored."""

    key: SessionKey
    text: str  # score, cause, metrics and the table columns of its rows, as JSON
    digest: bytes
    rows: Sequence[T]
    row_digests: Sequence[bytes]


def encode_session(run: str, session: Session) -> EncodedSession[bytes]:
    """The session as text and bytes; a SessionError says what cannot be recorded."""
    check_session(session)
    key = SessionKey(*session.key)
    text = _to_json(session.entry[1:])
    rows = [save({name: _native(array) for name, array in t.fields.items()}) for t in session.trajectories]
    row_digests = [digest_of(run, RowKey(*key, i), value) for i, value in enumerate(rows)]
    return EncodedSession(key, text, digest_of(run, key, text), rows, row_digests)


def _native(array: NDArray) -> NDArray:
    """The array contiguous and in this machine's byte order, as safetensors requires."""
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def decode_table(run: str, round: int, lines: Sequence[TableLine], *, every_attempt: bool) -> SessionTable:
    """The table of sessions given in the order of their keys: the last attempt of each, or all."""
    if not every_attempt:
        lines = [*{line[0][1:3]: line for line in lines}.values()]
    for key, text, digest in lines:
        check_digest(run, key, text, digest)
    return SessionTable.of_entries(round, [SessionEntry(key, *json.loads(text)) for key, text, _ in lines])


def decode_row(
    run: str, key: RowKey, value: bytes, digest: bytes, fields: Collection[str] | None
) -> dict[str, NDArray]:
    """The arrays of a row: the named fields, all of which it must have, or all of its fields."""
    check_digest(run, key, value, digest)
    try:
        row = load(value)
    except SafetensorError as error:  # its digest is right, so another version wrote it
        raise StoreError(f"{key}: cannot be read: {error}") from None
    if fields is None:
        return row
    for name in fields:
        if name not in row:
            raise StoreError(f"{key}: has no field {name}; it has {', '.join(row)}")
    return {name: row[name] for name in fields}


def is_finished(text: str) -> bool:
    """Whether the text of a session says that it finished: its cause is empty."""
    return json.loads(text)[1] == ""


def dropped_digest(run: str, round: object) -> bytes:
    """The digest of the last dropped round; in a damaged file it can have any type."""
    return digest_of(run, ("dropped_round",), repr(round))


def digest_of(run: str, key: tuple[object, ...], data: bytes | str) -> bytes:
    """A digest that depends on the data, its key and the run."""
    name = repr((run, *key)).encode("utf-8", "backslashreplace")
    return sha256(b"\0".join((name, data.encode() if isinstance(data, str) else data))).digest()[:DIGEST_BYTES]


def check_digest(run: str, key: SessionKey | RowKey, data: object, digest: object) -> None:
    """Raise unless this run wrote this data under this key; in a damaged file the data can have any type."""
    if not isinstance(data, bytes | str) or digest_of(run, key, data) != digest:
        raise StoreError(
            f"{key}: does not match its checksum; it was altered, or copied from another run: restore a copy of the "
            "file, or start again with --fresh"
        )
