"""A store of your own: the SQLite store, with the score of every session in a file of each rank.

    [store]
    backend = "examples.plug_in.store:ScoreLog"
    options = {name = "scores"}

A store is any callable that takes a StoreContext and options, and returns a `Store`. tests/store/conformance.py tests
what a backend promises.
"""

from collections.abc import Sequence

from raggedright.sessions import Session
from raggedright.store.sqlite import SqliteStore
from raggedright.train.setup import StoreContext


class ScoreLog(SqliteStore):
    """Keeps sessions in SQLite."""

    def __init__(self, context: StoreContext, name: str = "scores") -> None:
        super().__init__(context.folder / "rows.db", run=context.run)
        self._scores = context.folder / f"{name}-{context.dp_rank}.txt"

    def append(self, sessions: Sequence[Session]) -> None:
        """Record sessions, then their scores."""
        super().append(sessions)
        with self._scores.open("a") as file:
            file.writelines(f"{session.key} {session.score}\n" for session in sessions)
