"""One round's sessions in a store on TransferQueue: where each field of each row is, and what a listing says of them.

A column of TransferQueue has one field and kind for the whole round, and a row writes to a column once: a field of a
second dtype or rank, and a repeated update, go to columns of their own. Rows that are alike share one dict of columns,
so that rows cost little and are grouped by identity.

The surprise: what a listing says of rows is kept in columns, as it is sent (`listing.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from raggedright.store.checks import check_types
from raggedright.store.listing import About, Listing, Sessions, join_about
from raggedright.store.protocol import Key, SessionKey, State


class Column(NamedTuple):
    """Where a field's value is: the type it has for its user, how it is stored (`float32.1`, `bytes`), the column."""

    type: str
    kind: str
    name: str = ""


RowColumns = dict[str, Column]  # of a row's fields; shared by all rows that are alike


@dataclass(slots=True)
class StoredRow:
    """Where a row's fields are, the write that made it, and the columns it ever wrote to."""

    columns: RowColumns
    write: int
    written: frozenset[str]


@dataclass(slots=True)
class StoredSession:
    """What a listing says of a session, with its rows."""

    key: SessionKey
    state: State
    cause: str
    score: float | None
    about: About
    rows: list[StoredRow]


@dataclass(slots=True)
class StoredRound:
    """A round's sessions, the types of its fields, and its columns with the field and kind that each is for."""

    sessions: dict[SessionKey, StoredSession] = field(default_factory=dict)
    last: dict[tuple[str, int], StoredSession] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    columns: dict[str, tuple[str, str]] = field(default_factory=dict)
    shared: dict[tuple, RowColumns] = field(default_factory=dict)  # one object for all rows that are alike
    in_queue: bool = False  # whether TransferQueue has anything of it

    def place(self, row_columns: RowColumns, taken: frozenset[str], write: int) -> RowColumns:
        """A field's column has its name if the kind is the first of the round and the row never wrote there."""
        placed = {}
        for name, (type_, kind, _) in row_columns.items():
            column = name
            if self.columns.setdefault(column, (name, kind)) != (name, kind):
                column = f"{name}@{kind}"
            if column in taken:
                column = f"{column}@{write}"
            while self.columns.setdefault(column, (name, kind)) != (name, kind):
                column += "@"
            placed[name] = Column(type_, kind, column)
        return self.shared.setdefault(tuple(placed.items()), placed)

    def merge(self, merged: dict[tuple[int, int], RowColumns], old: RowColumns, new: RowColumns) -> RowColumns:
        """Both in one, the same object for the same two; the round keeps all of them, so no id comes again."""
        both = merged.get((id(old), id(new)))
        if both is None:
            whole = {**old, **new}
            both = merged[id(old), id(new)] = self.shared.setdefault(tuple(whole.items()), whole)
        return both

    def agree(self, types: Mapping[str, str], rows: Iterable[tuple[Key, RowColumns]]) -> dict[str, str]:
        """Compare rows with the round's types and these; the types of the rows' fields."""
        known, names = {**self.types, **types}, set()
        for key, row_columns in rows:
            check_types(known, key, {name: column.type for name, column in row_columns.items()})
            names |= row_columns.keys()
        return {name: known[name] for name in names & known.keys()}

    def show(self, session: StoredSession) -> None:
        """Make a session visible."""
        pair = session.key.prompt, session.key.session
        self.sessions[session.key] = session
        if pair not in self.last or self.last[pair].key.attempt <= session.key.attempt:
            self.last[pair] = session

    def not_final(self, pairs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of these (prompt, session) pairs whose last attempt is not finished or failed."""
        return [pair for pair in pairs if pair not in self.last or self.last[pair].state == "running"]


def listing(sessions: Iterable[StoredSession]) -> Listing:
    """What there is to say of these sessions, in the order of their keys."""
    found = sorted(sessions, key=lambda session: session.key)
    rows = [row for session in found for row in session.rows]
    shared = {id(row.columns): row.columns for row in rows}
    numbers = {each: number for number, each in enumerate(shared)}
    return Listing(
        Sessions.of([(tuple(each.key), each.state, each.cause, each.score, len(each.rows)) for each in found]),
        join_about([session.about for session in found]),
        np.array([numbers[id(row.columns)] for row in rows], dtype=np.int64),
        [[*row_columns] for row_columns in shared.values()],
    )
