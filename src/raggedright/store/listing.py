"""Sessions and their rows in a few long columns, which is what a planner wants and what travels between processes.

A listing is the sequence of its entries. The objects, one a row, are made when somebody asks for an entry, and tags are
read from their JSON text when somebody asks for them: a round is planned without either. A pickle has columns alone.
Whoever puts sessions can list them without asking the store (`listing_of_new`), and listings can be joined.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import NamedTuple, overload

from raggedright.store.collecting import no_collecting
from raggedright.store.protocol import (
    Key,
    NewRow,
    NewSession,
    RowEntry,
    SessionEntry,
    SessionKey,
    State,
    StoreError,
    Tag,
)


class About(NamedTuple):
    """What a listing says of some rows, in columns; their tags are a text a session, objects with commas between."""

    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    loss_tokens: Sequence[int]
    is_padding: Sequence[bool]
    tags: Sequence[str]


SessionLine = tuple[tuple, State, str, float | None, int]
"""A session: its key, state, cause, score and number of rows."""


class Listing(Sequence[SessionEntry]):
    """Sessions; what there is to say of the rows of all; each row's set of field names by number; these sets."""

    def __init__(
        self,
        sessions: Sequence[SessionLine],
        about: About,
        set_of_row: Sequence[int],
        field_names: Sequence[Sequence[str]],
    ) -> None:
        self.sessions, self.about, self.set_of_row, self.field_names = sessions, about, set_of_row, field_names

    def __reduce__(self) -> tuple:
        return Listing, (self.sessions, self.about, self.set_of_row, self.field_names)

    @cached_property
    def keys(self) -> list[Key]:
        """The key of each row."""
        new = tuple.__new__  # skips the argument handling of Key()
        return [new(Key, (*key, i)) for key, _, _, _, num_rows in self.sessions for i in range(num_rows)]

    @cached_property
    def tags(self) -> Sequence[Mapping[str, Tag]]:
        """The tags of each row."""
        try:
            tags = json.loads(f"[{','.join(filter(None, self.about.tags))}]")
        except ValueError as error:
            raise _altered(str(error)) from error
        if len(tags) != len(self.set_of_row) or not all(type(each) is dict for each in tags):
            raise _altered("its rows have other tags than one JSON object each")
        return tags

    @property
    def first_tags(self) -> list[Mapping[str, Tag]]:
        """The tags of the first row of each session that has rows; many are alike, and read once."""
        read = json.JSONDecoder().raw_decode
        try:
            known = {text: read(text)[0] for text in {*self.about.tags} if text}
        except ValueError as error:
            raise _altered(str(error)) from error
        return [known[text] for text in self.about.tags if text]

    @cached_property
    def entries(self) -> list[SessionEntry]:
        """The sessions, each with an object a row."""
        with no_collecting():
            names, new = [*map(frozenset, self.field_names)], tuple.__new__
            columns = zip(self.keys, *self.about[:4], self.tags, [names[n] for n in self.set_of_row], strict=True)
            rows = iter([new(RowEntry, row) for row in columns])
            return [
                SessionEntry(
                    key=SessionKey(*key), state=state, cause=cause, score=score, rows=tuple(islice(rows, num_rows))
                )
                for key, state, cause, score, num_rows in self.sessions
            ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.entries == [*other]

    def __len__(self) -> int:
        return len(self.sessions)

    @overload
    def __getitem__(self, at: int) -> SessionEntry: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[SessionEntry]: ...
    def __getitem__(self, at: int | slice) -> SessionEntry | Sequence[SessionEntry]:
        return self.entries[at]


def listing_of(entries: Iterable[SessionEntry]) -> Listing:
    """Entries as a listing, in the order of their keys."""
    if isinstance(entries, Listing):
        keys = [key for key, *_ in entries.sessions]
        if keys == sorted(keys):
            return entries
    found = sorted(entries, key=lambda entry: entry.key)
    lines: list[SessionLine] = [(tuple(e.key), e.state, e.cause, e.score, len(e.rows)) for e in found]
    names = [row.field_names for entry in found for row in entry.rows]
    listing = _listing(lines, [entry.rows for entry in found], names)
    listing.entries = found
    return listing


def listing_of_new(sessions: Iterable[NewSession]) -> Listing:
    """What a store lists of sessions that were put, in the order of their keys."""
    found = sorted(sessions, key=lambda new: new.key)
    lines: list[SessionLine] = [(tuple(new.key), new.state, new.cause, new.score, len(new.rows)) for new in found]
    names = [tuple(row.fields) for new in found for row in new.rows]
    return _listing(lines, [new.rows for new in found], names)


def join_listings(listings: Sequence[Listing]) -> Listing:
    """The sessions of all of them, in the order of their keys."""
    lines = [line for listing in listings for line in listing.sessions]
    order = sorted(range(len(lines)), key=lambda i: lines[i][0])
    ends = [*accumulate(line[4] for line in lines)]
    rows = [row for i in order for row in range(ends[i] - lines[i][4], ends[i])]
    columns = zip(About((), (), (), (), ()), *(each.about for each in listings), strict=True)
    *counts, tags = ([*chain.from_iterable(column)] for column in columns)
    names = [tuple(each.field_names[n]) for each in listings for n in each.set_of_row]
    about = About(*([column[row] for row in rows] for column in counts), tags=[tags[i] for i in order])
    return Listing([lines[i] for i in order], about, *_number([names[row] for row in rows]))


def _listing(
    lines: list[SessionLine],
    of_sessions: Sequence[Sequence[NewRow | RowEntry]],
    names: Sequence[tuple[str, ...] | frozenset[str]],
) -> Listing:
    rows = [*chain.from_iterable(of_sessions)]
    about = About(
        [row.prompt_tokens for row in rows],
        [row.response_tokens for row in rows],
        [row.loss_tokens for row in rows],
        [row.is_padding for row in rows],
        [_json([{**row.tags} for row in of_session])[1:-1] for of_session in of_sessions],
    )
    return Listing(lines, about, *_number(names))


def _number(names: Sequence[tuple[str, ...] | frozenset[str]]) -> tuple[list[int], list[list[str]]]:
    """The number of each row's set of field names, and these sets."""
    sets: dict[tuple[str, ...] | frozenset[str], int] = {}
    set_of_row = [sets.setdefault(each, len(sets)) for each in names]
    return set_of_row, [sorted(each) for each in sets]


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # made once


def _altered(what: str) -> StoreError:
    return StoreError(f"a listing cannot be read ({what}); the file was altered")
