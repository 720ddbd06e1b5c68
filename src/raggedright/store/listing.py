"""Sessions and their rows in a few long columns, which is what a planner wants and what travels between processes.

A listing is the sequence of its entries. The objects, one a row, are made when somebody asks for an entry, and tags are
read from their JSON text when somebody asks for them: a round is planned without either. A pickle has columns alone.
Whoever puts sessions can list them without asking the store (`listing_of_new`), and listings can be joined.

The surprise: a listing of new sessions whose rows are short has their vectors, too. It is then all that there is to put
(`Store.put_listing`), and may go from rank to rank, so that nobody has to read from the store what was just put there.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from raggedright.arrays import Bools, Ints, within
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
from raggedright.store.tags import tags_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from raggedright.ragged import Ragged

SHORT = 2**13  # bytes of a session's vectors, in the mean, for a listing to have them
MOST_VECTORS = 2**22  # bytes of all vectors that a listing of new sessions has


class About(NamedTuple):
    """What a listing says of some rows, in columns; tags are JSON, one text object for many that are alike."""

    prompt_tokens: Ints
    response_tokens: Ints
    loss_tokens: Ints
    is_padding: Bools
    tags: Sequence[str]

    @classmethod
    def of(cls, rows: "Sequence[NewRow] | Sequence[RowEntry]") -> "About":
        """What there is to say of these."""
        tags = {id(row.tags): row.tags for row in rows}  # many rows may have one object
        texts = {i: tags_text(each) for i, each in tags.items()}
        return cls(
            np.array([row.prompt_tokens for row in rows] or _NO_COUNTS),
            np.array([row.response_tokens for row in rows] or _NO_COUNTS),
            np.array([row.loss_tokens for row in rows] or _NO_COUNTS),
            np.array([row.is_padding for row in rows], dtype=bool),
            [texts[id(row.tags)] for row in rows],
        )

    def take(self, at: Ints) -> "About":
        """The rows at these places."""
        places: list[int] = at.tolist()
        tags = [*map(self.tags.__getitem__, places)]
        return About(self.prompt_tokens[at], self.response_tokens[at], self.loss_tokens[at], self.is_padding[at], tags)


_NO_COUNTS = np.zeros(0, dtype=np.int64)


def join_about(parts: Sequence[About]) -> About:
    """What is said of all rows, one part after another."""
    counts = zip(*(part[:4] for part in (About.of(()), *parts)), strict=True)
    prompt, response, loss, is_padding = (np.concatenate(column) for column in counts)
    return About(prompt, response, loss, is_padding, [*chain.from_iterable([part.tags for part in parts])])


SessionLine = tuple[tuple, State, str, float | None, int]
"""A session: its key, state, cause, score and number of rows."""


class Listing(Sequence[SessionEntry]):
    """Sessions; what there is to say of the rows of all; each row's set of field names by number; these sets.

    `vectors` has all fields of all rows by name, or is None.
    """

    def __init__(
        self,
        sessions: Sequence[SessionLine],
        about: About,
        set_of_row: Ints,
        field_names: Sequence[Sequence[str]],
        vectors: "Mapping[str, Ragged] | None" = None,
    ) -> None:
        self.sessions, self.about, self.set_of_row, self.field_names = sessions, about, set_of_row, field_names
        self.vectors = vectors

    def __reduce__(self) -> tuple:
        vectors = None
        if self.vectors is not None:  # as arrays, whose pickles are cheaper than tensors'
            vectors = {name: (ragged.flat.numpy(), ragged.sizes) for name, ragged in self.vectors.items()}
        return _unpickled, (self.sessions, self.about, self.set_of_row, self.field_names, vectors)

    def without_vectors(self, *, above: int) -> "Listing":
        """The same, but for vectors of more bytes than `above`."""
        if self.vectors is None or sum(ragged.flat.nbytes for ragged in self.vectors.values()) <= above:
            return self
        return Listing(self.sessions, self.about, self.set_of_row, self.field_names)

    @cached_property
    def keys(self) -> list[Key]:
        """The key of each row."""
        new = tuple.__new__  # skips the argument handling of Key()
        return [new(Key, (*key, i)) for key, _, _, _, num_rows in self.sessions for i in range(num_rows)]

    @cached_property
    def tags(self) -> Sequence[Mapping[str, Tag]]:
        """The tags of each row."""
        try:
            tags = json.loads(f"[{','.join(self.about.tags)}]")
        except ValueError as error:
            raise _altered(str(error)) from error
        if len(tags) != len(self.set_of_row) or not all(type(each) is dict for each in tags):
            raise _altered("its rows have other tags than one JSON object each")
        return tags

    @property
    def first_tags(self) -> list[Mapping[str, Tag]]:
        """The tags of the first row of each session that has rows; many are alike, and read once."""
        ends = accumulate(line[4] for line in self.sessions)
        first = [self.about.tags[end - line[4]] for end, line in zip(ends, self.sessions, strict=True) if line[4]]
        try:
            known = {text: json.loads(text) for text in {*first}}
        except ValueError as error:
            raise _altered(str(error)) from error
        return [known[text] for text in first]

    @cached_property
    def entries(self) -> list[SessionEntry]:
        """The sessions, each with an object a row."""
        with no_collecting():
            names, new = [*map(frozenset, self.field_names)], tuple.__new__
            counts, sets = (column.tolist() for column in self.about[:4]), self.set_of_row.tolist()
            columns = zip(self.keys, *counts, self.tags, [names[n] for n in sets], strict=True)
            rows = iter([new(RowEntry, row) for row in columns])
            return [
                SessionEntry(
                    key=SessionKey(*key), state=state, cause=cause, score=score, rows=tuple(islice(rows, num_rows))
                )
                for key, state, cause, score, num_rows in self.sessions
            ]

    def new_sessions(self) -> list[NewSession]:
        """What there was to put, of a listing with vectors, which is what rows have beside their numbers."""
        columns = {name: ragged.split() for name, ragged in (self.vectors or {}).items()}
        said = enumerate(zip(*(column.tolist() for column in self.about[:4]), self.tags, strict=True))
        rows = iter(
            [
                NewRow(prompt, response, loss, {name: of[i] for name, of in columns.items()}, is_padding, tags)
                for i, (prompt, response, loss, is_padding, tags) in said
            ]
        )
        return [
            NewSession(SessionKey(*key), [*islice(rows, num_rows)], state, cause, score)
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
    listing = _listing(lines, [row for entry in found for row in entry.rows], names)
    listing.entries = found
    return listing


def listing_of_new(sessions: Iterable[NewSession]) -> Listing:
    """What a store lists of sessions that were put, in the order of their keys."""
    found = sorted(sessions, key=lambda new: new.key)
    lines: list[SessionLine] = [(tuple(new.key), new.state, new.cause, new.score, len(new.rows)) for new in found]
    rows = [*chain.from_iterable([new.rows for new in found])]
    listing = _listing(lines, rows, [tuple(row.fields) for row in rows])
    if len(listing.field_names) == 1:
        listing.vectors = _vectors([row.fields for row in rows], most=min(MOST_VECTORS, SHORT * len(found)))
    return listing


def join_listings(listings: Sequence[Listing]) -> Listing:
    """The sessions of all of them, in the order of their keys."""
    if len(some := [each for each in listings if len(each)]) == 1 and listing_of(some[0]) is some[0]:
        return some[0]
    lines = [line for listing in listings for line in listing.sessions]
    order = sorted(range(len(lines)), key=[key for key, *_ in lines].__getitem__)
    sizes = np.array([line[4] for line in lines], dtype=np.int64)
    rows = np.repeat((np.cumsum(sizes) - sizes)[order], sizes[order]) + within(sizes[order])
    sets: dict[tuple[str, ...], int] = {}
    numbers = [_NO_COUNTS]
    for each in listings:
        number = [sets.setdefault(tuple(names), len(sets)) for names in each.field_names]
        numbers.append(np.array(number, dtype=np.int64)[each.set_of_row])
    about = join_about([each.about for each in listings]).take(rows)
    vectors = _join_vectors([each for each in listings if len(each.set_of_row)], rows)
    return Listing([lines[i] for i in order], about, np.concatenate(numbers)[rows], [*map(list, sets)], vectors)


def _join_vectors(listings: Sequence[Listing], rows: Ints) -> "dict[str, Ragged] | None":
    """The vectors of all, in the order of these rows of theirs; None where one has none, or others."""
    parts = [each.vectors for each in listings if each.vectors is not None]
    if not parts or len(parts) < len(listings) or any(part.keys() != parts[0].keys() for part in parts):
        return None
    from raggedright.ragged import concatenate  # needs torch

    return {name: concatenate([part[name] for part in parts]).rows(rows) for name in parts[0]}


def _vectors(rows: Sequence[Mapping[str, object]], *, most: int) -> "dict[str, Ragged] | None":
    """Rows of the same fields, joined field by field, where all are vectors of one type and have few bytes."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if not columns or sum(_num_bytes(column) for column in columns.values()) > most:
        return None
    from raggedright.ragged import join_alike  # needs torch

    joined = {name: join_alike(column) for name, column in columns.items()}
    found = {name: ragged for name, ragged in joined.items() if ragged is not None}
    return found if len(found) == len(joined) else None


