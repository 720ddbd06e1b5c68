"""Puts the sessions of a run into the store: the one place where that is done.

What ends within a moment is put together, in one transaction where the store has such, because a write to the disk
takes as long as a hundred short rows. A session is recorded once it is put, never before: what a crash takes with it in
that moment runs again.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from raggedright.store.listing import Listing, listing_of_new
from raggedright.store.protocol import NewRow, NewSession, SessionKey, Store

CANCELLED = "cancelled"
MOMENT = 0.5  # seconds that a session which has ended may wait for others

OnDone = Callable[[Listing], None]
"""Is given the sessions whose last attempt was just put."""


class AttemptResult(NamedTuple):
    """What an attempt came to: rows and a score, or a cause."""

    cause: str = ""
    rows: Sequence[NewRow] = ()
    score: float | None = None


class SessionRecorder:
    """Attempts that have ended, and how they get into the store.

    `open` has the current attempt of each session that is not final, `final` what a store lists of those that are.
    """

    def __init__(self, store: Store, keys: Sequence[SessionKey], on_done: OnDone | None) -> None:
        self._store, self._on_done = store, on_done
        self.open = {key[1:3]: key for key in keys}
        self.final: list[Listing] = []
        self._ended: list[tuple[NewSession, bool]] = []  # and not put yet; whether it is the session's last attempt
        self._timer: asyncio.TimerHandle | None = None

    def add(
        self, loop: asyncio.AbstractEventLoop, key: SessionKey, result: AttemptResult, *, is_last: bool,
        on_error: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """Take an attempt that has ended; it is put in a moment, and what goes wrong then is told."""
        self._ended.append((_new_session(key, result), is_last))
        if self._timer is None:
            self._timer = loop.call_later(MOMENT, self._put_soon, on_error)

    def put_ended(self) -> None:
        """Put all that have ended."""
        ended, self._ended = self._ended, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        new = [each for each, _ in ended]
        listing = listing_of_new(new)
        if listing.vectors is None:
            self._store.put_all(new)
        else:
            self._store.put_listing(listing)
        last = [each for each, is_last in ended if is_last]
        final = listing if len(last) == len(new) else listing_of_new(last)
        self.final.append(final)
        for key in [each.key for each, is_last in ended if not is_last]:
            self.open[key[1:3]] = key._replace(attempt=key.attempt + 1)
        for key in final.sessions.key:
            del self.open[key[1:3]]
        if self._on_done is not None and len(final):
            self._on_done(final)

    def put_cancelled(self, *, record: bool) -> None:
        """Record those that have ended as they are, and all that are open as failed if that is asked for."""
        self.put_ended()
        self._ended = [(_new_session(key, AttemptResult(CANCELLED)), True) for key in self.open.values() if record]
        self.put_ended()

    def _put_soon(self, on_error: Callable[[Exception], None]) -> None:
        try:
            self.put_ended()
        except Exception as error:
            on_error(error)


def _new_session(key: SessionKey, result: AttemptResult) -> NewSession:
    state = "failed" if result.cause else "finished"
    return NewSession(key, result.rows, state, result.cause, result.score)
