"""What a SQLite store asks and is told: keys to rows, rows to fields, and the checks that need the file.

Each works inside a transaction that the caller has begun. Keys are looked up many a statement.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from sqlite3 import Connection
from typing import NamedTuple, TypeVar

from raggedright.store.checks import (
    MOST_ROWS,
    check_can_become,
    check_put,
    check_types,
    field_missing,
    round_deleted,
    row_missing,
)
from raggedright.store.encoding import decode_field, type_name
from raggedright.store.protocol import Key, NewRow, NewSession, SessionKey, StoreError
from raggedright.store.row_encoding import EncodedRow, decode_row, encode_row

_T = TypeVar("_T")
KEYS_A_STATEMENT = 64

# Many keys a statement; CROSS has the keys, numbered, in the outer loop.
_FIND = """WITH k (i, round, prompt, session, attempt) AS (VALUES {})
  SELECT k.i, s.id, s.state FROM k CROSS JOIN sessions s USING (round, prompt, session, attempt)"""
_GET = f"""WITH k (i, round, prompt, session, attempt, trajectory) AS (VALUES {{}})
  SELECT k.i, s.state, s.apart, v.row_id, v.value
  FROM k CROSS JOIN sessions s USING (round, prompt, session, attempt)
  LEFT JOIN row_values v
    ON v.row_id = s.id * {MOST_ROWS} + k.trajectory AND k.trajectory BETWEEN 0 AND {MOST_ROWS - 1}"""


class Ready(NamedTuple):
    """A session to put, encoded."""

    new: NewSession
    rows: list[EncodedRow]
    listed: str
    field_names: str


class Found(NamedTuple):
    """A row as the file has it."""

    row_id: int
    apart: bool
    value: bytes


def watermark_of(connection: Connection) -> int:
    """The last round that was deleted."""
    found = connection.execute("SELECT value FROM meta WHERE name = 'deleted_round'").fetchone()
    if found is None:
        raise StoreError("table meta has no deleted_round; the file was altered: use another one")
    return found[0]


def encode_session(new: NewSession) -> Ready:
    """A session that can be put, whatever the store holds, as the file takes it."""
    check_put(new)
    rows = [encode_row(Key(*new.key, i), row.fields) for i, row in enumerate(new.rows)]
    lists: dict[tuple[str, ...], int] = {}  # of field names, most often one
    listed = [[*_counts(row), dict(row.tags), lists.setdefault(tuple(row.fields), len(lists))] for row in new.rows]
    return Ready(new, rows, _json(listed), _names(tuple(lists)))


def session_row(session_id: int, ready: Ready) -> tuple[object, ...]:
    """What table sessions has of it."""
    key, _, state, cause, score = ready.new
    apart = int(any(row.apart for row in ready.rows))
    return session_id, *key, state, cause, score, ready.listed, ready.field_names, apart


def check_keys(connection: Connection, sessions: Sequence[NewSession]) -> list[int]:
    """The id of each session, new or known; refused where its round is gone or it cannot become what is put."""
    watermark = watermark_of(connection)
    known: dict[SessionKey, tuple[int, str]] = {}
    for part in parts([new.key for new in sessions]):
        values = [value for i, key in enumerate(part) for value in (i, *key)]
        for i, session_id, state in connection.execute(_FIND.format(_places(len(part), 5)), values):
            known[part[i]] = session_id, state
    (next_id,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM sessions").fetchone()
    ids = []
    for new in sessions:
        if new.key.round <= watermark:
            raise round_deleted(str(new.key), watermark)
        session_id, before = known.get(new.key, (next_id, None))
        check_can_become(new.key, before, new.state)
        known[new.key] = session_id, new.state
        next_id += before is None
        ids.append(session_id)
    return ids


def find_rows(connection: Connection, keys: Sequence[Key]) -> list[Found]:
    """Rows that are all there, in the order of the keys."""
    watermark = watermark_of(connection)
    rows: list[Found] = []
    for part in parts(keys):
        states: list[str | None] = [None] * len(part)
        found: list[Found | None] = [None] * len(part)
        values = [value for i, key in enumerate(part) for value in (i, *key)]
        for i, state, apart, row_id, value in connection.execute(_GET.format(_places(len(part), 6)), values):
            states[i] = state
            if row_id is not None:
                found[i] = Found(row_id, apart, value)
        for key, state, row in zip(part, states, found, strict=True):
            if row is None or key[0] <= watermark:
                raise row_missing(Key(*key), state, watermark)
            rows.append(row)
    return rows


def read_apart(connection: Connection, row_ids: Sequence[int], names: Sequence[str]) -> dict[tuple[int, str], bytes]:
    """What these rows have of these fields beside their one value."""
    wanted = f"SELECT name, value FROM fields WHERE row_id = ? AND name IN ({','.join('?' * len(names))})"
    return {(row_id, name): value for row_id in row_ids for name, value in connection.execute(wanted, (row_id, *names))}


def fields_of(key: Key, row: Found, names: Sequence[str], apart: Mapping[tuple[int, str], bytes]) -> dict[str, object]:
    """A row's fields; what stands apart is newer than what its one value has."""
    whole = decode_row(key, row.value)
    if not row.apart and all(name in whole for name in names):
        return {name: whole[name] for name in names}
    answer = {}
    for name in names:
        if (value := apart.get((row.row_id, name))) is not None:
            answer[name] = decode_field(key, name, value)
        elif name in whole:
            answer[name] = whole[name]
        else:
            raise field_missing(key, name)
    return answer


