"""Listing a SQLite store: two queries, and entries made from them.

The surprise: the garbage collector pauses meanwhile. It would walk all entries again and again and find no garbage,
which takes a fifth of the time.
"""

import json
from collections.abc import Mapping
from sqlite3 import Connection

from raggedright.store.collecting import no_collecting
from raggedright.store.protocol import Key, RowEntry, SessionEntry, SessionKey, StoreError

_SESSIONS = "SELECT id, round, prompt, session, attempt, state, cause, score FROM sessions WHERE {}"
_ROWS = """SELECT r.session_id, r.trajectory, r.prompt_tokens, r.response_tokens, r.loss_tokens, r.is_padding,
    r.tags, r.fields
  FROM rows r WHERE r.session_id IN (SELECT id FROM sessions WHERE {}) ORDER BY r.session_id, r.trajectory"""


def read_entries(connection: Connection, watermark: int, filters: Mapping[str, object]) -> list[SessionEntry]:
    """Sessions of rounds after the watermark that match the filters that are not None."""
    given = {name: value for name, value in filters.items() if value is not None}
    where = " AND ".join(["round > ?", *(f"{name} = ?" for name in given)])
    values = (watermark, *given.values())
    order = " ORDER BY round, prompt, session, attempt"
    with no_collecting():
        sessions = connection.execute(_SESSIONS.format(where) + order, values).fetchall()
        found = connection.execute(_ROWS.format(where), values).fetchall()
        try:
            return _entries(sessions, found)
        except (TypeError, ValueError, KeyError) as error:
            raise StoreError(f"a listing cannot be read ({error}); the file was altered") from error


def _entries(sessions: list[tuple], found: list[tuple]) -> list[SessionEntry]:
    keys = {id_: SessionKey(*key) for id_, *key, _, _, _ in sessions}
    rows: dict[int, list[RowEntry]] = {id_: [] for id_ in keys}
    names: dict[str, frozenset[str]] = {}
    for fields in {row[7] for row in found}:
        names[fields] = frozenset(json.loads(fields))
    tags = json.loads(f"[{','.join([row[6] for row in found])}]")
    new = tuple.__new__  # skips the argument handling of Key() and RowEntry()
    for (id_, trajectory, prompt, response, loss, is_padding, _, fields), tag in zip(found, tags, strict=True):
        key = new(Key, (*keys[id_], trajectory))
        rows[id_].append(new(RowEntry, (key, prompt, response, loss, is_padding == 1, tag, names[fields])))
    return [
        SessionEntry(key=keys[id_], state=state, cause=cause, score=score, rows=tuple(rows[id_]))
        for id_, *_, state, cause, score in sessions
    ]
