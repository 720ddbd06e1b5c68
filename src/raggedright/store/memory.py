"""A store in this process's memory: for evaluation, for tests, and for one rank without resume."""

from collections.abc import Collection, Sequence
from threading import Lock

from numpy.typing import NDArray

from raggedright.sessions import RowKey, Session, SessionKey, SessionTable
from raggedright.store.encoding import EncodedSession, decode_row, decode_table, encode_session
from raggedright.store.protocol import Store, StoreError, already_recorded, last_attempts, round_dropped, row_missing


class MemoryStore(Store):
    """Sessions in a dictionary, encoded as the other stores keep them, so that nobody can change what was appended."""

    def __init__(self, run: str = "") -> None:
        self._run = run
        self._lock = Lock()
        self._sessions: dict[int, dict[SessionKey, EncodedSession]] = {}
        self._dropped = -1
        self._closed = False

    def append(self, sessions: Sequence[Session]) -> None:
        """Record sessions, all of them or none."""
        encoded = [encode_session(self._run, session) for session in sessions]
        with self._lock:
            self._check_open()
            new: dict[SessionKey, EncodedSession] = {}
            for each in encoded:
                if each.key.round <= self._dropped:
                    raise round_dropped(each.key, self._dropped)
                if each.key in new or each.key in self._sessions.get(each.key.round, {}):
                    raise already_recorded(each.key)
                new[each.key] = each
            for key, each in new.items():
                self._sessions.setdefault(key.round, {})[key] = each

    def sessions(self, round: int, *, every_attempt: bool = False) -> SessionTable:
        """The sessions of a round."""
        with self._lock:
            self._check_open()
            found = sorted(self._sessions.get(round, {}).items())
        lines = [(key, each.text, each.digest) for key, each in found]
        return decode_table(self._run, round, lines if every_attempt else last_attempts(lines))

    def rounds(self) -> dict[int, int]:
        """The rounds that have finished sessions, and how many."""
        with self._lock:
            rounds = sorted(self._sessions)
        return {round: n for round in rounds if (n := int((~self.sessions(round).failed).sum()))}

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        """The arrays of these rows."""
        found = []
        with self._lock:
            self._check_open()
            for key in keys:
                if key.round <= self._dropped:
                    raise round_dropped(key, self._dropped)
                session = self._sessions.get(key.round, {}).get(key.of_session)
                if session is None or not 0 <= key.trajectory < len(session.values):
                    raise row_missing(key, known=session is not None)
                found.append((key, session.values[key.trajectory], session.digests[key.trajectory]))
        return [decode_row(self._run, key, value, digest, fields) for key, value, digest in found]

    def drop(self, round: int) -> None:
        """Delete a round and those before it."""
        with self._lock:
            self._check_open()
            self._dropped = max(self._dropped, round)
            self._sessions = {number: each for number, each in self._sessions.items() if number > self._dropped}

    def close(self) -> None:
        """Release the memory."""
        with self._lock:
            self._closed, self._sessions = True, {}

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store in memory is closed; make another one")
