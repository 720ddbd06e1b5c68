"""The default store: one SQLite file that many processes read and write at once. A crash loses no recorded session.

What is appended together is one transaction, on disk (synchronous = FULL) when `append` returns. Everything is encoded
before the file is locked, so that writers wait for each other as little as possible.

Note: `drop` first moves a watermark, which hides the rounds at once and for good, and then deletes their sessions a few
at a time, so that no writer waits long; if it is killed on the way, the next `drop` completes it. The file does not
get shorter: later rounds use the free pages. `sqlite3 rows.db VACUUM` shortens a file that is not open.
"""

from collections.abc import Collection, Iterator, Sequence
from os import PathLike
from pathlib import Path
from sqlite3 import Connection, IntegrityError
from typing import TypeVar
from uuid import uuid4

from numpy.typing import NDArray

from raggedright.sessions import MOST_TRAJECTORIES, RowKey, Session, SessionKey, SessionTable
from raggedright.store.encoding import decode_row, decode_table, encode_session
from raggedright.store.protocol import Store, StoreError, already_recorded, last_attempts, round_dropped, row_missing
from raggedright.store.sqlite_file import Database

KEYS_PER_STATEMENT = 64
SESSIONS_PER_DELETE = 64
_T = TypeVar("_T")

_APPEND = "INSERT INTO log (id, round, prompt, session, attempt, text, digest) VALUES (?, ?, ?, ?, ?, ?, ?)"
_SESSIONS = """SELECT round, prompt, session, attempt, text, digest FROM log WHERE round = ?
  ORDER BY prompt, session, attempt"""
_FINISHED = """SELECT round, count(*) FROM log
  WHERE round > ? AND json_extract(text, '$[1]') = '' GROUP BY round"""
# CROSS JOIN makes SQLite look up each key in turn.
_FIND = """WITH k (i, round, prompt, session, attempt) AS (VALUES {})
  SELECT k.i, log.id, json_array_length(log.text, '$[3]')
  FROM k CROSS JOIN log USING (round, prompt, session, attempt)"""


class SqliteStore(Store):
    """A store in one file, which is made if it is not there; waits up to `busy_timeout` seconds for other writers.

    `run` is the id of the run that it belongs to: a file of another run is refused. Without one, a new file gets a
    random id and an existing file is opened whatever its run is. With `read_only`, for reports and inspection, the file
    is never made or written, and others may write it at the same time.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        run: str | None = None,
        busy_timeout: float = 30.0,
        read_only: bool = False,
    ) -> None:
        self._database = Database(Path(path), run or uuid4().hex, busy_timeout, read_only=read_only)
        try:
            with self._database.read("open") as connection:
                self.run = str(_meta(connection, "run"))
            if run is not None and self.run != run:
                raise StoreError(
                    f"{path}: belongs to run {self.run:.40} and this is run {run}; move it away, or start with --fresh"
                )
        except BaseException:
            self.close()
            raise

    def append(self, sessions: Sequence[Session]) -> None:
        """Record sessions in one transaction: all of them or none."""
        encoded = [encode_session(self.run, session) for session in sessions]
        if not encoded:
            return
        more = f" and {len(encoded) - 1:,} more" if len(encoded) > 1 else ""
        with self._database.write(f"append of {encoded[0].key}{more}") as connection:
            dropped = _dropped(connection)
            (first,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM log").fetchone()
            for i, (key, text, digest, values, digests) in enumerate(encoded, first):
                if key.round <= dropped:
                    raise round_dropped(key, dropped)
                try:
                    connection.execute(_APPEND, (i, *key, text, digest))
                except IntegrityError:
                    raise already_recorded(key) from None
                numbers = range(i * MOST_TRAJECTORIES, i * MOST_TRAJECTORIES + len(values))
                connection.executemany(
                    "INSERT INTO arrays (id, value, digest) VALUES (?, ?, ?)",
                    zip(numbers, values, digests, strict=True),
                )

    def sessions(self, round: int, *, every_attempt: bool = False) -> SessionTable:
        """The sessions of a round."""
        with self._database.read(f"listing of round {round}") as connection:
            found = connection.execute(_SESSIONS, (round,)).fetchall() if round > _dropped(connection) else []
        lines = [(SessionKey(*line[:4]), *line[4:]) for line in found]
        return decode_table(self.run, round, lines if every_attempt else last_attempts(lines))

    def rounds(self) -> dict[int, int]:
        """The rounds that have finished sessions, and how many."""
        with self._database.read("listing") as connection:
            return dict(connection.execute(_FINISHED, (_dropped(connection),)).fetchall())

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        """The arrays of these rows; all are read in one snapshot."""
        rows: list[dict[str, NDArray]] = []
        with self._database.read(f"reading of {len(keys):,} rows") as connection:
            dropped = _dropped(connection)
            for part in _parts(keys):
                ids = _find_rows(connection, part, dropped)
                marks = ",".join("?" * len(ids))
                query = f"SELECT id, value, digest FROM arrays WHERE id IN ({marks})"
                found = {number: (value, digest) for number, value, digest in connection.execute(query, ids)}
                for key, number in zip(part, ids, strict=True):
                    if number not in found:
                        raise StoreError(f"{key}: its arrays are gone; the file was altered: restore a copy of it")
                    rows.append(decode_row(self.run, key, *found[number], fields))
        return rows

    def drop(self, round: int) -> None:
        """Delete a round and those before it."""
        with self._database.write(f"drop of round {round}") as connection:
            connection.execute("UPDATE meta SET value = max(value, ?) WHERE name = 'dropped_round'", (round,))
        deleted = True
        while deleted:
            with self._database.write(f"drop of round {round}") as connection:
                query = "SELECT id FROM log WHERE round <= ? LIMIT ?"
                deleted = connection.execute(query, (_dropped(connection), SESSIONS_PER_DELETE)).fetchall()
                ranges = [(i * MOST_TRAJECTORIES, (i + 1) * MOST_TRAJECTORIES) for (i,) in deleted]
                connection.executemany("DELETE FROM arrays WHERE id >= ? AND id < ?", ranges)
                connection.executemany("DELETE FROM log WHERE id = ?", deleted)

    def close(self) -> None:
        """Close the file; what was appended stays."""
        self._database.close()


def _find_rows(connection: Connection, keys: Sequence[RowKey], dropped: int) -> list[int]:
    """The ids of rows, all of which must be there."""
    values = [value for i, key in enumerate(keys) for value in (i, *key[:4])]
    marks = ",".join(["(?,?,?,?,?)"] * len(keys))
    found = {i: (number, num_rows) for i, number, num_rows in connection.execute(_FIND.format(marks), values)}
    ids = []
    for i, key in enumerate(keys):
        if key.round <= dropped:
            raise round_dropped(key, dropped)
        number, num_rows = found.get(i, (0, 0))
        if not 0 <= key.trajectory < num_rows:
            raise row_missing(key, known=i in found)
        ids.append(number * MOST_TRAJECTORIES + key.trajectory)
    return ids


def _dropped(connection: Connection) -> int:
    return _meta(connection, "dropped_round")  # pyright: ignore[reportReturnType]


def _meta(connection: Connection, name: str) -> int | str:
    found = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    if found is None:
        raise StoreError(f"table meta has no {name}; the file was altered: restore a copy of it, or use another one")
    return found[0]


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    yield from (items[start : start + KEYS_PER_STATEMENT] for start in range(0, len(items), KEYS_PER_STATEMENT))
