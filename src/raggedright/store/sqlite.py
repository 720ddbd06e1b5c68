"""The default store: one SQLite file that many processes read and write at once. A crash loses no finished session.

Sessions that are put together, with their rows, tags and fields, are one transaction, on disk (synchronous = FULL) when
put returns. All that is put is encoded before the file is locked, so writers hold each other up as little as can be.
See sqlite_schema.SCHEMA: a listing reads one table; short rows share a value (`blocks`), others have one each
(`row_encoding`), but for large fields.

The surprise: delete first moves a watermark, which hides the rounds at once and for good, then takes their rows away a
few sessions at a time, so that no writer waits long; one that is killed half-way is completed by the next. The file
does not get shorter: later rounds take the free pages, so it stays at the size of the most that was in it at a time.
(SQLite's incremental vacuum needed half a minute for 4,000 rows. `sqlite3 rows.db VACUUM` shortens a file at rest.)
"""

from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path
from time import monotonic, sleep

from raggedright.ragged import Ragged
from raggedright.store.checks import MOST_ROWS, check_replaced, last_attempts, not_final, round_deleted
from raggedright.store.encoding import encode_fields
from raggedright.store.listing import Listing
from raggedright.store.protocol import Fields, Key, NewSession, SessionEntry, SessionKey, State, Store
from raggedright.store.sqlite_file import Database
from raggedright.store.sqlite_list import read_entries
from raggedright.store.sqlite_put import (
    Ready,
    check_round_types,
    check_rounds,
    encode_listing,
    encode_sessions,
    put_blocks,
    put_sessions,
)
from raggedright.store.sqlite_rows import (
    Values,
    field_types,
    fields_of,
    find_rows,
    join_blocks,
    list_fields,
    parts,
    read_apart,
    watermark_of,
)

__all__ = ["SqliteStore"]

POLL_SECONDS = 0.01
SESSIONS_A_DELETE = 64

_PUT_VALUE = "INSERT INTO row_values (row_id, value) VALUES (?, ?)"
_PUT_FIELD = """INSERT INTO fields (row_id, name, type, value) VALUES (?, ?, ?, ?)
  ON CONFLICT DO UPDATE SET type = excluded.type, value = excluded.value"""
_LAST = "SELECT prompt, session, state, max(attempt) FROM sessions WHERE round = ? GROUP BY prompt, session"


