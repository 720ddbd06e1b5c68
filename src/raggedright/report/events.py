"""The events of a run: their models, and writing and reading events.jsonl, which has one JSON object per line.

Every key except the number of a round is optional, unknown keys and events are ignored, and null means "not given", so
files of other versions stay readable. Numbers that JSON cannot express are the strings NaN, Infinity and -Infinity.

Reading is safe for files from anywhere: it parses JSON only, and limits sizes. An incomplete last line, as a crash
leaves it, is ignored; a damaged line in the middle is an error that names the line.

Note: a resumed run continues from its last checkpoint. A round that is recorded again therefore replaces the earlier
record and everything that the file says about later rounds, and a start after an end means that the run continued.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from raggedright.errors import ConfigError, RaggedRightError, RowsError
from raggedright.files import check_kind, sync
from raggedright.plan.layout import Layout
from raggedright.rows import Rows

EVENTS_FILE = "events.jsonl"
MAX_FILE_BYTES, MAX_LINE_BYTES = 4 << 30, 16 << 20  # parsed JSON needs up to 30 times its size in memory
MAX_ROUNDS = 1_000_000
MAX_PICTURES = 16  # of all rows and samples events, the first one and the last ones are kept
MAX_WARNINGS = 1_000  # the last ones are kept
MAX_NAMES, MAX_FAILURES, MAX_SAMPLES, MAX_TRAJECTORIES = 1000, 100, 100, 1024  # per event; the rest is ignored
COLUMNS = ("prompt", "session", "trajectory", "prompt_tokens", "response_tokens", "loss_tokens")


class EventsError(RaggedRightError):
    """An events file, or one of its lines, is invalid."""


def _number(value: object) -> object:
    """Null is NaN, and an integer that is too large for a float is infinite."""
    if value is None:
        return math.nan
    return float(str(int(value))) if isinstance(value, int) else value


def _named(values: object) -> object:
    """The first entries of an object without nulls; names repeat in every round, so each is stored once."""
    if not isinstance(values, Mapping):
        return values
    return {sys.intern(str(name)): value for name, value in islice(values.items(), MAX_NAMES) if value is not None}


def _first(count: int) -> BeforeValidator:
    return BeforeValidator(lambda items: items[:count] if isinstance(items, list | tuple) else items)


def _rows(columns: object) -> object:
    """Rows from their columns; a missing column is empty, and without loss_tokens all response tokens have loss."""
    if not isinstance(columns, Mapping):
        return columns
    values = {name: columns.get(name) or [] for name in COLUMNS if name in columns or name != "loss_tokens"}
    for name, column in values.items():
        if not isinstance(column, list):
            raise RowsError(f"{name} is {column!r:.40}; it should be a list")
    return Rows.from_columns(**values)


Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Number = Annotated[float, BeforeValidator(_number)]
Numbers = Annotated[dict[str, Number], BeforeValidator(_named)]
Counts = Annotated[dict[str, Count], BeforeValidator(_named)]
RowsField = Annotated[
    InstanceOf[Rows],
    BeforeValidator(_rows),
    PlainSerializer(lambda rows: {name: getattr(rows, name).tolist() for name in COLUMNS}),
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class WorldInfo(_Model):
    """The processes of a run."""

    dp: Count | None = None
    device: str = ""


class StartEvent(_Model):
    """What was run; `resumed_from` is the last round of the checkpoint that the run continued from."""

    event: Literal["start"] = "start"
    time: str = ""
    version: str = ""
    config: dict[str, object] = {}
    layout: Layout | None = None
    num_parameters: Count | None = None
    resumed_from: Count = 0
    sessions_found: Count = 0
    world: WorldInfo = WorldInfo()


class Failure(_Model):
    """A session that ended without rows."""

    prompt: str = ""
    session: Count = 0
    cause: str = ""


class LedgerCounts(_Model):
    """Sessions and rows by outcome; `reused_sessions` were in the store when the run resumed."""

    sessions: Counts = {}
    rows: Counts = {}
    reused_sessions: Count = 0


class RoundEvent(_Model):
    """A round: its metrics, the outcomes of its sessions and rows, and its seconds by part."""

    event: Literal["round"] = "round"
    round: Count
    metrics: Numbers = {}
    rows: Count | None = None
    padding_rows: Count | None = None
    sessions: Count | None = None
    optimizer_steps: Count | None = None
    skipped_steps: Count | None = None
    ledger: LedgerCounts = LedgerCounts()
    failed: Annotated[tuple[Failure, ...], _first(MAX_FAILURES)] = ()
    seconds: Numbers = {}


class RowsEvent(_Model):
    """The rows of a round and the layout they were planned with, from which the plan can be made again."""

    event: Literal["rows"] = "rows"
    round: Count
    rows: RowsField = Field(default={}, validate_default=True, alias="columns")
    layout: Layout | None = None


class SampledTrajectory(_Model):
    """A trajectory with its tokens; mask, advantages and log-probs are those of the response."""

    role: str = ""
    reward: Number | None = None
    tokens: tuple[str, ...] = ()
    prompt_tokens: Count = 0
    mask: tuple[Number, ...] = ()
    advantages: tuple[Number, ...] = ()
    log_probs: tuple[Number, ...] = ()
    finish_reason: str = ""


class SampledSession(_Model):
    """A session with all of its tokens."""

    prompt: str = ""
    session: Count = 0
    score: Number | None = None
    task: dict[str, object] = {}
    trajectories: Annotated[tuple[SampledTrajectory, ...], _first(MAX_TRAJECTORIES)] = ()


class SamplesEvent(_Model):
    """A few sessions of a round."""

    event: Literal["samples"] = "samples"
    round: Count
    sessions: Annotated[tuple[SampledSession, ...], _first(MAX_SAMPLES)] = ()


class EvalEvent(_Model):
    """An evaluation after a round."""

    event: Literal["eval"] = "eval"
    round: Count
    metrics: Numbers = {}


class WarningEvent(_Model):
    """A problem in the rounds from `first_round` to `round`; a later warning of the same kind may extend it."""

    event: Literal["warning"] = "warning"
    round: Count
    first_round: Count | None = None
    kind: str = ""
    text: str = ""


class EndEvent(_Model):
    """How the run ended."""

    event: Literal["end"] = "end"
    time: str = ""
    rounds: Count | None = None
    reason: str = ""
    seconds: Number | None = None


Event = StartEvent | RoundEvent | RowsEvent | SamplesEvent | EvalEvent | WarningEvent | EndEvent
MODELS: Mapping[object, type[Event]] = {model.model_fields["event"].default: model for model in get_args(Event)}


class EventLog:
    """Appends events to a file; an incomplete line at its end is removed first."""

    def __init__(self, path: str | PathLike[str]) -> None:
        check_kind(Path(path))
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._file: BinaryIO = open(os.open(path, flags, 0o666), "a+b", buffering=0)  # noqa: SIM115 - open during the run
        try:
            _repair_end(self._file)
            sync(Path(path).parent)
        except BaseException:
            self._file.close()
            raise

    def write(self, event: Event) -> bool:
        """Append one event and pass it to the operating system.

        An event that is longer than a reader accepts, such as the rows of a huge round, is not written: False.
        """
        values = json.loads(json.dumps(event.model_dump(by_alias=True)), parse_constant=str)  # NaN becomes "NaN"
        data = memoryview(json.dumps(values).encode() + b"\n")
        if len(data) > MAX_LINE_BYTES:
            return False
        while data:
            data = data[self._file.write(data) :]
        return True

    def sync(self) -> None:
        """Wait until every event is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _repair_end(file: BinaryIO) -> None:
    """Make the file end with a complete line, so that the next event starts on a line of its own."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - MAX_LINE_BYTES, 0))
    last_line = file.read(MAX_LINE_BYTES).rpartition(b"\n")[2]
    if last_line and _json_object(last_line) is None:
        file.truncate(size - len(last_line))
    elif last_line:
        file.write(b"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvents:
    """A whole run, events in the order of their rounds; `end` is None while it runs and after a crash."""

    start: StartEvent | None = None
    rounds: tuple[RoundEvent, ...] = ()
    rows: tuple[RowsEvent, ...] = ()
    samples: tuple[SamplesEvent, ...] = ()
    evals: tuple[EvalEvent, ...] = ()
    warnings: tuple[WarningEvent, ...] = ()
    end: EndEvent | None = None


E = TypeVar("E")


def read_events(path: str | PathLike[str]) -> RunEvents:
    """All events of a run; a file that is missing, too large or damaged is an error."""
    start: StartEvent | None = None
    end: EndEvent | None = None
    rounds: dict[int, RoundEvent] = {}
    rows: dict[int, RowsEvent] = {}
    samples: dict[int, SamplesEvent] = {}
    evals: dict[int, EvalEvent] = {}
    warnings: list[WarningEvent] = []
    for where, line in _lines(Path(path)):
        match event := parse_event(where, line):
            case StartEvent():
                start, end = event, None
            case RoundEvent():
                if _discard_from(rounds, event.round):
                    _discard_from(rows, event.round + 1)  # the rows of this round may precede it in the file
                    _discard_from(samples, event.round + 1)
                    _discard_from(evals, event.round + 1)
                    warnings = [each for each in warnings if each.round < event.round]
                rounds[event.round] = event
            case RowsEvent():
                _keep_ends(rows, event.round, event)
            case SamplesEvent():
                _keep_ends(samples, event.round, event)
            case EvalEvent():
                _discard_from(evals, event.round)
                evals[event.round] = event
            case WarningEvent():
                warnings = [*warnings[1 - MAX_WARNINGS :], event]
            case EndEvent():
                end = event
        if max(len(rounds), len(evals)) > MAX_ROUNDS:
            raise EventsError(f"{where}: the file has more than {MAX_ROUNDS:,} rounds, the most that a report can show")
    return RunEvents(
        start=start,
        rounds=tuple(rounds.values()),
        rows=tuple(rows.values()),
        samples=tuple(samples.values()),
        evals=tuple(evals.values()),
        warnings=tuple(warnings),
        end=end,
    )


def _discard_from(events: dict[int, E], number: int) -> bool:
    """Remove the events of this round and of later ones; whether there were any."""
    count = len(events)
    while events and next(reversed(events)) >= number:
        events.popitem()
    return len(events) < count


def _keep_ends(events: dict[int, E], number: int, event: E) -> None:
    """Add an event, and remove the second one if there are too many."""
    _discard_from(events, number)
    if len(events) >= MAX_PICTURES:
        del events[list(events)[1]]
    events[number] = event


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line that is complete, with its place for error messages."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise EventsError(f"{path}: {error.strerror}; a run writes its events there") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise EventsError(f"{path}: the file has {size:,} bytes; a report reads at most {MAX_FILE_BYTES:,}")
        number = 0
        while line := _next_line(path, file):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise EventsError(f"{where}: more than {MAX_LINE_BYTES:,} bytes; an event is one line of JSON")
            if line.endswith(b"\n") or _json_object(line) is not None:
                yield where, line


def _next_line(path: Path, file: BinaryIO) -> bytes:
    try:
        return file.readline(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise EventsError(f"{path}: {error.strerror}; check that it is a file of a run, and its disk") from None


def parse_event(where: str, line: bytes) -> Event | None:
    """The event on a line; None if the line is empty or the event is not one of ours. `where` names it in errors."""
    if not line.strip():
        return None
    values = _json_object(line)
    if values is None:
        raise EventsError(f"{where}: {line[:40]!r} is not a JSON object; correct or remove that line")
    kind = values.get("event")
    model = MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return None
    try:
        return model.model_validate(values)
    except (ConfigError, RowsError) as error:
        raise EventsError(f"{where}: {error!s:.300}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(f"{part!s:.60}" for part in fault["loc"])
        problem = fault["msg"][0].lower() + fault["msg"][1:]
        raise EventsError(f"{where}: {key} is {fault['input']!r:.40}: {problem:.300}") from None


def _json_object(line: bytes) -> Mapping[str, object] | None:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
