"""The default store: one SQLite file that many processes read and write at once. A crash loses no recorded session.

What is appended together is one transaction, on disk (synchronous = FULL) when `append` returns. Everything is encoded
before the file is locked, so that writers wait for each other as little as possible.

Note: `drop` first records the last dropped round, which hides the rounds immediately and permanently, and then deletes
their sessions in small transactions, so that no writer waits long; if it is killed in between, the next `drop`
completes it. The file does not shrink: later rounds use the free pages. `sqlite3 rows.db VACUUM` shrinks a file that is
not open.
"""

from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path
from sqlite3 import Connection, IntegrityError
from uuid import uuid4

from numpy.typing import NDArray

from raggedright.sessions import MAX_TRAJECTORIES, RowKey, Session, SessionKey, SessionTable
from raggedright.store.encoding import decode_row, decode_table, dropped_digest, encode_session
from raggedright.store.session_store import Store, StoreError, already_recorded, round_dropped, row_missing
from raggedright.store.sqlite_file import Database

KEYS_PER_QUERY = 64
SESSIONS_PER_DELETE = 64

_APPEND = "INSERT INTO log (id, round, prompt, session, attempt, text, digest) VALUES (?, ?, ?, ?, ?, ?, ?)"
_SESSIONS = """SELECT round, prompt, session, attempt, text, digest FROM log WHERE round = ?
  ORDER BY prompt, session, attempt"""
_FINISHED = """SELECT round, count(*) FROM log
  WHERE round > ? AND json_extract(text, '$[1]') = '' GROUP BY round"""
# CROSS JOIN makes SQLite look up one key after the other.
_ROWS = f"""WITH k (i, round, prompt, session, attempt, trajectory) AS (VALUES {{}})
  SELECT k.i, coalesce(json_array_length(log.text, '$[3]'), 0), arrays.value, arrays.digest
  FROM k CROSS JOIN log USING (round, prompt, session, attempt)
  LEFT JOIN arrays ON arrays.id = log.id * {MAX_TRAJECTORIES} + k.trajectory"""


class SqliteStore(Store):
    """A store in one file, which is made if it does not exist; waits up to `busy_timeout` seconds for other writers.

    `run` is the id of the run that it belongs to: a file of another run is refused. Without it, a new file gets a
    random id and an existing file of any run is opened. With `read_only`, for reports and inspection, the file is never
    made or written, and other processes may write it at the same time.
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
            dropped = self._dropped(connection)
            (first_id,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM log").fetchone()
            for session_id, (key, text, digest, rows, row_digests) in enumerate(encoded, first_id):
                if key.round <= dropped:
                    raise round_dropped(key, dropped)
                try:
                    connection.execute(_APPEND, (session_id, *key, text, digest))
                except IntegrityError:
                    raise already_recorded(key) from None
                row_ids = range(session_id * MAX_TRAJECTORIES, session_id * MAX_TRAJECTORIES + len(rows))
                connection.executemany(
                    "INSERT INTO arrays (id, value, digest) VALUES (?, ?, ?)",
                    zip(row_ids, rows, row_digests, strict=True),
                )

    def sessions(self, round: int, *, every_attempt: bool = False) -> SessionTable:
        """The sessions of a round."""
        with self._database.read(f"listing of round {round}") as connection:
            entries = connection.execute(_SESSIONS, (round,)).fetchall() if round > self._dropped(connection) else []
        lines = [(SessionKey(*entry[:4]), *entry[4:]) for entry in entries]
        return decode_table(self.run, round, lines, every_attempt=every_attempt)

    def rounds(self) -> dict[int, int]:
        """The number of finished sessions of each round that has any."""
        with self._database.read("listing") as connection:
            return dict(connection.execute(_FINISHED, (self._dropped(connection),)).fetchall())

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        """The arrays of these rows; all are read in one snapshot."""
        rows: list[dict[str, NDArray]] = []
        with self._database.read(f"reading of {len(keys):,} rows") as connection:
            dropped = self._dropped(connection)
            for start in range(0, len(keys), KEYS_PER_QUERY):
                part = keys[start : start + KEYS_PER_QUERY]
                query = _ROWS.format(",".join(["(?,?,?,?,?,?)"] * len(part)))
                values = [value for i, key in enumerate(part) for value in (i, *key)]
                entries = {entry[0]: entry[1:] for entry in connection.execute(query, values)}
                for i, key in enumerate(part):
                    if key.round <= dropped:
                        raise round_dropped(key, dropped)
                    num_rows, value, digest = entries.get(i, (0, None, None))
                    if not 0 <= key.trajectory < num_rows:
                        raise row_missing(key, session_exists=i in entries)
                    if value is None:
                        raise StoreError(f"{key}: its arrays are missing; the file was altered: restore a copy of it")
                    rows.append(decode_row(self.run, key, value, digest, fields))
        return rows

    def drop(self, round: int) -> None:
        """Delete a round and those before it."""
        with self._database.write(f"drop of round {round}") as connection:
            last = max(round, self._dropped(connection))
            meta = {"dropped_round": last, "dropped_digest": dropped_digest(self.run, last)}
            connection.executemany("UPDATE meta SET value = ?2 WHERE name = ?1", meta.items())
        deleted = True
        while deleted:
            with self._database.write(f"drop of round {round}") as connection:
                query = "SELECT id FROM log WHERE round <= ? LIMIT ?"
                deleted = connection.execute(query, (self._dropped(connection), SESSIONS_PER_DELETE)).fetchall()
                row_ids = [(i * MAX_TRAJECTORIES, (i + 1) * MAX_TRAJECTORIES) for (i,) in deleted]
                connection.executemany("DELETE FROM arrays WHERE id >= ? AND id < ?", row_ids)
                connection.executemany("DELETE FROM log WHERE id = ?", deleted)

    def close(self) -> None:
        """Close the file; what was appended stays."""
        self._database.close()

    def _dropped(self, connection: Connection) -> int:
        """The last dropped round; an altered one would hide sessions, so it has a digest."""
        round, digest = _meta(connection, "dropped_round"), _meta(connection, "dropped_digest")
        if not isinstance(round, int) or digest != dropped_digest(self.run, round):
            raise StoreError(
                f"{self._database.path}: meta.dropped_round is {round!r:.40} and does not match its checksum; the file "
                "was altered: restore a copy of it, or start again with --fresh"
            )
        return round


def _meta(connection: Connection, name: str) -> object:
    entry = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    if entry is None:
        raise StoreError(f"table meta has no {name}; the file was altered: restore a copy of it, or use another one")
    return entry[0]
