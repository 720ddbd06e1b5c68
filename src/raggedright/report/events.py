"""events.jsonl, the diary of a run: one JSON object a line, appended as things happen, read by the report.

Reading is safe whoever wrote the file: JSON alone, sizes bounded, types checked. A last line without its end is what a
crash leaves, so it is left out; a line damaged in the middle is an error that names it. Events and keys that are not
ours are passed over.

The surprise: a run that resumes goes back to its last checkpoint. So a round that comes again replaces the one before,
and whatever the file said of later rounds is forgotten with it; a start after an end means that the run goes on.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, is_dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Generic, Protocol, TypeVar

import numpy as np

from raggedright.report.event_fields import EventsError, Fields
from raggedright.report.run_events import End, Eval, RoundEvent, RoundRows, RunEvents, Samples, Start

MOST_FILE_BYTES, MOST_LINE_BYTES = 4 << 30, 128 << 20
MOST_ROUNDS, MOST_PICTURES = 1_000_000, 16  # pictures: of all rows or samples, the first and the last ones are kept


class EventLog:
    """Appends events to a file, each whole on disk's way before `write` returns; a half line at its end is cut off."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 - it stays open as long as the run
        _mend_end(self._file)

    def write(self, event: str, **fields: object) -> None:
        """Append one event; fields take what JSON takes, and dataclasses, paths, numpy's numbers and arrays."""
        line = json.dumps({"event": event, **{name: _plain(value) for name, value in fields.items()}}, allow_nan=False)
        data = memoryview(line.encode() + b"\n")
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _mend_end(file: BinaryIO) -> None:
    """Make the file end with a whole line, so that the next one does not grow onto half of another."""
    size = file.seek(0, os.SEEK_END)
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        step = min(start, 1 << 16)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    rest = tail[tail.rfind(b"\n") + 1 :]
    if rest and _parse(rest) is None:
        file.truncate(size - len(rest))
    elif rest:
        file.write(b"\n")


def _plain(value: object) -> object:
    """A value as JSON takes it."""
    if not isinstance(value, float) and isinstance(value, np.ndarray | np.generic):  # most are floats
        value = value.tolist()
    if isinstance(value, float):
        return (
            value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        )
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, PathLike):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        value = sorted(value, key=repr)
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"an event holds {value!r:.60}, a {type(value).__name__}; it takes what JSON takes")


class _Numbered(Protocol):
    @property
    def round(self) -> int: ...


E = TypeVar("E", bound=_Numbered)


class _ByRound(Generic[E]):
    """Events in the order of their rounds; one that comes again takes the place of all from there on."""

    def __init__(self, most: int = MOST_ROUNDS, *, keep_ends: bool = False) -> None:
        self.events: dict[int, E] = {}
        self.most, self.keep_ends = most, keep_ends

    def add(self, event: E) -> bool:
        """Whether the run has gone back to an earlier round."""
        back = self.forget_from(event.round)
        if len(self.events) >= self.most:
            if not self.keep_ends:
                raise EventsError(f"there are more than {self.most:,} rounds, which is more than a report holds")
            del self.events[list(self.events)[1]]
        self.events[event.round] = event
        return back

    def forget_from(self, number: int) -> bool:
        """Drop the events of this round and of later ones; whether there was one."""
        before = len(self.events)
        while self.events and next(reversed(self.events)) >= number:
            self.events.popitem()
        return len(self.events) < before

    def all(self) -> tuple[E, ...]:
        return tuple(self.events.values())


def read_events(path: str | PathLike[str]) -> RunEvents:
    """All that a file says of a run; a file that is missing, too large or damaged is an error in a sentence."""
    start: Start | None = None
    end: End | None = None
    rounds, evals = _ByRound[RoundEvent](), _ByRound[Eval]()
    rows, samples = _ByRound[RoundRows](MOST_PICTURES, keep_ends=True), _ByRound[Samples](MOST_PICTURES, keep_ends=True)
    for where, event in _lines(Path(path)):
        fields = Fields(where, event)
        match event.get("event"):
            case "start":
                start, end = Start.of(fields), None
            case "round":
                round = RoundEvent.of(fields)
                if _named(where, rounds.add, round):
                    for others in (rows, samples, evals):  # those of this round may stand before it
                        others.forget_from(round.round + 1)
            case "rows":
                rows.add(RoundRows.of(fields))
            case "samples":
                samples.add(Samples.of(fields))
            case "eval":
                _named(where, evals.add, Eval.of(fields))
            case "end":
                end = End.of(fields)
            case _:
                pass
    return RunEvents(
        start=start, rounds=rounds.all(), rows=rows.all(), samples=samples.all(), evals=evals.all(), end=end
    )


def _named(where: str, add: Callable[[E], bool], event: E) -> bool:
    try:
        return add(event)
    except EventsError as error:
        raise EventsError(f"{where}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Each whole line's place and object."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise EventsError(f"{path}: {error.strerror}; a run writes its events there") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_FILE_BYTES:
            raise EventsError(f"{path}: {size:,} bytes, and a report reads at most {MOST_FILE_BYTES:,}")
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MOST_LINE_BYTES:
                raise EventsError(f"{where}: more than {MOST_LINE_BYTES:,} bytes; an event is one line of JSON")
            event = _parse(line)
            if event is not None:
                yield where, event
            elif line.strip() and line.endswith(b"\n"):
                raise EventsError(f"{where}: {line[:40]!r} is not a JSON object; mend or remove that line")


def _parse(line: bytes) -> Mapping[str, object] | None:
    """The object on a line, or None."""
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
