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
from functools import lru_cache
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
KEYS_A_GET = 64

_SESSION = "round = ? AND prompt = ? AND session = ? AND attempt = ?"
_FIND = f"""SELECT s.state, r.id FROM sessions s LEFT JOIN rows r ON r.session_id = s.id AND r.trajectory = ?
  WHERE {_SESSION}"""
# Many keys a statement; CROSS has the keys, numbered, in the outer loop.
_GET = """WITH k (i, round, prompt, session, attempt, trajectory) AS (VALUES {})
  SELECT k.i, s.state, r.id, f.name, f.value
  FROM k CROSS JOIN sessions s USING (round, prompt, session, attempt)
  LEFT JOIN rows r ON r.session_id = s.id AND r.trajectory = k.trajectory
  LEFT JOIN fields f ON f.row_id = r.id AND f.name IN ({})"""
_BEFORE_PUT = f"""SELECT m.value, (SELECT coalesce(max(id), 0) + 1 FROM rows), s.id, s.state FROM meta m
  LEFT JOIN sessions s ON {_SESSION} WHERE m.name = 'deleted_round'"""
_PUT_SESSION = "INSERT INTO sessions (round, prompt, session, attempt, state, cause, score) VALUES (?,?,?,?,?,?,?)"
_LAST = "SELECT prompt, session, state, max(attempt) FROM sessions WHERE round = ? GROUP BY prompt, session"
_ROW = "id, session_id, trajectory, prompt_tokens, response_tokens, loss_tokens, is_padding, tags, fields"
_PUT_ROW = f"INSERT INTO rows ({_ROW}) VALUES (?,?,?,?,?,?,?,?,?)"
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
            found = connection.execute(_BEFORE_PUT, session[:4]).fetchone()
            watermark, first_row, session_id, before = found or (_watermark(connection), 0, None, None)
            if session.round <= watermark:
                raise round_deleted(str(session), watermark)
            check_can_become(session, before, state)
            if encoded:
                _check_types(connection, [(Key(*session, i), fields) for i, fields in enumerate(encoded)])
            if session_id is None:
                session_id = connection.execute(_PUT_SESSION, (*session, state, cause, score)).lastrowid
            else:
                change = "UPDATE sessions SET state = ?, cause = ?, score = ? WHERE id = ?"
                connection.execute(change, (state, cause, score, session_id))
            assert session_id is not None
            _put_rows(connection, session_id, first_row, rows, encoded)

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
        answer = []
        with self._database.read("get") as connection:
            watermark = _watermark(connection)
            for start in range(0, len(keys), KEYS_A_GET):
                answer += _get_some(connection, keys[start : start + KEYS_A_GET], names, watermark)
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


def _get_some(
    connection: Connection, keys: Sequence[Key], names: Sequence[str], watermark: int
) -> list[dict[str, object]]:
    """These fields of a few rows, by one statement."""
    found: list[dict[str, bytes]] = [{} for _ in keys]
    states: list[str | None] = [None] * len(keys)
    row_ids: list[int | None] = [None] * len(keys)
    select = _GET.format(",".join(["(?,?,?,?,?,?)"] * len(keys)), ",".join("?" * len(names)))
    values = (*(value for i, key in enumerate(keys) for value in (i, *key)), *names)
    for i, state, row_id, name, value in connection.execute(select, values):
        states[i], row_ids[i], found[i][name] = state, row_id, value
    answer = []
    for key, state, row_id, values in zip(keys, states, row_ids, found, strict=True):
        if row_id is None or key[0] <= watermark:
            raise row_missing(key, state, watermark)
        missing = next((name for name in names if name not in values), None)
        if missing is not None:
            raise field_missing(key, missing)
        answer.append({name: decode_field(key, name, values[name]) for name in names})
    return answer


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
        if new:
            connection.executemany("INSERT INTO types VALUES (?, ?, ?)", new)


def _put_rows(
    connection: Connection,
    session_id: int,
    first: int,
    rows: Sequence[NewRow],
    encoded: Sequence[Mapping[str, Encoded]],
) -> None:
    """Put rows of a session under ids from `first` on."""
    values = [
        (first + i, session_id, i, *_counts(row), int(row.is_padding), _json(dict(row.tags)), _names(tuple(row.fields)))
        for i, row in enumerate(rows)
    ]
    connection.executemany(_PUT_ROW, values)
    fields = (row for i, fields in enumerate(encoded) for row in _field_rows(first + i, fields))
    connection.executemany(_PUT_FIELD, fields)


@lru_cache(maxsize=256)
def _names(fields: tuple[str, ...]) -> str:
    """Field names as JSON; a run's rows have the same few."""
    return _json(sorted(fields))


def _counts(row: NewRow) -> tuple[int, int, int]:
    return row.prompt_tokens, row.response_tokens, row.loss_tokens


def _field_rows(row_id: int, fields: Mapping[str, Encoded]) -> Iterable[tuple[int, str, str, bytes]]:
    return ((row_id, name, value.type, value.data) for name, value in fields.items())


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # made once
