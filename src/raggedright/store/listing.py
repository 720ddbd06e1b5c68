"""Sessions and their rows in a few long columns, which is what a planner wants and what travels between processes.

A listing is the sequence of its entries. The objects, one a row, are made when somebody asks for an entry, and tags are
read from their JSON text when somebody asks for them: a round is planned without either. A pickle has columns alone.
Whoever puts sessions can list them without asking the store (`listing_of_new`), and listings can be joined.

The surprise: a listing of new sessions whose rows are short has their vectors, too. It is then all that there is to put
(`Store.put_listing`), and may go from rank to rank, so that nobody has to read from the store what was just put there.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from raggedright.arrays import Bools, Ints, offsets, within
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
    def of(
        cls,
        prompt_tokens: Sequence[int],
        response_tokens: Sequence[int],
        loss_tokens: Sequence[int],
        is_padding: Sequence[bool],
        tags: Sequence[Mapping[str, Tag]],
    ) -> "About":
        """What there is to say of rows, given in columns; many rows may have one object with their tags."""
        texts = {i: tags_text(each) for i, each in {id(each): each for each in tags}.items()}
        prompt, response, loss = (np.array(c or _NO_COUNTS) for c in (prompt_tokens, response_tokens, loss_tokens))
        return cls(prompt, response, loss, np.array(is_padding, dtype=bool), [texts[i] for i in map(id, tags)])

    @classmethod
    def of_new(cls, rows: Sequence[NewRow]) -> "About":
        """What there is to say of rows that are put."""
        prompt, response, loss, _, is_padding, tags = [*zip(*rows, strict=True)] or [()] * 6
        return cls.of(prompt, response, loss, is_padding, tags)

    def take(self, at: Ints) -> "About":
        """The rows at these places."""
        places: list[int] = at.tolist()
        tags = [*map(self.tags.__getitem__, places)]
        return About(self.prompt_tokens[at], self.response_tokens[at], self.loss_tokens[at], self.is_padding[at], tags)


_NO_COUNTS = np.zeros(0, dtype=np.int64)


def join_about(parts: Sequence[About]) -> About:
    """What is said of all rows, one part after another."""
    counts = zip(*(part[:4] for part in (About.of_new(()), *parts)), strict=True)
    prompt, response, loss, is_padding = (np.concatenate(column) for column in counts)
    return About(prompt, response, loss, is_padding, [*chain.from_iterable([part.tags for part in parts])])


SessionLine = tuple[tuple, State, str, float | None, int]
"""A session: its key, state, cause, score and number of rows."""


class Sessions(NamedTuple):
    """What a listing says of sessions, in columns; keys are tuples of round, prompt, session and attempt."""

    key: Sequence[tuple]
    state: Sequence[State]
    cause: Sequence[str]
    score: Sequence[float | None]
    num_rows: Ints

    @classmethod
    def of(cls, lines: Iterable[SessionLine]) -> "Sessions":
        """Sessions given one by one."""
        key, state, cause, score, num_rows = [*zip(*lines, strict=True)] or [()] * 5
        return cls(key, state, cause, score, np.array(num_rows, dtype=np.int64))

    @property
    def lines(self) -> Iterator[SessionLine]:
        """The sessions one by one."""
        return zip(self.key, self.state, self.cause, self.score, self.num_rows.tolist(), strict=True)

    def take(self, at: Sequence[int]) -> "Sessions":
        """The sessions at these places."""
        lines = [*self.lines]
        return Sessions.of([lines[i] for i in at])


def join_sessions(parts: Sequence[Sessions]) -> Sessions:
    """All sessions, one part after another."""
    return Sessions(
        [key for part in parts for key in part.key],
        [state for part in parts for state in part.state],
        [cause for part in parts for cause in part.cause],
        [score for part in parts for score in part.score],
        np.concatenate([_NO_COUNTS, *(part.num_rows for part in parts)]),
    )


class Listing(Sequence[SessionEntry]):
    """Sessions in the order of their keys; what there is to say of the rows of all; each row's set of field names by
    number; these sets. `vectors` has all fields of all rows by name, or is None.
    """

    def __init__(
        self,
        sessions: Sessions,
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
        sessions = zip(self.sessions.key, self.sessions.num_rows.tolist(), strict=True)
        return [new(Key, (*key, i)) for key, num_rows in sessions for i in range(num_rows)]

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
    def first_tags(self) -> list[tuple[Mapping[str, Tag], int]]:
        """The tags that first rows of sessions have, and how many have them; most are alike."""
        num_rows = self.sessions.num_rows
        first = Counter(map(self.about.tags.__getitem__, offsets(num_rows)[:-1][num_rows > 0].tolist()))
        try:
            return [(json.loads(text), count) for text, count in first.items()]
        except ValueError as error:
            raise _altered(str(error)) from error

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
                for key, state, cause, score, num_rows in self.sessions.lines
            ]

    def new_sessions(self) -> list[NewSession]:
        """What there was to put, of a listing with vectors, which is what rows have beside their numbers."""
        if self.vectors is None and len(self.set_of_row):
            raise StoreError(f"a listing of {len(self.set_of_row):,} rows has none of their fields; put the sessions")
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
            for key, state, cause, score, num_rows in self.sessions.lines
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.entries == [*other]

    def __len__(self) -> int:
        return len(self.sessions.key)

    @overload
    def __getitem__(self, at: int) -> SessionEntry: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[SessionEntry]: ...
    def __getitem__(self, at: int | slice) -> SessionEntry | Sequence[SessionEntry]:
        return self.entries[at]


def listing_of(entries: Iterable[SessionEntry]) -> Listing:
    """Entries as a listing, in the order of their keys."""
    if isinstance(entries, Listing):
        return entries
    found = sorted(entries, key=lambda entry: entry.key)
    sessions = Sessions.of([(tuple(e.key), e.state, e.cause, e.score, len(e.rows)) for e in found])
    rows = chain.from_iterable([entry.rows for entry in found])
    _, prompt, response, loss, is_padding, tags, names = [*zip(*rows, strict=True)] or [()] * 7
    listing = _listing(sessions, About.of(prompt, response, loss, is_padding, tags), names)
    listing.entries = found
    return listing


def listing_of_new(sessions: Iterable[NewSession]) -> Listing:
    """What a store lists of sessions that were put, in the order of their keys."""
    found = sorted(sessions, key=lambda new: new.key)
    key, rows_of, state, cause, score = [*zip(*found, strict=True)] or [()] * 5
    num_rows = np.fromiter(map(len, rows_of), dtype=np.int64, count=len(found))
    rows: list[NewRow] = [*chain.from_iterable(rows_of)]
    fields = [row.fields for row in rows]
    listing = _listing(
        Sessions([*map(tuple, key)], state, cause, score, num_rows), About.of_new(rows), [*map(tuple, fields)]
    )
    if len(listing.field_names) == 1:
        listing.vectors = _vectors(fields, most=min(MOST_VECTORS, SHORT * len(found)))
    return listing


def join_listings(listings: Sequence[Listing]) -> Listing:
    """The sessions of all of them, in the order of their keys."""
    parts = [each for each in listings if len(each)]
    if len(parts) == 1:
        return parts[0]
    sessions, about = join_sessions([each.sessions for each in parts]), join_about([each.about for each in parts])
    sets: dict[tuple[str, ...], int] = {}
    numbers = [_NO_COUNTS]
    for each in parts:
        number = [sets.setdefault(tuple(names), len(sets)) for names in each.field_names]
        numbers.append(np.array(number, dtype=np.int64)[each.set_of_row])
    set_of_row, vectors = np.concatenate(numbers), _join_vectors(parts)
    order = sorted(range(len(sessions.key)), key=sessions.key.__getitem__)
    if order != [*range(len(order))]:
        sizes = sessions.num_rows[order]
        rows = np.repeat(offsets(sessions.num_rows)[:-1][order], sizes) + within(sizes)
        sessions, about, set_of_row = sessions.take(order), about.take(rows), set_of_row[rows]
        vectors = vectors and {name: ragged.rows(rows) for name, ragged in vectors.items()}
    return Listing(sessions, about, set_of_row, [*map(list, sets)], vectors)


def _join_vectors(listings: Sequence[Listing]) -> "dict[str, Ragged] | None":
    """The vectors of all; None where one that has rows has none, or others."""
    some = [each for each in listings if len(each.set_of_row)]
    parts = [each.vectors for each in some if each.vectors is not None]
    if not parts or len(parts) < len(some) or any(part.keys() != parts[0].keys() for part in parts):
        return None
    from raggedright.ragged import concatenate  # needs torch

    return {name: concatenate([part[name] for part in parts]) for name in parts[0]}


def _vectors(rows: Sequence[Mapping[str, object]], *, most: int) -> "dict[str, Ragged] | None":
    """Rows of the same fields in one order, joined, where all are vectors of one type and have few bytes."""
    columns = dict(zip(rows[0], zip(*[row.values() for row in rows], strict=True), strict=True))
    if not columns or sum(_num_bytes(column) for column in columns.values()) > most:
        return None
    from raggedright.ragged import join_alike  # needs torch

    joined = {name: join_alike(column) for name, column in columns.items()}
    found = {name: ragged for name, ragged in joined.items() if ragged is not None}
    return found if len(found) == len(joined) else None


def _num_bytes(column: Sequence[Any]) -> float:
    """Of vectors, which all have one type; infinite where they cannot be."""
    try:
        return sum(map(len, column)) * column[0].itemsize
    except (TypeError, AttributeError):  # no vectors, or numbers of no dims
        return inf


def _listing(sessions: Sessions, about: About, names: Sequence[tuple[str, ...] | frozenset[str]]) -> Listing:
    sets = {each: number for number, each in enumerate(dict.fromkeys(names))}
    set_of_row = np.fromiter(map(sets.__getitem__, names), dtype=np.int64, count=len(names))
    return Listing(sessions, about, set_of_row, [sorted(each) for each in sets])


def _unpickled(
    sessions: Sessions,
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
