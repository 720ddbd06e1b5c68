# pyright: reportMissingImports=false
"""Which sessions a run has: the one place that decides what is visible in a store on TransferQueue.

It lives in a Ray actor, `RaggedRightSessions`, one for all runs. TransferQueue carries the tensors; a session exists
when it is in here. A write begins here (is it allowed? which columns does it go to?), goes to TransferQueue, and is
committed here in one step, so that nobody sees half of it. Nothing is ever written over: a repeated update goes to
columns of its own, and a key has the write's number in it.

The surprise: deleting waits for writers. TransferQueue gives a cleared row's index to the next one, so a late write
would land in somebody else's row; a deleted round is out of sight at once, and is cleared when no write to it is under
way. A writer that was killed holds a round back until its lease is over.

It keeps all in memory and is not restarted: when it dies, nothing says any more which rows are whole, every call is a
StoreError, and the run starts a new store from its last checkpoint.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from raggedright.store.checks import (
    check_can_become,
    check_replaced,
    check_types,
    field_missing,
    not_final,
    round_deleted,
    row_missing,
)
from raggedright.store.encoding import Encoded
from raggedright.store.protocol import Key, SessionKey, State, StoreError, Tag


class Column(NamedTuple):
    """Where a field's value is: the type it has for its user, how it is stored (`float32.1`, `encoded`), the column."""

    type: str
    kind: str
    name: str = ""


Layout = dict[str, Column]  # of a row's fields; shared by all rows that are alike
About = tuple[int, int, int, bool, Mapping[str, Tag]]  # prompt, response and loss tokens, is_padding, tags
Listed = tuple[SessionKey, State, str, float | None, list[tuple[About, int]]]  # a row has its layout's number
Listing = tuple[list[Listed], list[list[str]]]  # and the layouts' field names


_Merged = dict[tuple[int, int, int], Layout]


@dataclass(slots=True)
class Row:
    """A row's counts and tags, where its fields are, the write that made it, and the columns it ever wrote to."""

    about: About
    layout: Layout
    write: int
    written: frozenset[str]


@dataclass(slots=True)
class Session:
    """What a listing says of a session, with its rows."""

    key: SessionKey
    state: State
    cause: str
    score: float | None
    rows: list[Row]


@dataclass(slots=True)
class Round:
    """A round's sessions, the types of its fields, and its columns with the field and kind that each is for."""

    sessions: dict[SessionKey, Session] = field(default_factory=dict)
    last: dict[tuple[str, int], Session] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    columns: dict[str, tuple[str, str]] = field(default_factory=dict)
    layouts: dict[tuple, Layout] = field(default_factory=dict)  # one object for all rows that are alike
    in_queue: bool = False  # whether TransferQueue has anything of it


@dataclass(slots=True)
class Write:
    """A write under way: until when, to which rounds, with which types, and what it makes visible."""

    until: float
    types: dict[int, dict[str, str]]
    session: Session | None = None
    updates: dict[Key, Layout] = field(default_factory=dict)
    given_up: bool = False


