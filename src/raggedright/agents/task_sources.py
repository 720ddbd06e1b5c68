"""Tasks of a run: from a JSONL or Parquet file, or made by a function; and which of them are in which round.

A file's tasks are shuffled again for every epoch. Rounds take them one after another, so a round may have the end of
one epoch and the beginning of the next. Invariants: an epoch has each task once; a round has no task twice; the tasks
of a round depend on (seed, round, batch_size) only. A function makes any number of tasks: task i is what it returns for
(i, seed).

With dynamic sampling a round draws as many tasks as it needs, from the place where the last round stopped (`draw`). The
task at a place of that sequence depends on (seed, most) only, and any `most` neighbours are different tasks.

Note: a round that spans two epochs must not have a task twice, so the tasks that it has from the first epoch move to
later places in the second.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np

from raggedright.agents.agent_session import Task
from raggedright.arrays import Ints
from raggedright.errors import ConfigError, RowsError
from raggedright.plugins import find_attribute
from raggedright.rows import parse_lines
from raggedright.sessions import is_text

Make = Callable[[int, int], Mapping[str, object]]


class Tasks(Protocol):
    """Where a run's tasks come from."""

    def check_enough(self, num_tasks: int, key: str) -> None:
        """A ConfigError unless this number of different tasks can be drawn; `key` is the config key."""
        ...

    def of_round(self, round: int, batch_size: int) -> list[Task]:
        """The tasks of a round; rounds count from 1."""
        ...

    def draw(self, start: int, count: int, *, batch_size: int, most: int) -> list[Task]:
        """The tasks from place `start` on, for rounds that draw at least `batch_size` and at most `most` in a row."""
        ...

    @property
    def num_different(self) -> int | None:
        """The number of tasks; None if it has no limit."""
        ...


def load_tasks(source: str, *, seed: int, key: str = "prompts.source") -> Tasks:
    """Tasks of a .jsonl or .parquet file, or of a "module:function" that takes (index, seed); `key` is for errors."""
    suffix = Path(source).suffix
    if suffix in (".jsonl", ".parquet"):
        if not Path(source).is_file():
            raise ConfigError(f"{key} is {source}, and there is no such file; give its path from {Path.cwd()}")
        lines = _jsonl(source) if suffix == ".jsonl" else _parquet(source)
        tasks = _named(lines)
        if not tasks:
            raise ConfigError(f"{key} is {source}, which has no tasks; one line or row is one task")
        return FileTasks(source, tasks, seed=seed)
    if ":" not in source:
        raise ConfigError(f"{key} is {source!r}; it takes a .jsonl or .parquet file, or 'module:function'")
    make = find_attribute(source, key=key)
    if not callable(make):
        raise ConfigError(f"{key} is {source!r}, a {type(make).__name__}; it takes a function of (index, seed)")
    try:
        signature(make).bind(0, seed)
    except TypeError as error:
        raise ConfigError(f"{key} is {source!r}: {error}; it takes a function of (index, seed)") from None
    return MadeTasks(source, cast(Make, make), seed=seed)


class MadeTasks:
    """Any number of tasks, made by a function."""

    def __init__(self, source: str, make: Make, *, seed: int) -> None:
        self._source, self._make, self._seed = source, make, seed

    def check_enough(self, num_tasks: int, key: str) -> None:
        """There are always enough; the first one is made, to check it."""
        self._task(0)

    def of_round(self, round: int, batch_size: int) -> list[Task]:
        """Tasks number round * batch_size and on."""
        return [self._task(round * batch_size + i) for i in range(batch_size)]

    def draw(self, start: int, count: int, *, batch_size: int, most: int) -> list[Task]:
        """Tasks number batch_size + start and on, so that the first place is the first task of the first round."""
        return [self._task(batch_size + start + i) for i in range(count)]

    @property
    def num_different(self) -> None:
        """No limit."""
        return None

    def _task(self, index: int) -> Task:
        data = self._make(index, self._seed)
        if not isinstance(data, Mapping):
            call = f"{self._source}({index}, {self._seed})"
            raise ConfigError(f"{call} returned a {type(data).__name__}; a task is a mapping")
        return Task(uid=str(index), data=data)


