"""Which sessions a run has: the one place that decides what is visible in a store on TransferQueue.

It lives in a Ray actor, `RaggedRightSessions`, one for all runs. TransferQueue carries the tensors; a session exists
when it is in here. A write begins here (is it allowed? which columns does it go to?), goes to TransferQueue, and is
committed here in one step, so that nobody sees half of it. Nothing is ever written over: a repeated update goes to
columns of its own, and a key has the write's number in it.

The surprise: deleting waits for writers. TransferQueue gives a cleared row's index to the next one, so a late write
would land in somebody else's row; a deleted round is out of sight at once, and is cleared when no write to it is under
way. A writer that was killed holds a round back until its lease is over.

It keeps all in memory and is not restarted: when it dies, nothing says any more which rows are whole, every call is a
StoreError, and the run starts a new store from its last checkpoint. It imports no torch, so it starts fast.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from raggedright.store.checks import (
    check_can_become,
    check_replaced,
    field_missing,
    not_final,
    round_deleted,
    row_missing,
)
from raggedright.store.listing import About, Listing
from raggedright.store.protocol import Key, SessionKey, State, StoreError
from raggedright.store.ray_round import Column, RowColumns, StoredRound, StoredRow, StoredSession, listing


@dataclass(slots=True)
class Write:
    """A write under way: until when, to which rounds, with which types, and what it makes visible."""

    until: float
    types: dict[int, dict[str, str]]
    session: StoredSession | None = None
    updates: dict[Key, RowColumns] = field(default_factory=dict)
    given_up: bool = False


class Run:
    """The sessions of one run. Methods do not await, so each is one step for all who call."""

    def __init__(self) -> None:
        self.watermark = -1
        self.rounds: dict[int, StoredRound] = {}
        self.writes: dict[int, Write] = {}
        self.doomed: set[int] = set()
        self.count = 0
        self.changed = asyncio.Event()

    def put(
        self, key: SessionKey, state: State, cause: str, score: float | None, about: About,
        columns: Sequence[RowColumns], lease: float,
    ) -> tuple[int, list[RowColumns]]:  # fmt: skip
        """Begin a put; one without rows is done with this. The write's number, and the rows' columns."""
        self._check_round(key, key.round)
        round = self.rounds.setdefault(key.round, StoredRound())
        before = round.sessions.get(key)
        check_can_become(key, before.state if before else None, state)
        if any(w.session and w.session.key == key and not w.given_up for w in self._alive()):
            raise StoreError(f"{key}: another writer is putting it; put a run of its own under the next attempt")
        types = self._agree(key.round, ((Key(*key, i), each) for i, each in enumerate(columns)))
        self.count += 1
        alike = {id(each): each for each in columns}
        shared = {i: round.place(each, frozenset(), self.count) for i, each in alike.items()}
        placed = [shared[id(each)] for each in columns]
        written = {id(each): frozenset(column.name for column in each.values()) for each in shared.values()}
        rows = [StoredRow(each, self.count, written[id(each)]) for each in placed]
        write = Write(monotonic() + lease, {key.round: types}, StoredSession(key, state, cause, score, about, rows))
        self.writes[self.count] = write
        round.in_queue |= bool(rows)
        if not rows:
            self.commit(self.count)
        return self.count, placed

    def puts(
        self, sessions: Sequence[tuple[SessionKey, State, str, float | None, About, Sequence[RowColumns]]], lease: float
    ) -> list[tuple[int, list[RowColumns]]]:
        """Begin several puts, in this order: all of them, or those that have rows not at all."""
        begun: list[tuple[int, list[RowColumns]]] = []
        try:
            for session in sessions:
                begun.append(self.put(*session, lease))
        except StoreError:
            self.abort([number for number, _ in begun], ended=True)
            raise
        return begun

    def update(
        self, values: Mapping[Key, RowColumns], lease: float
    ) -> tuple[int, list[tuple[int, RowColumns, RowColumns]]]:
        """Begin an update. Its number; of each row the write that made it, the new columns, and all its columns."""
        rows = [self._row(key) for key in values]
        for (key, row_columns), row in zip(values.items(), rows, strict=True):
            for name in row_columns.keys() & row.columns.keys():
                check_replaced(key, name, row.columns[name].type, row_columns[name].type)
        rounds = sorted({key.round for key in values})
        types = {n: self._agree(n, ((k, new) for k, new in values.items() if k.round == n)) for n in rounds}
        self.count += 1
        write = Write(monotonic() + lease, types)
        placed: dict[tuple[int, int, frozenset[str]], tuple[RowColumns, frozenset[str]]] = {}
        merged: dict[int, dict[tuple[int, int], RowColumns]] = {n: {} for n in rounds}
        answer = []
        for (key, row_columns), row in zip(values.items(), rows, strict=True):
            alike, round = (key.round, id(row_columns), row.written), self.rounds[key.round]
            if alike not in placed:
                new = round.place(row_columns, row.written, self.count)
                placed[alike] = new, row.written | {column.name for column in new.values()}
            new, row.written = placed[alike]
            write.updates[key] = new
            answer.append((row.write, new, round.merge(merged[key.round], row.columns, new)))
        self.writes[self.count] = write
        return self.count, answer

    def commits(self, numbers: Sequence[int]) -> None:
        """Make several writes visible."""
        for number in numbers:
            self.commit(number)

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
            self.rounds[write.session.key.round].show(write.session)
        merged: dict[int, dict[tuple[int, int], RowColumns]] = {n: {} for n in write.types}
        for key, new in write.updates.items():
            row = self._row(key)
            row.columns = self.rounds[key.round].merge(merged[key.round], row.columns, new)
        del self.writes[number]
        self.changed.set()
        self.changed = asyncio.Event()

    def abort(self, numbers: Sequence[int], ended: bool) -> list[int]:
        """Give writes up; unless they have `ended` they may still arrive, and hold back a round. Rounds to clear."""
        for number in numbers:
            if ended:
                self.writes.pop(number, None)
            elif number in self.writes:
                self.writes[number].given_up = True
        return self._to_clear()

    def give_up_writes(self) -> list[int]:
        """Give up all writes; what their writers sent may still arrive. Rounds to clear."""
        for write in self._alive():
            write.given_up = True
        return self._to_clear()

    def locate(
        self, keys: Sequence[tuple], fields: Sequence[str]
    ) -> tuple[list[int], list[int], list[tuple[Column, ...]]]:
        """The writes that made these rows; the numbers of their columns' lists; these lists."""
        writes, numbers = [], []
        lists: dict[tuple[Column, ...], int] = {}
        by_columns: dict[int, int] = {}
        for key in keys:
            row = self._row(key)
            number = by_columns.get(id(row.columns))
            if number is None:
                for name in fields:
                    if name not in row.columns:
                        raise field_missing(Key(*key), name)
                columns = tuple([row.columns[name] for name in fields])
                number = by_columns[id(row.columns)] = lists.setdefault(columns, len(lists))
            writes.append(row.write)
            numbers.append(number)
        return writes, numbers, [*lists]

    def check_rounds(self, rounds: Iterable[int]) -> None:
        """Refuse rounds that were deleted meanwhile: what was read of them may be another's."""
        for round in rounds:
            self._check_round(f"round {round}", round)

    def listing(self, round: int | None, prompt: str | None, session: int | None, state: State | None) -> Listing:
        """Sessions that match, in the order of their keys, and the field names of their rows."""
        rounds = self.rounds.values() if round is None else [self.rounds.get(round, StoredRound())]
        return listing(
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
            here = self.rounds.get(round, StoredRound())
            left = here.not_final(left) or here.not_final(wanted)
            if not left:
                return listing(here.last[pair] for pair in wanted)
            seconds = until - monotonic()
            if seconds <= 0:
                states = {pair: here.last[pair].state for pair in wanted if pair in here.last}
                raise not_final(round, wanted, states, timeout)
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

    def _row(self, key: tuple) -> StoredRow:
        round = self.rounds.get(key[0])
        found = round.sessions.get(key[:4]) if round else None  # type: ignore[call-overload] # equal to a SessionKey
        if found is None or not 0 <= key[4] < len(found.rows):
            raise row_missing(Key(*key), found.state if found else None, self.watermark)
        return found.rows[key[4]]

    def _agree(self, round: int, rows: Iterable[tuple[Key, RowColumns]]) -> dict[str, str]:
        """The types of these rows' fields, which agree with the round's and with those of writes under way."""
        types: dict[str, str] = {}
        for write in self._alive():
            if not write.given_up:
                types.update(write.types.get(round, {}))
        return self.rounds[round].agree(types, rows)


class Sessions:
    """The actor: a Run by name. Whoever made it starts TransferQueue; those who found it wait until that is done."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.started = asyncio.Event()

    async def call(self, run: str, method: str, *args: object, **named: object) -> object:
        """Call a run's method; `wait` waits without holding up the others."""
        answer = getattr(self.runs.setdefault(run, Run()), method)(*args, **named)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def set_started(self) -> None:
        """Say that TransferQueue is there."""
        self.started.set()

    async def wait_started(self) -> None:
        """Return once TransferQueue is there."""
        await self.started.wait()
