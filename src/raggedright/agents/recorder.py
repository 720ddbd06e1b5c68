"""Records the sessions of a run in the store: the one place where that is done.

Sessions that end within FLUSH_SECONDS of each other are appended together, because a write to the disk takes as long as
a hundred short rows. A session is recorded once it is appended, never before: what a crash loses in that time runs
again.
"""

import asyncio
from collections.abc import Callable, Sequence

from raggedright.sessions import Session, SessionKey, SessionTable
from raggedright.store.protocol import Store

CANCELLED = "cancelled"
FLUSH_SECONDS = 0.5

OnDone = Callable[[int], None]
"""Is called with the number of sessions whose last attempt was just recorded."""


class SessionRecorder:
    """Attempts that have ended, and how they get into the store.

    `open` has the current attempt of each session that is not final, `final` the tables of those that are.
    """

    def __init__(self, store: Store, round: int, keys: Sequence[SessionKey], on_done: OnDone | None) -> None:
        self._store, self._round, self._on_done = store, round, on_done
        self.open = {key[1:3]: key for key in keys}
        self.final: list[SessionTable] = []
        self._ended: list[tuple[Session, bool]] = []  # not recorded yet; whether it is the session's last attempt
        self._timer: asyncio.TimerHandle | None = None

    def add(
        self,
        loop: asyncio.AbstractEventLoop,
        session: Session,
        *,
        is_last: bool,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Take an attempt that has ended; it is recorded soon, and `on_error` is called if that fails."""
        self._ended.append((session, is_last))
        if self._timer is None:
            self._timer = loop.call_later(FLUSH_SECONDS, self._flush_soon, on_error)

    def flush(self) -> None:
        """Record all that have ended."""
        ended, self._ended = self._ended, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._store.append([session for session, _ in ended])
        final = [session for session, is_last in ended if is_last]
        self.final.append(SessionTable.of(self._round, final))
        for key in [session.key for session, is_last in ended if not is_last]:
            self.open[key[1:3]] = key._replace(attempt=key.attempt + 1)
        for session in final:
            del self.open[session.key[1:3]]
        if self._on_done is not None and final:
            self._on_done(len(final))

    def flush_cancelled(self, *, record: bool) -> None:
        """Record those that have ended as they are, and all that are open as failed if that is asked for."""
        self.flush()
        self._ended = [(Session(key=key, cause=CANCELLED), True) for key in self.open.values() if record]
        self.flush()

    def _flush_soon(self, on_error: Callable[[Exception], None]) -> None:
        try:
            self.flush()
        except Exception as error:
            on_error(error)
