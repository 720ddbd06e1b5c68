"""Tasks of a run: from a file or folder, or made by a function or a package; and which of them are in which round.

The tasks of a file or folder are shuffled again for every epoch. Rounds take them one after another, so a round may
have the end of one epoch and the beginning of the next. Invariants: an epoch has each task once; a round has no task
twice; the tasks of a round depend on (seed, round, batch_size) only. A function or package makes any number of tasks:
task i is what it returns for (i, seed).

With dynamic sampling a round draws as many tasks as it needs, from the place where the last round stopped (`draw`). The
task at a place of that sequence depends on (seed, most) only, and any `most` neighbours are different tasks.

Note: a round that spans two epochs must not have a task twice, so the tasks that it has from the first epoch move to
later places in the second.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import numpy as np

from raggedright.agents import gym_tasks
from raggedright.agents.agent_session import Task
from raggedright.agents.dataset_folder import FolderRows, read_folder
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


def load_tasks(
    source: str,
    *,
    seed: int,
    options: Mapping[str, object] = MappingProxyType({}),
    held_out: bool = False,
    key: str = "prompts.source",
    options_key: str = "prompts.options",
) -> Tasks:
    """The tasks of a source with its options; the keys are those of the config, for errors.

    With `held_out` they are for evaluations: a package that makes tasks keeps some of them for this alone.
    """
    if source == gym_tasks.NAME:
        make = gym_tasks.GymTasks(options, held_out=held_out, key=key, options_key=options_key)
        return MadeTasks(source, make, seed=seed)
    if (is_folder := Path(source).is_dir()) or Path(source).suffix in (".jsonl", ".parquet"):
        tasks = _folder(source, options, key, options_key) if is_folder else _file(source, options, key, options_key)
        if not tasks:
            raise ConfigError(f"{key} is {source}, which has no tasks; one line or row is one task")
        return FileTasks(source, tasks, seed=seed)
    if ":" not in source:
        raise ConfigError(
            f"{key} is {source!r}; it takes a .jsonl or .parquet file, a folder of a Hugging "
            f"Face dataset, {gym_tasks.NAME}, or 'module:function'"
        )
    make = find_attribute(source, key=key)
    if not callable(make):
        raise ConfigError(f"{key} is {source!r}, a {type(make).__name__}; it takes a function of (index, seed)")
    try:
        signature(make).bind(0, seed, **options)
    except TypeError as error:
        takes = f"of (index, seed{', ' if options else ''}{', '.join(options)})"
        raise ConfigError(f"{key} is {source!r}: {error}; it takes a function {takes}") from None
    return MadeTasks(source, cast(Make, partial(make, **options) if options else make), seed=seed)


class MadeTasks:
    """Any number of tasks, made by a function."""

    def __init__(self, source: str, make: Make, *, seed: int) -> None:
        self._source, self._make, self._seed = source, make, seed

    def check_enough(self, num_tasks: int, key: str) -> None:
        """There are always enough; the first one is made, to check it."""
        self._task(0)

    def of_round(self, round: int, batch_size: int) -> list[Task]:
        """Tasks number round * batch_size and on; rounds count from 1, so the first batch_size tasks are never used."""
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
    """The tasks of a file or folder, in a new order for every epoch."""

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


def _file(source: str, options: Mapping[str, object], key: str, options_key: str) -> list[Task]:
    if not Path(source).is_file():
        raise ConfigError(f"{key} is {source}, and there is no such file; give its path from {Path.cwd()}")
    if options:
        raise ConfigError(f"{options_key} has {', '.join(options)} and {key} is a file, which takes none; remove it")
    return _named(_jsonl(source) if Path(source).suffix == ".jsonl" else _parquet(source))


def _folder(source: str, options: Mapping[str, object], key: str, options_key: str) -> FolderRows:
    tasks = read_folder(source, options, key=key, options_key=options_key)
    _check_uids((f"{source}, row {i}", uid) for i, uid in enumerate(tasks.uids))
    return tasks


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
    tasks: list[Mapping[str, object]] = []
    places: list[str] = []
    for where, record in records:
        if not isinstance(record, Mapping):
            raise ConfigError(f"{where}: a task is an object with fields, and this is a {type(record).__name__}")
        tasks.append(record)
        places.append(where)
    uids = _check_uids((where, task.get("uid", i)) for i, (where, task) in enumerate(zip(places, tasks, strict=True)))
    return [Task(uid=uid, data=task) for uid, task in zip(uids, tasks, strict=True)]


def _check_uids(given: Iterable[tuple[str, object]]) -> list[str]:
    """Uids as text; a ConfigError for one that is none, or that two tasks have."""
    places: dict[str, str] = {}
    for where, uid in given:
        if isinstance(uid, bool) or not isinstance(uid, str | int) or not (is_text(uid := str(uid)) and uid):
            raise ConfigError(f"{where}: field uid is {uid!r:.60}; it takes text or an integer")
        if uid in places:
            raise ConfigError(f"{where}: field uid is {uid!r:.60}, as in {places[uid]}; give each task a different one")
        places[uid] = where
    return [*places]
