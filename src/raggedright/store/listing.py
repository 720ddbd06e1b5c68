"""Sessions and their rows in a few long columns, which is what a planner wants and what travels between processes.

A listing is the sequence of its entries. The objects, one a row, are made when somebody asks for an entry, and tags are
read from their JSON text when somebody asks for them: a round is planned without either. A pickle has columns alone.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple, overload

from raggedright.store.collecting import no_collecting
from raggedright.store.protocol import Key, RowEntry, SessionEntry, SessionKey, State, StoreError, Tag


class About(NamedTuple):
    """What a listing says of some rows, in columns; tags as JSON objects with commas between them."""

    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    loss_tokens: Sequence[int]
    is_padding: Sequence[bool]
    tags: str


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
            tags = json.loads(f"[{self.about.tags}]")
        except ValueError as error:
            raise _altered(str(error)) from error
        if len(tags) != len(self.set_of_row) or not all(type(each) is dict for each in tags):
            raise _altered("its rows have other tags than one JSON object each")
        return tags

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
    rows = [row for entry in found for row in entry.rows]
    sets: dict[frozenset[str], int] = {}
    set_of_row = [sets.setdefault(row.field_names, len(sets)) for row in rows]
    about = About(
        [row.prompt_tokens for row in rows],
        [row.response_tokens for row in rows],
        [row.loss_tokens for row in rows],
        [row.is_padding for row in rows],
        json.dumps([row.tags for row in rows])[1:-1],
    )
    sessions: list[SessionLine] = [(tuple(e.key), e.state, e.cause, e.score, len(e.rows)) for e in found]
    listing = Listing(sessions, about, set_of_row, [sorted(names) for names in sets])
    listing.entries = found
    return listing


def _altered(what: str) -> StoreError:
    return StoreError(f"a listing cannot be read ({what}); the file was altered")
