"""A listing on its way between processes: a few long columns, and tags as JSON text, not an object a row.

A pickle of entries takes ten times as long as one of these. `entries_of(listing_of(entries))` is `entries`.
"""

import json
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from raggedright.store.collecting import no_collecting
from raggedright.store.protocol import Key, RowEntry, SessionEntry, SessionKey, State


class About(NamedTuple):
    """What a listing says of some rows, in columns; tags as JSON objects with commas between them."""

    prompt_tokens: list[int]
    response_tokens: list[int]
    loss_tokens: list[int]
    is_padding: list[bool]
    tags: str


class Listing(NamedTuple):
    """Sessions with their numbers of rows; the rows of all; each row's set of field names by number; these sets."""

    sessions: list[tuple[tuple, State, str, float | None, int]]
    about: About
    set_of_row: list[int]
    field_names: list[list[str]]


def listing_of(entries: Sequence[SessionEntry]) -> Listing:
    """Entries as columns."""
    rows = [row for entry in entries for row in entry.rows]
    sets: dict[frozenset[str], int] = {}
    set_of_row = [sets.setdefault(row.field_names, len(sets)) for row in rows]
    about = About(
        [row.prompt_tokens for row in rows],
        [row.response_tokens for row in rows],
        [row.loss_tokens for row in rows],
        [row.is_padding for row in rows],
        json.dumps([row.tags for row in rows])[1:-1],
    )
    sessions: list[tuple[tuple, State, str, float | None, int]] = [
        (tuple(e.key), e.state, e.cause, e.score, len(e.rows)) for e in entries
    ]
    return Listing(sessions, about, set_of_row, [sorted(names) for names in sets])


def entries_of(listing: Listing) -> list[SessionEntry]:
    """The entries that columns stand for."""
    sessions, said, set_of_row, sets = listing
    with no_collecting():
        field_names, new = [frozenset(each) for each in sets], tuple.__new__  # skips RowEntry()'s argument handling
        keys = [new(Key, (*key, i)) for key, _, _, _, num_rows in sessions for i in range(num_rows)]
        tags = json.loads(f"[{said.tags}]")
        counts = said.prompt_tokens, said.response_tokens, said.loss_tokens, said.is_padding
        columns = zip(keys, *counts, tags, [field_names[number] for number in set_of_row], strict=True)
        rows = iter([new(RowEntry, row) for row in columns])
        return [
            SessionEntry(
                key=SessionKey(*key), state=state, cause=cause, score=score, rows=tuple(islice(rows, num_rows))
            )
            for key, state, cause, score, num_rows in sessions
        ]
