"""What a store promises, whichever backend it is. One conformance suite tests all of them.

A store is an append-only log of sessions. A session becomes visible with all its rows or not at all, and never
changes. Its key includes the attempt number, so a session that runs again is appended under the next attempt and a
late writer cannot touch what another one wrote. What is read is what was appended, bit for bit: whatever is missing,
damaged, of another run or of a dropped round is a StoreError that names the key, within a bounded time.
"""

from collections.abc import Collection, Sequence
from time import monotonic, sleep
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from raggedright.errors import RaggedRightError
from raggedright.sessions import RowKey, Session, SessionKey, SessionTable

LONGEST_POLL = 0.25  # seconds between two looks of `wait`


class StoreError(RaggedRightError):
    """A store's operation failed; nothing was changed."""


class Store(Protocol):
    """A log of sessions. A backend derives from it; `wait` and `with` are the same for all."""

    def append(self, sessions: Sequence[Session]) -> None:
        """Record sessions; each is durable and visible as a whole when this returns.

        If one of them is refused, none is recorded.
        """
        ...

    def sessions(self, round: int, *, every_attempt: bool = False) -> SessionTable:
        """The sessions of a round in the order of their keys, without tensors: the last attempt of each, or all."""
        ...

    def rounds(self) -> dict[int, int]:
        """The rounds that have finished sessions, and how many."""
        ...

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        """The arrays of these rows, in the order of the keys: the named fields, or all that a row has."""
        ...

    def drop(self, round: int) -> None:
        """Delete a round and those before it; nothing can be appended to them any more. Can be repeated."""
        ...

    def close(self) -> None:
        """Release the store; what was appended stays, if the backend is durable."""
        ...

    def wait(self, round: int, sessions: Collection[tuple[str, int]], *, timeout: float) -> SessionTable:
        """The table of these (prompt, session) pairs once all have ended; a StoreError names those that have not."""
        wanted, until, pause = set(sessions), monotonic() + timeout, 0.01
        while True:
            table = self.sessions(round)
            pairs = [*zip(table.prompt.tolist(), table.session.tolist(), strict=True)]
            missing = sorted(wanted - set(pairs))
            if not missing:
                return table.take(np.array([i for i, pair in enumerate(pairs) if pair in wanted], dtype=np.int64))
            if monotonic() >= until:
                names = ", ".join(f"{prompt:.60}/{session}" for prompt, session in missing[:10])
                more = f" and {len(missing) - 10:,} more" if len(missing) > 10 else ""
                raise StoreError(
                    f"round {round}: {len(missing):,} of {len(wanted):,} sessions have not ended after {timeout:g} s: "
                    f"{names}{more}; wait longer, or record them as failed"
                )
            sleep(min(pause, max(0.0, until - monotonic())))
            pause = min(2 * pause, LONGEST_POLL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def already_recorded(key: SessionKey) -> StoreError:
    """The error of a key that is written twice."""
    return StoreError(f"{key}: is recorded already; append a new run of it under the next attempt")


def round_dropped(what: object, dropped: int) -> StoreError:
    """The error of a round that is gone."""
    return StoreError(f"{what}: rounds up to {dropped} were dropped; use a later one")


def row_missing(key: RowKey, *, known: bool) -> StoreError:
    """The error of a row that is not there."""
    reason = "its session has no such row" if known else "its session is not recorded"
    return StoreError(f"{key}: {reason}; sessions({key.round}) lists what there is")


def choose(key: RowKey, row: dict[str, NDArray], fields: Collection[str] | None) -> dict[str, NDArray]:
    """The fields that were asked for, all of which the row must have."""
    if fields is None:
        return row
    for name in fields:
        if name not in row:
            raise StoreError(f"{key}: has no field {name}; it has {', '.join(row)}")
    return {name: row[name] for name in fields}


def last_attempts(lines: Sequence[tuple[SessionKey, str, bytes]]) -> list[tuple[SessionKey, str, bytes]]:
    """Of lines in the order of their keys, the last attempt of each session."""
    return [*{line[0][1:3]: line for line in lines}.values()]


def prune(store: Store, *, durable_round: int, keep_rounds: int = 0) -> None:
    """Drop the rounds that a durable checkpoint of `durable_round` contains, except the last `keep_rounds`."""
    if keep_rounds < 0:
        raise StoreError(f"keep_rounds is {keep_rounds}; it takes an integer from 0")
    if durable_round - keep_rounds >= 0:
        store.drop(durable_round - keep_rounds)
