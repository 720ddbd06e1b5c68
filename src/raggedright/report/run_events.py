"""What happened in a run, as data: one class for each kind of event, made from its fields.

Everything but the number of a round is optional, so that a run of another version still has a report.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import NamedTuple

import numpy as np

from raggedright.errors import ConfigError, RowsError
from raggedright.plan.layout import Layout
from raggedright.report.event_fields import EventsError, Fields
from raggedright.rows import Rows

MOST_FAILURES, MOST_SAMPLES, MOST_TRAJECTORIES = 100, 100, 1024  # of one event; more are left out
COLUMNS = ("prompt", "session", "trajectory", "prompt_tokens", "response_tokens", "loss_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What was run."""

    time: str
    version: str
    config: Mapping[str, object]
    layout: Layout | None
    num_parameters: int | None
    dp: int | None
    device: str

    @classmethod
    def of(cls, fields: Fields) -> "Start":
        """From the event."""
        world = fields.table("world")
        return cls(
            time=fields.text("time"),
            version=fields.text("version"),
            config=fields.table("config").values,
            layout=_layout(fields),
            num_parameters=fields.count("num_parameters"),
            dp=world.count("dp"),
            device=world.text("device"),
        )


class Failure(NamedTuple):
    """A session that ended without rows."""

    prompt: str
    session: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """A round: its metrics, what became of its sessions and rows, and where its seconds went."""

    round: int
    metrics: Mapping[str, float]
    rows: int | None
    padding_rows: int | None
    sessions: int | None
    optimizer_steps: int | None
    skipped_steps: int | None
    session_outcomes: Mapping[str, int]
    row_outcomes: Mapping[str, int]
    reused_sessions: int
    failed: tuple[Failure, ...]
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, fields: Fields) -> "RoundEvent":
        """From the event."""
        ledger = fields.table("ledger")
        failed = fields.tables("failed", MOST_FAILURES)
        return cls(
            round=fields.needed_count("round"),
            metrics=fields.named_numbers("metrics"),
            rows=fields.count("rows"),
            padding_rows=fields.count("padding_rows"),
            sessions=fields.count("sessions"),
            optimizer_steps=fields.count("optimizer_steps"),
            skipped_steps=fields.count("skipped_steps"),
            session_outcomes=ledger.named_counts("sessions"),
            row_outcomes=ledger.named_counts("rows"),
            reused_sessions=ledger.count("reused_sessions") or 0,
            failed=tuple(Failure(f.text("prompt"), f.count("session") or 0, f.text("cause")) for f in failed),
            seconds=fields.named_numbers("seconds"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRows:
    """The rows of a round; with a layout they are its plan again."""

    round: int
    rows: Rows
    layout: Layout | None

    @classmethod
    def of(cls, fields: Fields) -> "RoundRows":
        """From the event; a layout of its own is better than the run's, since its seed is the round's."""
        columns = fields.table("columns")
        prompts = columns.texts("prompt")
        counts = {name: np.array(columns.items(name), dtype=object) for name in COLUMNS[1:]}
        try:
            rows = Rows.from_columns(
                prompt=prompts,
                session=counts["session"],
                trajectory=counts["trajectory"],
                prompt_tokens=counts["prompt_tokens"],
                response_tokens=counts["response_tokens"],
                loss_tokens=counts["loss_tokens"] if "loss_tokens" in columns.values else None,
            )
        except RowsError as error:
            raise EventsError(f"{columns.where}: {error!s:.300}") from None
        return cls(round=fields.needed_count("round"), rows=rows, layout=_layout(fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTrajectory:
    """A trajectory with its tokens; mask, advantages and log-probs are those of the response."""

    role: str
    reward: float | None
    tokens: tuple[str, ...]
    prompt_tokens: int
    mask: tuple[float, ...]
    advantages: tuple[float, ...]
    log_probs: tuple[float, ...]
    finish_reason: str

    @classmethod
    def of(cls, fields: Fields) -> "SampledTrajectory":
        """From one of a session's."""
        return cls(
            role=fields.text("role"),
            reward=fields.number("reward"),
            tokens=fields.texts("tokens"),
            prompt_tokens=fields.count("prompt_tokens") or 0,
            mask=fields.numbers("mask"),
            advantages=fields.numbers("advantages"),
            log_probs=fields.numbers("log_probs"),
            finish_reason=fields.text("finish_reason"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSession:
    """A session that was written down whole."""

    prompt: str
    session: int
    score: float | None
    task: Mapping[str, object]
    trajectories: tuple[SampledTrajectory, ...]

    @classmethod
    def of(cls, fields: Fields) -> "SampledSession":
        """From one of an event's."""
        trajectories = fields.tables("trajectories", MOST_TRAJECTORIES)
        return cls(
            prompt=fields.text("prompt"),
            session=fields.count("session") or 0,
            score=fields.number("score"),
            task=fields.table("task").values,
            trajectories=tuple(map(SampledTrajectory.of, trajectories)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A few sessions of a round."""

    round: int
    sessions: tuple[SampledSession, ...]

    @classmethod
    def of(cls, fields: Fields) -> "Samples":
        """From the event."""
        sessions = tuple(map(SampledSession.of, fields.tables("sessions", MOST_SAMPLES)))
        return cls(round=fields.needed_count("round"), sessions=sessions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """An evaluation after a round."""

    round: int
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, fields: Fields) -> "Eval":
        """From the event."""
        return cls(round=fields.needed_count("round"), metrics=fields.named_numbers("metrics"))


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the run ended."""

    time: str
    rounds: int | None
    reason: str
    seconds: float | None

    @classmethod
    def of(cls, fields: Fields) -> "End":
        """From the event."""
        reason, seconds = fields.text("reason"), fields.number("seconds")
        return cls(time=fields.text("time"), rounds=fields.count("rounds"), reason=reason, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvents:
    """A whole run; rounds, rows, samples and evals by their round. `end` is None while it runs, or where it was cut."""

    start: Start | None = None
    rounds: tuple[RoundEvent, ...] = ()
    rows: tuple[RoundRows, ...] = ()
    samples: tuple[Samples, ...] = ()
    evals: tuple[Eval, ...] = ()
    end: End | None = None


def _layout(fields: Fields) -> Layout | None:
    """The layout of an event, keys of other versions left out."""
    table = fields.table("layout")
    known = {field.name for field in fields_of(Layout)}
    given = {name: value for name, value in table.values.items() if name in known}
    if not given:
        return None
    try:
        return Layout(**given)  # pyright: ignore[reportArgumentType]  # Layout checks each of them
    except (ConfigError, TypeError) as error:  # TypeError: one that has no default is missing
        raise EventsError(f"{table.where}: {error!s:.300}") from None
