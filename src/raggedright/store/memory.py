"""A store in the memory of this process: for evaluation, for tests, and for one rank without resume.

`SessionIndex` is also what the actor of the TransferQueue store keeps.
"""

from collections.abc import Collection, Sequence
from threading import Lock
from typing import Generic

from numpy.typing import NDArray

from raggedright.sessions import RowKey, Session, SessionKey, SessionTable
from raggedright.store.encoding import (
    EncodedSession,
    T,
    TableLine,
    decode_row,
    decode_table,
    encode_session,
    is_finished,
)
from raggedright.store.session_store import Store, StoreError, already_recorded, round_dropped, row_missing

_RUN = ""  # digests need a run id; a store in memory has only its own run


class SessionIndex(Generic[T]):
    """The recorded sessions by round and key; T is what is kept of a row: its value, or where that is stored."""

    def __init__(self) -> None:
        self._sessions: dict[int, dict[SessionKey, EncodedSession[T]]] = {}
        self._dropped = -1

    def check_new(self, keys: Sequence[SessionKey]) -> None:
        """Raise if one of these keys cannot be added."""
        new: set[SessionKey] = set()
        for key in keys:
            if key.round <= self._dropped:
                raise round_dropped(key, self._dropped)
            if key in new or key in self._sessions.get(key.round, {}):
                raise already_recorded(key)
            new.add(key)

    def add(self, sessions: Sequence[EncodedSession[T]]) -> None:
        """Add sessions, all of them or none."""
        self.check_new([session.key for session in sessions])
        for session in sessions:
            self._sessions.setdefault(session.key.round, {})[session.key] = session

    def lines(self, round: int) -> list[TableLine]:
        """The table lines of a round, in the order of their keys."""
        return sorted((each.key, each.text, each.digest) for each in self._sessions.get(round, {}).values())

    def rounds(self) -> dict[int, int]:
        """The number of finished sessions of each round that has any."""
        finished = {r: sum(is_finished(each.text) for each in self._sessions[r].values()) for r in self._sessions}
        return {round: finished[round] for round in sorted(finished) if finished[round]}

    def find(self, keys: Sequence[RowKey]) -> list[tuple[T, bytes]]:
        """What is kept of each of these rows, and its digest."""
        rows = []
        for key in keys:
            if key.round <= self._dropped:
                raise round_dropped(key, self._dropped)
            session = self._sessions.get(key.round, {}).get(key.of_session)
            if session is None or not 0 <= key.trajectory < len(session.rows):
                raise row_missing(key, session_exists=session is not None)
            rows.append((session.rows[key.trajectory], session.row_digests[key.trajectory]))
        return rows

    def drop(self, round: int) -> list[int]:
        """Delete a round and those before it; returns the rounds that had sessions."""
        self._dropped = max(self._dropped, round)
        dropped = [number for number in self._sessions if number <= self._dropped]
        for number in dropped:
            del self._sessions[number]
        return dropped


class MemoryStore(Store):
    """Sessions in a dictionary, encoded as in the other stores, so that callers cannot change what they appended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._index: SessionIndex[bytes] | None = SessionIndex()

    def append(self, sessions: Sequence[Session]) -> None:
        """Record sessions, all of them or none."""
        encoded = [encode_session(_RUN, session) for session in sessions]
        with self._lock:
            self._opened().add(encoded)

    def sessions(self, round: int, *, every_attempt: bool = False) -> SessionTable:
        """The sessions of a round."""
        with self._lock:
            lines = self._opened().lines(round)
        return decode_table(_RUN, round, lines, every_attempt=every_attempt)

    def rounds(self) -> dict[int, int]:
        """The number of finished sessions of each round that has any."""
        with self._lock:
            return self._opened().rounds()

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        """The arrays of these rows."""
        with self._lock:
            rows = self._opened().find(keys)
        return [decode_row(_RUN, key, *row, fields) for key, row in zip(keys, rows, strict=True)]

    def drop(self, round: int) -> None:
        """Delete a round and those before it."""
        with self._lock:
            self._opened().drop(round)

    def close(self) -> None:
        """Release the memory."""
        self._index = None

    def _opened(self) -> SessionIndex[bytes]:
        if self._index is None:
            raise StoreError("the store in memory is closed; make another one")
        return self._index