class FileTasks:
    """The tasks of a file, in a new order for every epoch."""

    def __init__(self, source: str, tasks: Sequence[Task], *, seed: int) -> None:
        self._source, self._tasks, self._seed = source, tasks, seed
        self._last: tuple[_Rule, int, Ints] | None = None  # the rule, an epoch, its order

    def check_enough(self, num_tasks: int, key: str) -> None:
        """All tasks of a file are different."""
        if num_tasks > len(self._tasks):
            raise ConfigError(
                f"{key} is {num_tasks:,} and {self._source} has {len(self._tasks):,} tasks; lower it, or add tasks"
            )

    def of_round(self, round: int, batch_size: int) -> list[Task]:
        """The next `batch_size` tasks of the epochs' orders."""
        self.check_enough(batch_size, "train.batch_size")
        return self._slice((round - 1) * batch_size, batch_size, _Rule(batch_size, is_window=False))

    def draw(self, start: int, count: int, *, batch_size: int, most: int) -> list[Task]:
        """The next tasks of the epochs' orders."""
        return self._slice(start, count, _Rule(most, is_window=True))

    @property
    def num_different(self) -> int:
        """The tasks of the file."""
        return len(self._tasks)

    def _slice(self, start: int, count: int, rule: "_Rule") -> list[Task]:
        epoch, first = divmod(start, len(self._tasks))
        order = self._order(epoch, rule)[first : first + count]
        rest = count - len(order)
        if rest:
            order = np.concatenate([order, self._order(epoch + 1, rule)[:rest]])
        return [self._tasks[i] for i in order.tolist()]

    def _order(self, epoch: int, rule: "_Rule") -> Ints:
        """The order of an epoch, which depends on the one before it; the last one is kept."""
        if self._last is None or self._last[0] != rule or self._last[1] > epoch:
            self._last = rule, 0, self._shuffled(0)
        _, known, order = self._last
        for number in range(known + 1, epoch + 1):
            order = _after(order, self._shuffled(number), rule.earliest(number * len(self._tasks)))
        self._last = rule, max(known, epoch), order
        return order

    def _shuffled(self, epoch: int) -> Ints:
        return np.random.default_rng([self._seed, epoch + 1]).permutation(len(self._tasks))


class _Rule(NamedTuple):
    """Which tasks must differ: those of each round of `size`, or any `size` neighbours."""

    size: int
    is_window: bool

    def earliest(self, start: int) -> Ints:
        """The first place in the epoch from `start` on that each of the last tasks before it may have."""
        if self.is_window:
            return np.arange(1, self.size)
        taken = start % self.size  # by the round that spans both epochs
        return np.full(taken, self.size - taken)


def _after(before: Ints, order: Ints, earliest: Ints) -> Ints:
    """The order, except that the last tasks of the epoch before come no earlier than allowed."""
    place = dict(zip(before[len(before) - len(earliest) :].tolist(), earliest.tolist(), strict=True))
    first: list[int] = []
    waiting: list[int] = []
    rest = iter(order.tolist())
    for position in range(int(earliest.max(initial=0))):
        task = next((task for task in waiting if place[task] <= position), None)
        if task is not None:
            waiting.remove(task)
        while task is None or place.get(task, 0) > position:
            waiting += [] if task is None else [task]
            task = next(rest)
        first.append(task)
    return np.array([*first, *waiting, *rest], dtype=np.int64)


def _jsonl(source: str) -> Iterator[tuple[str, object]]:
    with open(source, "rb") as lines:
        try:
            for where, record in parse_lines(lines, noun="task"):
                yield f"{source}, {where}", record
        except RowsError as error:
            raise ConfigError(f"{source}, {error}") from None


def _parquet(source: str) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        records = pyarrow.parquet.read_table(source).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{source}: not a Parquet file ({str(error).partition(chr(10))[0]}); write it again"
        ) from None
    yield from ((f"{source}, row {i}", record) for i, record in enumerate(records))


def _named(records: Iterator[tuple[str, object]]) -> list[Task]:
    """Tasks with a uid each: the field of that name, or the number of the task."""
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for where, record in records:
        if not isinstance(record, Mapping):
            raise ConfigError(f"{where}: a task is an object with fields, and this is a {type(record).__name__}")
        uid = record.get("uid", len(tasks))
        if isinstance(uid, bool) or not isinstance(uid, str | int) or not (is_text(uid := str(uid)) and uid):
            raise ConfigError(f"{where}: field uid is {uid!r:.60}; it takes text or an integer")
        if uid in places:
            raise ConfigError(f"{where}: field uid is {uid!r:.60}, as in {places[uid]}; give each task a different one")
        places[uid] = where
        tasks.append(Task(uid=uid, data=record))
    return tasks