def field_types(connection: Connection, key: Key, row: Found) -> dict[str, str]:
    """The type of each field that a row has."""
    apart = connection.execute("SELECT name, type FROM fields WHERE row_id = ?", (row.row_id,)).fetchall()
    return {**{name: type_name(value) for name, value in decode_row(key, row.value).items()}, **dict(apart)}


def list_fields(connection: Connection, row_id: int, names: Collection[str]) -> None:
    """Have a row listed with these fields, some of which stand apart."""
    session_id, trajectory = divmod(row_id, MOST_ROWS)
    of_session = "SELECT rows, fields FROM sessions WHERE id = ?"
    rows, lists = map(json.loads, connection.execute(of_session, (session_id,)).fetchone())
    wanted = sorted(names)
    if wanted not in lists:
        lists.append(wanted)
    rows[trajectory][5] = lists.index(wanted)
    change = "UPDATE sessions SET rows = ?, fields = ?, apart = 1 WHERE id = ?"
    connection.execute(change, (_json(rows), _json(lists), session_id))


def check_round_types(connection: Connection, of_rows: Sequence[tuple[Key, Mapping[str, str]]]) -> None:
    """Compare fields with the types of their rounds, and record the new ones."""
    for round in sorted({key.round for key, _ in of_rows}):
        known = dict(connection.execute("SELECT name, type FROM types WHERE round = ?", (round,)).fetchall())
        types = dict(known)
        for key, of_row in of_rows:
            if key.round == round:
                check_types(types, key, of_row)
        new = [(round, name, type_) for name, type_ in types.items() if name not in known]
        if new:
            connection.executemany("INSERT INTO types VALUES (?, ?, ?)", new)


def parts(items: Sequence[_T]) -> list[Sequence[_T]]:
    """As many at a time as a statement takes."""
    return [items[start : start + KEYS_A_STATEMENT] for start in range(0, len(items), KEYS_A_STATEMENT)]


def _places(count: int, width: int) -> str:
    return ",".join([f"({','.join('?' * width)})"] * count)


@lru_cache(maxsize=256)
def _names(lists: tuple[tuple[str, ...], ...]) -> str:
    """Lists of field names as JSON; a run's rows have the same few."""
    return _json([sorted(names) for names in lists])


def _counts(row: NewRow) -> tuple[int, int, int, int]:
    return row.prompt_tokens, row.response_tokens, row.loss_tokens, int(row.is_padding)


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # made once