class Run:
    """The sessions of one run. Methods do not await, so each is one step for all who call."""

    def __init__(self) -> None:
        self.watermark = -1
        self.rounds: dict[int, Round] = {}
        self.writes: dict[int, Write] = {}
        self.doomed: set[int] = set()
        self.count = 0
        self.changed = asyncio.Event()

    def put(
        self, key: SessionKey, state: State, cause: str, score: float | None, rows: Sequence[tuple[About, Layout]],
        lease: float,
    ) -> tuple[int, list[Layout]]:  # fmt: skip
        """Begin a put; one without rows is done with this. The write's number, and the rows' columns."""
        self._check_round(key, key.round)
        round = self.rounds.setdefault(key.round, Round())
        before = round.sessions.get(key)
        check_can_become(key, before.state if before else None, state)
        if any(w.session and w.session.key == key and not w.given_up for w in self._alive()):
            raise StoreError(f"{key}: another writer is putting it; put a run of its own under the next attempt")
        types = self._agree(key.round, ((Key(*key, i), layout) for i, (_, layout) in enumerate(rows)))
        self.count += 1
        shared: dict[int, Layout] = {}
        for _, layout in rows:
            if id(layout) not in shared:
                shared[id(layout)] = self._place(round, layout, frozenset())
        layouts = [shared[id(layout)] for _, layout in rows]
        made = [
            Row(about, layout, self.count, frozenset(column.name for column in layout.values()))
            for (about, _), layout in zip(rows, layouts, strict=True)
        ]
        write = Write(monotonic() + lease, {key.round: types}, Session(key, state, cause, score, made))
        self.writes[self.count] = write
        round.in_queue |= bool(rows)
        if not rows:
            self.commit(self.count)
        return self.count, layouts

    def update(self, values: Mapping[Key, Layout], lease: float) -> tuple[int, list[tuple[int, Layout, Layout]]]:
        """Begin an update. Its number; of each row the write that made it, the new columns, and all its columns."""
        rows = [self._row(key) for key in values]
        for (key, layout), row in zip(values.items(), rows, strict=True):
            for name in layout.keys() & row.layout.keys():
                check_replaced(key, name, row.layout[name].type, layout[name].type)
        rounds = sorted({key.round for key in values})
        types = {n: self._agree(n, ((k, layout) for k, layout in values.items() if k.round == n)) for n in rounds}
        self.count += 1
        write = Write(monotonic() + lease, types)
        placed: dict[tuple[int, int, frozenset[str]], tuple[Layout, frozenset[str]]] = {}
        merged: _Merged = {}
        answer = []
        for (key, layout), row in zip(values.items(), rows, strict=True):
            alike = key.round, id(layout), row.written
            if alike not in placed:
                new = self._place(self.rounds[key.round], layout, row.written)
                placed[alike] = new, row.written | {column.name for column in new.values()}
            new, row.written = placed[alike]
            write.updates[key] = new
            answer.append((row.write, new, self._merge(merged, key.round, row.layout, new)))
        self.writes[self.count] = write
        return self.count, answer

    def commit(self, number: int) -> None:
        """Make a write visible."""
        write = self.writes.get(number)
        for round in write.types if write else ():
            self._check_round(f"round {round}", round)
        if write is None or write.given_up:
            raise StoreError(f"write {number} took longer than its lease, so nothing was put; put the next attempt")
        for number_, types in write.types.items():
            self.rounds[number_].types.update(types)
        if write.session:
            self._show(write.session)
        merged: _Merged = {}
        for key, new in write.updates.items():
            row = self._row(key)
            row.layout = self._merge(merged, key.round, row.layout, new)
        del self.writes[number]
        self.changed.set()
        self.changed = asyncio.Event()

    def abort(self, number: int, ended: bool) -> list[int]:
        """Give a write up; unless it has `ended` it may still arrive, and holds back its round. Rounds to clear."""
        write = self.writes.get(number)
        if write and ended:
            del self.writes[number]
        elif write:
            write.given_up = True
        return self._to_clear()

    def locate(
        self, keys: Sequence[Key], fields: Sequence[str]
    ) -> tuple[list[tuple[int, int]], list[tuple[Column, ...]]]:
        """Of each row the write that made it and the number of its columns' list; these lists."""
        found, numbers, by_layout = [], {}, {}
        for key in keys:
            row = self._row(key)
            number = by_layout.get(id(row.layout))
            if number is None:
                for name in fields:
                    if name not in row.layout:
                        raise field_missing(key, name)
                columns = tuple(row.layout[name] for name in fields)
                number = by_layout[id(row.layout)] = numbers.setdefault(columns, len(numbers))
            found.append((row.write, number))
        return found, [*numbers]

    def check_rounds(self, rounds: Iterable[int]) -> None:
        """Refuse rounds that were deleted meanwhile: what was read of them may be another's."""
        for round in rounds:
            self._check_round(f"round {round}", round)

    def listing(self, round: int | None, prompt: str | None, session: int | None, state: State | None) -> Listing:
        """Sessions that match, in the order of their keys, and the field names of the layouts."""
        rounds = self.rounds.values() if round is None else [self.rounds.get(round, Round())]
        return _listing(
            found
            for each in rounds
            for key, found in each.sessions.items()
            if (prompt is None or key.prompt == prompt)
            and (session is None or key.session == session)
            and (state is None or found.state == state)
        )

    def delete(self, round: int) -> list[int]:
        """Forget a round and those before it. The rounds to clear, each told to one caller only."""
        self.watermark = max(self.watermark, round)
        for number in [n for n in self.rounds if n <= self.watermark]:
            if self.rounds.pop(number).in_queue:
                self.doomed.add(number)
        self.changed.set()
        self.changed = asyncio.Event()
        return self._to_clear()

    async def wait(self, round: int, wanted: Sequence[tuple[str, int]], timeout: float) -> Listing:
        """The last attempt of each of these pairs, once all are finished or failed."""
        until = monotonic() + timeout
        left: Sequence[tuple[str, int]] = wanted
        while True:
            if wanted:
                self._check_round(f"round {round}", round)
            last = self.rounds.get(round, Round()).last
            left = _not_final(last, left) or _not_final(last, wanted)
            if not left:
                return _listing(last[pair] for pair in wanted)
            seconds = until - monotonic()
            if seconds <= 0:
                raise not_final(round, wanted, {pair: last[pair].state for pair in wanted if pair in last}, timeout)
            try:
                await asyncio.wait_for(self.changed.wait(), seconds)
            except TimeoutError:
                continue

    def _alive(self) -> list[Write]:
        now = monotonic()
        self.writes = {number: write for number, write in self.writes.items() if write.until > now}
        return [*self.writes.values()]

    def _to_clear(self) -> list[int]:
        busy = {round for write in self._alive() for round in write.types}
        free, self.doomed = self.doomed - busy, self.doomed & busy
        return sorted(free)

    def _check_round(self, what: object, round: int) -> None:
        if round <= self.watermark:
            raise round_deleted(str(what), self.watermark)

    def _row(self, key: Key) -> Row:
        round = self.rounds.get(key.round)
        found = round.sessions.get(key.of_session) if round else None
        if found is None or not 0 <= key.trajectory < len(found.rows):
            raise row_missing(key, found.state if found else None, self.watermark)
        return found.rows[key.trajectory]

    def _agree(self, round: int, rows: Iterable[tuple[Key, Layout]]) -> dict[str, str]:
        types = dict(self.rounds[round].types)
        for write in self._alive():
            if not write.given_up:
                types.update(write.types.get(round, {}))
        names: set[str] = set()
        for key, layout in rows:
            check_types(types, key, {name: Encoded(column.type, b"") for name, column in layout.items()})
            names |= layout.keys()
        return {name: types[name] for name in names & types.keys()}

    def _place(self, round: Round, layout: Layout, taken: frozenset[str]) -> Layout:
        """A field's column has its name if the kind is the first of the round and the row never wrote there."""
        placed = {}
        for name, (type_, kind, _) in layout.items():
            column = name
            if round.columns.setdefault(column, (name, kind)) != (name, kind):
                column = f"{name}@{kind}"
            if column in taken:
                column = f"{column}@{self.count}"
            while round.columns.setdefault(column, (name, kind)) != (name, kind):
                column += "@"
            placed[name] = Column(type_, kind, column)
        return round.layouts.setdefault(tuple(placed.items()), placed)

    def _merge(self, merged: _Merged, round: int, old: Layout, new: Layout) -> Layout:
        """Both in one, the same object for the same two; the round keeps all layouts, so no id comes again."""
        both = merged.get((round, id(old), id(new)))
        if both is None:
            whole = {**old, **new}
            both = merged[round, id(old), id(new)] = self.rounds[round].layouts.setdefault(tuple(whole.items()), whole)
        return both

    def _show(self, session: Session) -> None:
        round, pair = self.rounds[session.key.round], (session.key.prompt, session.key.session)
        round.sessions[session.key] = session
        if pair not in round.last or round.last[pair].key.attempt <= session.key.attempt:
            round.last[pair] = session


class Sessions:
    """The actor: a Run by name."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}

    async def call(self, run: str, method: str, *args: object, **named: object) -> object:
        """Call a run's method; `wait` waits without holding up the others."""
        answer = getattr(self.runs.setdefault(run, Run()), method)(*args, **named)
        return await answer if asyncio.iscoroutine(answer) else answer


def _not_final(last: Mapping[tuple[str, int], Session], pairs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [pair for pair in pairs if pair not in last or last[pair].state == "running"]


def _listing(sessions: Iterable[Session]) -> Listing:
    numbers: dict[int, int] = {}
    names: list[list[str]] = []
    listed = []
    for session in sorted(sessions, key=lambda session: session.key):
        rows = []
        for row in session.rows:
            number = numbers.setdefault(id(row.layout), len(names))
            if number == len(names):
                names.append([*row.layout])
            rows.append((row.about, number))
        listed.append((session.key, session.state, session.cause, session.score, rows))
    return listed, names