def _num_bytes(column: Sequence[object]) -> float:
    """Of vectors, which all have one type; infinite where they cannot be."""
    try:
        return sum(map(len, column)) * column[0].itemsize  # type: ignore[arg-type,attr-defined]
    except (TypeError, AttributeError):  # no vectors, or numbers of no dims
        return inf


def _listing(
    lines: list[SessionLine],
    rows: Sequence[NewRow] | Sequence[RowEntry],
    names: Sequence[tuple[str, ...] | frozenset[str]],
) -> Listing:
    sets: dict[tuple[str, ...] | frozenset[str], int] = {}
    set_of_row = [sets.setdefault(each, len(sets)) for each in names]
    return Listing(lines, About.of(rows), np.array(set_of_row, dtype=np.int64), [sorted(each) for each in sets])


def _unpickled(
    sessions: Sequence[SessionLine],
    about: About,
    set_of_row: Ints,
    field_names: Sequence[Sequence[str]],
    arrays: "Mapping[str, tuple[NDArray, NDArray]] | None",
) -> Listing:
    listing = Listing(sessions, about, set_of_row, field_names)
    if arrays is not None:
        from raggedright.ragged import of_array  # needs torch

        listing.vectors = {name: of_array(*each) for name, each in arrays.items()}
    return listing


def _altered(what: str) -> StoreError:
    return StoreError(f"a listing cannot be read ({what}); the file was altered")
