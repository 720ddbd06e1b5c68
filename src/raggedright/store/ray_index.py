"""The Ray actor that knows which sessions a store on TransferQueue has, and where their rows are.

TransferQueue carries the rows' bytes and promises little about them. So a writer begins a write here, sends its rows
and then commits: only a commit makes sessions visible, all of a write at once. A round is cleared from TransferQueue
only when no write to it is under way, because TransferQueue gives the place of a cleared row to the next one and a late
put would overwrite that.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from raggedright.sessions import RowKey, SessionKey
from raggedright.store.protocol import already_recorded, last_attempts, round_dropped, row_missing


class IndexedSession(NamedTuple):
    """A session as the actor knows it; `names` are its rows' keys in TransferQueue."""

    key: SessionKey
    text: str
    digest: bytes
    names: Sequence[str]
    digests: Sequence[bytes]


@dataclass
class RunIndex:
    """The sessions of one run. Methods that return rounds name those that the caller must clear from TransferQueue."""

    sessions: dict[int, dict[SessionKey, IndexedSession]] = field(default_factory=dict)
    writes: dict[int, frozenset[int]] = field(default_factory=dict)  # the rounds of each write under way
    to_clear: set[int] = field(default_factory=set)
    dropped: int = -1
    numbers: count = field(default_factory=count)

    def begin(self, keys: Sequence[SessionKey]) -> int:
        """The number of a new write; refused if one of its sessions cannot be recorded."""
        self._check(keys)
        number = next(self.numbers)
        self.writes[number] = frozenset(key.round for key in keys)
        return number

    def commit(self, write: int, sessions: Sequence[IndexedSession]) -> None:
        """Make the sessions of a write visible."""
        self._check([session.key for session in sessions])
        for session in sessions:
            self.sessions.setdefault(session.key.round, {})[session.key] = session
        self.writes.pop(write, None)

    def abort(self, write: int) -> list[int]:
        """End a write without its sessions."""
        self.writes.pop(write, None)
        return self._free()

    def abort_all(self) -> list[int]:
        """End all writes, whose writers are known to be dead."""
        self.writes.clear()
        return self._free()

    def listing(self, round: int, every_attempt: bool) -> list[tuple[SessionKey, str, bytes]]:
        """The sessions of a round in the order of their keys: the last attempt of each, or all."""
        lines = sorted([session[:3] for session in self.sessions.get(round, {}).values()])
        return lines if every_attempt else last_attempts(lines)

    def locate(self, keys: Sequence[RowKey]) -> list[tuple[str, bytes]]:
        """The key in TransferQueue and the digest of each of these rows."""
        places = []
        for key in keys:
            if key.round <= self.dropped:
                raise round_dropped(key, self.dropped)
            session = self.sessions.get(key.round, {}).get(key.of_session)
            if session is None or not 0 <= key.trajectory < len(session.names):
                raise row_missing(key, known=session is not None)
            places.append((session.names[key.trajectory], session.digests[key.trajectory]))
        return places

    def rounds(self) -> list[int]:
        """The rounds that have sessions."""
        return sorted(self.sessions)

    def drop(self, round: int) -> list[int]:
        """Forget a round and those before it."""
        self.dropped = max(self.dropped, round)
        gone = [number for number in self.sessions if number <= self.dropped]
        self.to_clear.update(gone)
        for number in gone:
            del self.sessions[number]
        return self._free()

    def _check(self, keys: Sequence[SessionKey]) -> None:
        for key in keys:
            if key.round <= self.dropped:
                raise round_dropped(key, self.dropped)
            if key in self.sessions.get(key.round, {}):
                raise already_recorded(key)

    def _free(self) -> list[int]:
        busy = {round for rounds in self.writes.values() for round in rounds}
        free, self.to_clear = self.to_clear - busy, self.to_clear & busy
        return sorted(free)


class SessionIndex:
    """The actor: one RunIndex per run. The process that made it starts TransferQueue; the others wait until it has."""

    def __init__(self) -> None:
        self.runs: dict[str, RunIndex] = {}
        self.started = asyncio.Event()

    async def call(self, run: str, method: str, *args: object) -> object:
        """Call a method of a run's index."""
        return getattr(self.runs.setdefault(run, RunIndex()), method)(*args)

    async def set_started(self) -> None:
        """Say that TransferQueue has started."""
        self.started.set()

    async def wait_started(self) -> None:
        """Return once TransferQueue has started."""
        await self.started.wait()
