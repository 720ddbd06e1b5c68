"""The interface of a session store and its promises. One conformance suite tests all backends.

A store is an append-only log of sessions. A session becomes visible with all its rows or not at all, and never
changes. Its key includes the attempt number, so a session that runs again is appended under the next attempt and a
late writer cannot overwrite another one. What is read is what was appended, bit for bit. Whatever is missing, damaged,
of another run or of a dropped round is a StoreError that names the key, within a bounded time.
"""

from collections.abc import Collection, Sequence
from time import monotonic, sleep
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from raggedright.errors import RaggedRightError
from raggedright.sessions import RowKey, Session, SessionKey, SessionTable

MAX_POLL_SECONDS = 0.25  # between two queries of `wait`


class StoreError(RaggedRightError):
    """A store operation failed; nothing was changed."""


class Store(Protocol):
    """A log of sessions. Backends derive from it; `wait` and `with` are the same for all of them."""

    def append(self, sessions: Sequence[Session]) -> None:
        """Record sessions, all of them or none; they are durable and visible when this returns."""
        ...

    def sessions(self, round: int, *, every_attempt: bool = False) -> SessionTable:
        """The sessions of a round in the order of their keys, without tensors: the last attempt of each, or all."""
        ...

    def rounds(self) -> dict[int, int]:
        """The number of finished sessions of each round that has any."""
        ...

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        """The arrays of these rows, in the order of the keys: the named fields, or all fields of each row."""
        ...

    def drop(self, round: int) -> None:
        """Delete a round and those before it; nothing can be appended to them afterwards. Can be repeated."""
        ...

    def close(self) -> None:
        """Release the store; what was appended stays, if the backend is durable."""
        ...

    def wait(self, round: int, sessions: Collection[tuple[str, int]], *, timeout: float) -> SessionTable:
        """The table of these (prompt, session) pairs once all have ended; a StoreError names those that have not."""
        expected, deadline, pause = set(sessions), monotonic() + timeout, 0.01
        while True:
            table = self.sessions(round)
            pairs = [*zip(table.prompt.tolist(), table.session.tolist(), strict=True)]
            missing = sorted(expected - set(pairs))
            if not missing:
                return table.take(np.array([i for i, pair in enumerate(pairs) if pair in expected], dtype=np.int64))
            if monotonic() >= deadline:
                names = ", ".join(f"{prompt:.60}/{session}" for prompt, session in missing[:10])
                more = f" and {len(missing) - 10:,} more" if len(missing) > 10 else ""
                raise StoreError(
                    f"round {round}: {len(missing):,} of {len(expected):,} sessions have not ended after "
                    f"{timeout:g} s: {names}{more}; wait longer, or record them as failed"
                )
            sleep(min(pause, max(0.0, deadline - monotonic())))
            pause = min(2 * pause, MAX_POLL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def already_recorded(key: SessionKey) -> StoreError:
    """The error for a key that is written twice."""
    return StoreError(f"{key}: is recorded already; append a new run of it under the next attempt")


def round_dropped(key: SessionKey | RowKey, dropped: int) -> StoreError:
    """The error for a key of a dropped round."""
    return StoreError(f"{key}: rounds up to {dropped} were dropped; use a later one")


def row_missing(key: RowKey, *, session_exists: bool) -> StoreError:
    """The error for a row that is not in the store."""
    reason = "its session has no such row" if session_exists else "its session is not recorded"
    return StoreError(f"{key}: {reason}; sessions({key.round}) lists what there is")


def prune(store: Store, *, durable_round: int, keep_rounds: int = 0) -> None:
    """Drop the rounds that a durable checkpoint of `durable_round` contains, except the last `keep_rounds`."""
    if keep_rounds < 0:
        raise StoreError(f"keep_rounds is {keep_rounds}; it takes an integer from 0")
    if durable_round - keep_rounds >= 0:
        store.drop(durable_round - keep_rounds)
