"""Listing a SQLite store: one query, and entries made from it.

The surprise: the garbage collector pauses meanwhile. It would walk all entries again and again and find no garbage,
which takes a fifth of the time.
"""

import json
from collections.abc import Mapping
from sqlite3 import Connection

from raggedright.store.collecting import no_collecting
from raggedright.store.protocol import Key, RowEntry, SessionEntry, SessionKey, StoreError

_SESSIONS = """SELECT round, prompt, session, attempt, state, cause, score, rows, fields FROM sessions WHERE {}
  ORDER BY round, prompt, session, attempt"""


def read_entries(connection: Connection, watermark: int, filters: Mapping[str, object]) -> list[SessionEntry]:
    """Sessions of rounds after the watermark that match the filters that are not None."""
    given = {name: value for name, value in filters.items() if value is not None}
    where = " AND ".join(["round > ?", *(f"{name} = ?" for name in given)])
    with no_collecting():
        found = connection.execute(_SESSIONS.format(where), (watermark, *given.values())).fetchall()
        try:
            return _entries(found)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise StoreError(f"a listing cannot be read ({error}); the file was altered") from error


def _entries(found: list[tuple]) -> list[SessionEntry]:
    rows_of = json.loads(f"[{','.join([session[7] for session in found])}]")
    names = {text: [*map(frozenset, json.loads(text))] for text in {session[8] for session in found}}
    new = tuple.__new__  # skips the argument handling of Key() and RowEntry()
    entries = []
    for (*key, state, cause, score, _, fields), rows in zip(found, rows_of, strict=True):
        of_row = names[fields]
        listed = tuple(
            [
                new(RowEntry, (new(Key, (*key, i)), prompt, response, loss, is_padding == 1, tags, of_row[which]))
                for i, (prompt, response, loss, is_padding, tags, which) in enumerate(rows)
            ]
        )
        entries.append(SessionEntry(key=SessionKey(*key), state=state, cause=cause, score=score, rows=listed))
    return entries