class SqliteStore(Store):
    """A store in one file, which is made if it is not there; waits up to `busy_timeout` seconds for other writers.

    With `read_only`, for reports and inspection, it is never made or written, and others may write it meanwhile.
    """

    def __init__(self, path: str | PathLike[str], *, busy_timeout: float = 30.0, read_only: bool = False) -> None:
        self._database = Database(Path(path), busy_timeout, read_only=read_only)

    def put_all(self, sessions: Sequence[NewSession]) -> None:
        """Record several sessions in one transaction, with one write to the disk: all of them or none."""
        self._put(encode_sessions(sessions))

    def put_listing(self, listing: Listing) -> None:
        """Record the sessions of a listing that has its rows' vectors, in one transaction."""
        ready = encode_listing(listing) if listing.vectors else None
        if ready is None:
            super().put_listing(listing)
        else:
            self._put(ready)

    def _put(self, ready: Ready) -> None:
        with self._database.write(_put_words(ready.sessions.key)) as connection:
            check_rounds(connection, ready.sessions)
            check_round_types(connection, ready.types)
            ids = put_sessions(connection, ready, put_blocks(connection, ready))
            rows = [
                (id_ * MOST_ROWS + t, row)
                for id_, of_session in zip(ids, ready.rows, strict=False)  # none where rows are in blocks
                for t, row in enumerate(of_session)
            ]
            connection.executemany(_PUT_VALUE, [(row_id, row.value) for row_id, row in rows])
            fields = [(row_id, name, *field) for row_id, row in rows for name, field in row.apart.items()]
            if fields:
                connection.executemany(_PUT_FIELD, fields)

    def list(
        self,
        *,
        round: int | None = None,
        prompt: str | None = None,
        session: int | None = None,
        state: State | None = None,
    ) -> Sequence[SessionEntry]:
        """Sessions that match, in the order of their keys, with their rows' tags and counts but no tensors."""
        filters = {"round": round, "prompt": prompt, "session": session, "state": state}
        with self._database.read("list") as connection:
            return read_entries(connection, watermark_of(connection), filters)

    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> Sequence[dict[str, object]]:
        """These fields of these rows, in the order asked for."""
        names = tuple(dict.fromkeys(fields))
        answer: list[dict[str, object]] = []
        with self._database.read("get") as connection:
            values = Values(connection)
            for part in parts(keys):  # so that the encoded rows of a large answer are never there all at once
                found = find_rows(connection, part)
                apart = read_apart(connection, [row.row_id for row in found if row.apart], names)
                wholes = values.of(part, found)
                rows = zip(part, found, wholes, strict=True)
                answer += [fields_of(key, row, whole, names, apart) for key, row, whole in rows]
        return answer

    def get_joined(self, keys: Sequence[Key], fields: Sequence[str]) -> dict[str, Ragged]:
        """These fields of these rows, joined field by field; blocks have them so."""
        with self._database.read("get") as connection:
            found = find_rows(connection, keys)
            if found and all(row.block is not None and not row.apart for row in found):
                return join_blocks(keys, found, Values(connection).blocks(found), fields)
        return super().get_joined(keys, fields)

    def update(self, values: Mapping[Key, Fields]) -> None:
        """Add fields to rows that are there, all of them or none."""
        encoded = [(Key(*key), encode_fields(key, fields)) for key, fields in values.items()]
        with self._database.write(f"update of {len(encoded)} rows") as connection:
            keys = [key for key, _ in encoded]
            found = find_rows(connection, keys)
            wholes = Values(connection).of(keys, found)
            for row, whole, (key, fields) in zip(found, wholes, encoded, strict=True):
                old = field_types(connection, row, whole)
                for name in fields.keys() & old.keys():
                    check_replaced(key, name, old[name], fields[name].type)
                if fields:
                    list_fields(connection, row.row_id, old.keys() | fields.keys())
            check_round_types(
                connection, [(key, {n: field.type for n, field in fields.items()}) for key, fields in encoded]
            )
            new = [(r.row_id, n, *field) for r, (_, fs) in zip(found, encoded, strict=True) for n, field in fs.items()]
            connection.executemany(_PUT_FIELD, new)

    def delete(self, round: int) -> None:
        """Forget all sessions of a round and of those before it, and free their space for later ones."""
        with self._database.write("delete") as connection:
            raise_to = "UPDATE meta SET value = max(value, ?) WHERE name = 'deleted_round'"
            connection.execute(raise_to, (min(max(round, -1), 2**63 - 1),))
            watermark = watermark_of(connection)
            connection.execute("DELETE FROM types WHERE round <= ?", (watermark,))
            connection.execute("DELETE FROM blocks WHERE round <= ?", (watermark,))
        while self._delete_some(watermark):
            pass

    def wait(self, round: int, sessions: Collection[tuple[str, int]], *, timeout: float) -> Sequence[SessionEntry]:
        """The last attempt of each of these (prompt, session) pairs, once all are finished or failed."""
        until, wanted = monotonic() + timeout, {(prompt, session) for prompt, session in sessions}
        version = None
        while wanted:
            with self._database.errors("wait"):
                connection = self._database.connection()
                (changed,) = connection.execute("PRAGMA data_version").fetchone()  # of what others have put
            if changed != version:
                version = changed
                states = self._last_states(round)
                if all(states.get(pair) in ("finished", "failed") for pair in wanted):
                    entries = last_attempts(self.list(round=round), wanted)
                    if len(entries) == len(wanted) and all(entry.state != "running" for entry in entries):
                        return entries
            if monotonic() >= until:
                raise not_final(round, wanted, self._last_states(round), timeout)
            sleep(min(POLL_SECONDS, max(until - monotonic(), 0)))
        return []

    def close(self) -> None:
        """Let go of the file; what was put stays."""
        self._database.close()

    def _last_states(self, round: int) -> dict[tuple[str, int], str]:
        with self._database.read("wait") as connection:
            watermark = watermark_of(connection)
            if round <= watermark:
                raise round_deleted(f"round {round}", watermark)
            return {(prompt, session): state for prompt, session, state, _ in connection.execute(_LAST, (round,))}

    def _delete_some(self, watermark: int) -> bool:
        """Take away some of the sessions that are hidden already; false when none are left."""
        some = "SELECT id FROM sessions WHERE round <= ? LIMIT ?"
        with self._database.write("delete") as connection:
            ids = connection.execute(some, (watermark, SESSIONS_A_DELETE)).fetchall()
            of_session = f"row_id BETWEEN ?1 * {MOST_ROWS} AND ?1 * {MOST_ROWS} + {MOST_ROWS - 1}"
            connection.executemany(f"DELETE FROM fields WHERE {of_session}", ids)
            connection.executemany(f"DELETE FROM row_values WHERE {of_session}", ids)
            connection.executemany("DELETE FROM sessions WHERE id = ?", ids)
        return bool(ids)


def _put_words(keys: Sequence[tuple]) -> str:
    return f"put of {SessionKey(*keys[0])}" if len(keys) == 1 else f"put of {len(keys):,} sessions"
