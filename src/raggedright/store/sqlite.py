"""The default store: one SQLite file that many processes read and write at once. A crash loses no finished session.

A session's rows, tags and fields are one transaction, on disk (synchronous = FULL) when put returns. One value a field
in table `fields`, so that a pass reads the fields it needs and adds its own. See sqlite_schema.SCHEMA.

The surprise: delete first moves a watermark, which hides the rounds at once and for good, then takes their rows away a
few sessions at a time, so that no writer waits long; one that is killed half-way is completed by the next. The file
does not get shorter: later rounds take the free pages, so it stays at the size of the most that was in it at a time.
(SQLite's incremental vacuum needed half a minute for 4,000 rows. `sqlite3 rows.db VACUUM` shortens a file at rest.)
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from sqlite3 import Connection
from time import monotonic, sleep
from typing import Self

from raggedright.store.checks import (
    Encoded,
    check_can_become,
    check_put,
    check_replaced,
    check_types,
    field_missing,
    last_attempts,
    not_final,
    round_deleted,
    row_missing,
)
from raggedright.store.encoding import decode_field, encode_fields
from raggedright.store.protocol import Fields, Key, NewRow, SessionEntry, SessionKey, State, StoreError
from raggedright.store.sqlite_file import Database
from raggedright.store.sqlite_list import read_entries

__all__ = ["SqliteStore"]

POLL_SECONDS = 0.01
SESSIONS_A_DELETE = 64

_SESSION = "round = ? AND prompt = ? AND session = ? AND attempt = ?"
_FIND = f"""SELECT s.state, r.id FROM sessions s LEFT JOIN rows r ON r.session_id = s.id AND r.trajectory = ?
  WHERE {_SESSION}"""
_GET = f"""SELECT s.state, r.id, f.name, f.value FROM sessions s
  LEFT JOIN rows r ON r.session_id = s.id AND r.trajectory = ?
  LEFT JOIN fields f ON f.row_id = r.id AND f.name IN ({{}}) WHERE {_SESSION}"""
_LAST = "SELECT prompt, session, state, max(attempt) FROM sessions WHERE round = ? GROUP BY prompt, session"
_PUT_FIELD = "INSERT INTO fields (row_id, name, type, value) VALUES (?, ?, ?, ?)"
_REPLACE_FIELD = f"{_PUT_FIELD} ON CONFLICT DO UPDATE SET type = excluded.type, value = excluded.value"


class SqliteStore:
    """A store in one file, which is made if it is not there; waits up to `busy_timeout` seconds for other writers.

    With `read_only`, for reports and inspection, it is never made or written, and others may write it meanwhile.
    """

    def __init__(self, path: str | PathLike[str], *, busy_timeout: float = 30.0, read_only: bool = False) -> None:
        self._database = Database(Path(path), busy_timeout, read_only=read_only)

    def put(
        self,
        session: SessionKey,
        rows: Sequence[NewRow] = (),
        *,
        state: State = "finished",
        cause: str = "",
        score: float | None = None,
    ) -> None:
        """Record a session in one transaction: as running, as finished with all its rows, or as failed with a cause."""
        check_put(session, rows, state, cause, score)
        encoded = [encode_fields(Key(*session, i), row.fields) for i, row in enumerate(rows)]
        with self._database.write(f"put of {session}") as connection:
            watermark = _watermark(connection)
            if session.round <= watermark:
                raise round_deleted(str(session), watermark)
            before = connection.execute(f"SELECT id, state FROM sessions WHERE {_SESSION}", session[:4]).fetchone()
            check_can_become(session, before[1] if before else None, state)
            _check_types(connection, [(Key(*session, i), fields) for i, fields in enumerate(encoded)])
            if before:
                change = "UPDATE sessions SET state = ?, cause = ?, score = ? WHERE id = ?"
                connection.execute(change, (state, cause, score, before[0]))
            else:
                new = (
                    "INSERT INTO sessions (round, prompt, session, attempt, state, cause, score) VALUES (?,?,?,?,?,?,?)"
                )
                connection.execute(new, (*session, state, cause, score))
                before = connection.execute("SELECT last_insert_rowid()").fetchone()
            _put_rows(connection, before[0], rows, encoded)

    def together(self) -> AbstractContextManager[None]:
        """A block whose puts are one transaction, with one write to the disk; undone where it raises."""
        return self._database.together()

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
            return read_entries(connection, _watermark(connection), filters)

    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> Sequence[dict[str, object]]:
        """These fields of these rows, in the order asked for."""
        names = tuple(dict.fromkeys(fields))
        select = _GET.format(",".join("?" * len(names)))
        answer = []
        with self._database.read("get") as connection:
            watermark = _watermark(connection)
            for key in keys:
                rows = connection.execute(select, (key[4], *names, *key[:4])).fetchall()
                if not rows or rows[0][1] is None or key[0] <= watermark:
                    raise row_missing(key, rows[0][0] if rows else None, watermark)
                found = {name: value for _, _, name, value in rows}
                if names and len(found.keys() & names) != len(names):
                    raise field_missing(key, next(name for name in names if name not in found))
                answer.append({name: decode_field(key, name, found[name]) for name in names})
        return answer

    def update(self, values: Mapping[Key, Fields]) -> None:
        """Add fields to rows that are there, all of them or none."""
        encoded = [(Key(*key), encode_fields(key, fields)) for key, fields in values.items()]
        with self._database.write(f"update of {len(encoded)} rows") as connection:
            watermark = _watermark(connection)
            ids = [_row_id(connection, key, watermark) for key, _ in encoded]
            for row_id, (key, fields) in zip(ids, encoded, strict=True):
                old = dict(connection.execute("SELECT name, type FROM fields WHERE row_id = ?", (row_id,)).fetchall())
                for name in fields.keys() & old.keys():
                    check_replaced(key, name, old[name], fields[name].type)
                if fields.keys() - old.keys():
                    listed = _json(sorted(old.keys() | fields.keys()))
                    connection.execute("UPDATE rows SET fields = ? WHERE id = ?", (listed, row_id))
            _check_types(connection, encoded)
            for row_id, (_, fields) in zip(ids, encoded, strict=True):
                connection.executemany(_REPLACE_FIELD, _field_rows(row_id, fields))

    def delete(self, round: int) -> None:
        """Forget all sessions of a round and of those before it, and free their space for later ones."""
        with self._database.write("delete") as connection:
            raise_to = "UPDATE meta SET value = max(value, ?) WHERE name = 'deleted_round'"
            connection.execute(raise_to, (min(max(round, -1), 2**63 - 1),))
            watermark = _watermark(connection)
            connection.execute("DELETE FROM types WHERE round <= ?", (watermark,))
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _last_states(self, round: int) -> dict[tuple[str, int], str]:
        with self._database.read("wait") as connection:
            watermark = _watermark(connection)
            if round <= watermark:
                raise round_deleted(f"round {round}", watermark)
            return {(prompt, session): state for prompt, session, state, _ in connection.execute(_LAST, (round,))}

    def _delete_some(self, watermark: int) -> bool:
        """Take away some of the sessions that are hidden already; false when none are left."""
        some = "SELECT id FROM sessions WHERE round <= ? LIMIT ?"
        with self._database.write("delete") as connection:
            ids = connection.execute(some, (watermark, SESSIONS_A_DELETE)).fetchall()
            rows = "SELECT id FROM rows WHERE session_id = ?"
            connection.executemany(f"DELETE FROM fields WHERE row_id IN ({rows})", ids)
            connection.executemany("DELETE FROM rows WHERE session_id = ?", ids)
            connection.executemany("DELETE FROM sessions WHERE id = ?", ids)
        return bool(ids)


def _watermark(connection: Connection) -> int:
    """The last round that was deleted."""
    found = connection.execute("SELECT value FROM meta WHERE name = 'deleted_round'").fetchone()
    if found is None:
        raise StoreError("table meta has no deleted_round; the file was altered: use another one")
    return found[0]


def _row_id(connection: Connection, key: Key, watermark: int) -> int:
    state, row_id = connection.execute(_FIND, (key[4], *key[:4])).fetchone() or (None, None)
    if row_id is None or key.round <= watermark:
        raise row_missing(key, state, watermark)
    return row_id


def _check_types(connection: Connection, encoded: Sequence[tuple[Key, Mapping[str, Encoded]]]) -> None:
    """Compare fields with the types of their rounds, and record the new ones."""
    for round in sorted({key.round for key, _ in encoded}):
        known = dict(connection.execute("SELECT name, type FROM types WHERE round = ?", (round,)).fetchall())
        types = dict(known)
        for key, fields in encoded:
            if key.round == round:
                check_types(types, key, fields)
        new = [(round, name, type_) for name, type_ in types.items() if name not in known]
        connection.executemany("INSERT INTO types VALUES (?, ?, ?)", new)


def _put_rows(
    connection: Connection, session_id: int, rows: Sequence[NewRow], encoded: Sequence[Mapping[str, Encoded]]
) -> None:
    (first,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM rows").fetchone()
    columns = "id, session_id, trajectory, prompt_tokens, response_tokens, loss_tokens, is_padding, tags, fields"
    values = [
        (first + i, session_id, i, *_counts(row), int(row.is_padding), _json(dict(row.tags)), _json(sorted(row.fields)))
        for i, row in enumerate(rows)
    ]
    connection.executemany(f"INSERT INTO rows ({columns}) VALUES (?,?,?,?,?,?,?,?,?)", values)
    for i, fields in enumerate(encoded):
        connection.executemany(_PUT_FIELD, _field_rows(first + i, fields))


def _counts(row: NewRow) -> tuple[int, int, int]:
    return row.prompt_tokens, row.response_tokens, row.loss_tokens


def _field_rows(row_id: int, fields: Mapping[str, Encoded]) -> Iterable[tuple[int, str, str, bytes]]:
    return ((row_id, name, value.type, value.data) for name, value in fields.items())


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
