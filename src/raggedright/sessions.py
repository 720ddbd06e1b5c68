"""Sessions and trajectories: what agents produce, what stores keep, and what the planner's rows are made from.

`Trajectory` is one token sequence as it was sampled, `Session` one run of an agent with all its trajectories. A
`SessionTable` has the numbers of all sessions of a round, and of their rows, in columns, without the tensors. Ranks
exchange tables and stores list them, because a million rows are too many for one object each.

Invariants: a trajectory's arrays have the lengths of its tokens; a finished session has a finite score and no cause, a
failed one has a cause and no trajectories; a table is in the order of its keys and has each session once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import isfinite
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raggedright.advantages import Scores
from raggedright.arrays import Bools, Floats, Ints, Strings, index_in_run, mean_of, number_names, offsets
from raggedright.errors import RaggedRightError
from raggedright.rows import TOKEN_COUNTS, Rows

SessionState = Literal["finished", "failed"]
Fields = Mapping[str, NDArray]
NUMBER_TYPES = frozenset(np.dtype(code).type for code in "?efdbhilqBHILQ")  # of a trajectory's arrays
TOKEN_FIELDS = ("input_ids", "response_mask", "rollout_log_probs")
METADATA = "__metadata__"  # a name that safetensors uses itself
RESERVED_NAMES = frozenset((*TOKEN_FIELDS, METADATA))
MAX_INTEGER = 2**63 - 1
MAX_TRAJECTORIES = 2**16  # of a session
SESSION_COLUMNS = ("prompt", "session", "attempt", "score", "cause", "num_rows")
ROW_COLUMNS: Mapping[str, type] = {
    **dict.fromkeys(TOKEN_COUNTS, np.int64),
    "generations": np.int64,
    "cut_generations": np.int64,
    "weight_version": np.int64,
    "reward": np.float64,  # NaN if there is none
    "finish_reason": object,
    "role": object,
    "extra_names": object,  # one per line
}
"""What a table lists of each row: attributes of `Trajectory`, and the type of their column."""


class SessionError(RaggedRightError):
    """A session cannot be recorded as it is; the error names the session or row."""


class SessionKey(NamedTuple):
    """One run of an agent on a prompt in a round; `attempt` counts its runs from 0."""

    round: int
    prompt: str
    session: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"round {self.round}, session {self.prompt:.60}/{self.session}, attempt {self.attempt}"


class RowKey(NamedTuple):
    """One trajectory of a session."""

    round: int
    prompt: str
    session: int
    attempt: int
    trajectory: int

    def __str__(self) -> str:
        return f"round {self.round}, row {self.prompt:.60}/{self.session}/{self.trajectory}, attempt {self.attempt}"

    @property
    def of_session(self) -> SessionKey:
        """The session that it belongs to."""
        return SessionKey(*self[:4])


class SessionEntry(NamedTuple):
    """What a table has of one session."""

    key: SessionKey
    score: float | None
    cause: str
    metrics: Mapping[str, float]
    rows: Sequence[Sequence[object]]  # of each row one value for each of ROW_COLUMNS


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trajectory:
    """One token sequence: a prompt, then response tokens that were generated or observed.

    - `response_mask` is 1 for response tokens that carry loss, 0 for the others.
    - `rollout_log_probs` belong to the distribution that a token was sampled from; they are 0 for observed tokens.
    - `extra` has further arrays by name: `position_ids`, `routed_experts`, images as `multi_modal_inputs.NAME`, or
      fields that an agent adds, with one value per response token.
    """

    input_ids: NDArray
    response_mask: NDArray
    rollout_log_probs: NDArray
    role: str = "agent"
    reward: float | None = None
    finish_reason: str = "none"  # of its last generation
    generations: int = 0
    cut_generations: int = 0  # those that ended at a limit of length
    weight_version: int = -1  # the lowest that its generations reported; -1 if there was none
    extra: Fields = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the response."""
        return len(self.input_ids) - len(self.response_mask)

    @property
    def response_tokens(self) -> int:
        """Tokens of the response."""
        return len(self.response_mask)

    @property
    def loss_tokens(self) -> int:
        """Response tokens that carry loss."""
        return int(self.response_mask.sum())

    @property
    def extra_names(self) -> str:
        """The names of its extra fields, one per line."""
        return "\n".join(sorted(self.extra))

    @property
    def fields(self) -> dict[str, NDArray]:
        """All arrays by name."""
        return {**{name: getattr(self, name) for name in TOKEN_FIELDS}, **self.extra}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Session:
    """One run of an agent on a prompt: finished with a score and its trajectories, or failed with a cause."""

    key: SessionKey
    score: float | None = None
    cause: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    trajectories: Sequence[Trajectory] = ()

    @property
    def state(self) -> SessionState:
        """A session that has a cause has failed."""
        return "failed" if self.cause else "finished"

    @property
    def entry(self) -> SessionEntry:
        """What a table has of it."""
        rows = [[getattr(trajectory, name) for name in ROW_COLUMNS] for trajectory in self.trajectories]
        return SessionEntry(self.key, self.score, self.cause, {**self.metrics}, rows)


def check_session(session: Session) -> None:
    """Refuse a session that cannot be recorded: a SessionError names the session, or the row and its field."""
    key, score = session.key, session.score
    for name in ("round", "session", "attempt"):
        if type(value := getattr(key, name)) is not int or not 0 <= value <= MAX_INTEGER:
            raise SessionError(
                f"{key!r:.200}: {name} is {value!r:.40}; it must be an integer from 0 to {MAX_INTEGER:,}"
            )
    if not is_text(key.prompt):
        raise SessionError(f"{key!r:.200}: prompt is {key.prompt!r:.60}; it must be text that UTF-8 can encode")
    if not is_text(session.cause):
        raise SessionError(f"{key}: cause is {session.cause!r:.80}; it must be text")
    if session.cause and (score is not None or session.trajectories):
        raise SessionError(f"{key}: failed ({session.cause:.80}) with a score or trajectories; leave them out")
    if not session.cause and not is_finite(score):
        raise SessionError(
            f"{key}: score is {score!r:.60}; it must be a finite number, or record the session with a cause"
        )
    for name, value in session.metrics.items():
        if not is_text(name) or not is_finite(value):
            raise SessionError(f"{key}: metric {name!r:.60} is {value!r:.60}; it must be a finite number")
    if len(session.trajectories) > MAX_TRAJECTORIES:
        raise SessionError(f"{key}: {len(session.trajectories):,} trajectories; a session has at most 65,536")
    for i, trajectory in enumerate(session.trajectories):
        _check_trajectory(RowKey(*key, i), trajectory)


def _check_trajectory(key: RowKey, trajectory: Trajectory) -> None:
    for name in trajectory.extra:
        if name in RESERVED_NAMES:
            raise SessionError(f"{key}: an extra field has the reserved name {name}; give it another name")
    for name, value in trajectory.fields.items():
        is_name = name in RESERVED_NAMES or (is_text(name) and "\n" not in name)
        if not is_name or type(value) is not np.ndarray or value.dtype.type not in NUMBER_TYPES:
            kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
            raise SessionError(
                f"{key}: field {name!r:.60} is {kind}; a field has a name of one line and is a "
                "numpy array of numbers or booleans"
            )
    ids, mask, log_probs = trajectory.input_ids, trajectory.response_mask, trajectory.rollout_log_probs
    if not (ids.ndim == mask.ndim == log_probs.ndim == 1) or not len(mask) == len(log_probs) <= len(ids):
        shapes = f"{ids.shape}, {mask.shape}, {log_probs.shape}"
        raise SessionError(
            f"{key}: input_ids, response_mask and rollout_log_probs have shapes {shapes}; each is one vector, and the "
            "last two have one value per response token"
        )
    if ids.dtype.kind not in "iu":
        raise SessionError(f"{key}: input_ids is an array of {ids.dtype}; token ids are integers")
    if not ((mask == 0) | (mask == 1)).all():
        raise SessionError(f"{key}: response_mask has values other than 0 and 1; it is 1 for tokens that carry loss")
    if not np.isfinite(log_probs).all():
        at = int(np.argmin(np.isfinite(log_probs)))
        raise SessionError(
            f"{key}: rollout_log_probs is {log_probs[at]} at response token {at:,}; log-probs are finite numbers"
        )
    for name, least in (("generations", 0), ("cut_generations", 0), ("weight_version", -1)):
        if type(value := getattr(trajectory, name)) is not int or not least <= value <= MAX_INTEGER:
            raise SessionError(f"{key}: {name} is {value!r:.40}; it must be an integer from {least} to {MAX_INTEGER:,}")
    for name in ("role", "finish_reason"):
        if not is_text(value := getattr(trajectory, name)):
            raise SessionError(f"{key}: {name} is {value!r:.60}; it must be text")
    if trajectory.reward is not None and not is_finite(trajectory.reward):
        raise SessionError(f"{key}: reward is {trajectory.reward!r:.60}; it must be a finite number or None")


def is_text(value: object) -> bool:
    """Whether it is text that UTF-8 can encode: no lone surrogates."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


def is_finite(value: object) -> bool:
    """Whether it is a finite number of Python's own types that a float can hold."""
    try:
        return type(value) in (int, float) and isfinite(value)  # pyright: ignore[reportArgumentType]
    except OverflowError:
        return False


@dataclass(frozen=True, eq=False, kw_only=True)
class SessionTable:
    """Sessions of one round in columns, in the order of (prompt, session), and their rows in the same order."""

    round: int
    prompt: Strings
    session: Ints
    attempt: Ints
    score: Floats  # NaN if it failed
    cause: Strings  # empty unless it failed
    num_rows: Ints
    metrics: Mapping[str, Floats] = field(default_factory=dict)  # by name; NaN where a session did not report it
    row_columns: Mapping[str, NDArray] = field(default_factory=dict)  # by the names of ROW_COLUMNS

    @classmethod
    def of(cls, round: int, sessions: Iterable[Session]) -> "SessionTable":
        """The table of some sessions of a round, the last attempt of each."""
        return cls.of_entries(round, [s.entry for s in sorted(sessions, key=lambda session: session.key)])

    @classmethod
    def of_entries(cls, round: int, entries: "Sequence[SessionEntry]") -> "SessionTable":
        """The table of entries in the order of their keys."""
        keys, score, cause, metrics, rows = [*zip(*entries, strict=True)] or [()] * 5
        _, prompt, session, attempt = [*zip(*keys, strict=True)] or [()] * 4
        columns = [*zip(*chain.from_iterable(rows), strict=True)] or [()] * len(ROW_COLUMNS)
        names = {name for reported in metrics for name in reported}
        return cls(
            round=round,
            prompt=np.array(prompt, dtype=object),
            session=np.array(session, dtype=np.int64),
            attempt=np.array(attempt, dtype=np.int64),
            score=np.array(score, dtype=np.float64),  # None becomes NaN
            cause=np.array(cause, dtype=object),
            num_rows=np.array([len(each) for each in rows], dtype=np.int64),
            metrics={name: np.array([m.get(name) for m in metrics], dtype=np.float64) for name in sorted(names)},
            row_columns={
                name: np.array(column, dtype=dtype)
                for (name, dtype), column in zip(ROW_COLUMNS.items(), columns, strict=True)
            },
        )

    @classmethod
    def join(cls, tables: "Sequence[SessionTable]") -> "SessionTable":
        """The sessions of all tables, which are of one round and have no session in common."""
        (round,) = {table.round for table in tables}
        tables = [table for table in tables if len(table)] or [tables[0]]
        names = {name for table in tables for name in table.metrics}
        joined = cls(
            round=round,
            **{name: np.concatenate([getattr(t, name) for t in tables]) for name in SESSION_COLUMNS},
            metrics={name: np.concatenate([t._metric(name) for t in tables]) for name in sorted(names)},
            row_columns={name: np.concatenate([t.row_columns[name] for t in tables]) for name in ROW_COLUMNS},
        )
        order = np.lexsort((joined.session, number_names(joined.prompt)))
        return joined if (order == np.arange(len(order))).all() else joined.take(order)

    def take(self, at: Ints) -> "SessionTable":
        """The sessions at these positions, in this order."""
        starts, counts = offsets(self.num_rows)[:-1][at], self.num_rows[at]
        of_rows = np.repeat(starts, counts) + index_in_run(counts)
        return SessionTable(
            round=self.round,
            **{name: getattr(self, name)[at] for name in SESSION_COLUMNS},
            metrics={name: column[at] for name, column in self.metrics.items()},
            row_columns={name: column[of_rows] for name, column in self.row_columns.items()},
        )

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def failed(self) -> Bools:
        """Which sessions failed."""
        return np.isnan(self.score)

    @cached_property
    def causes(self) -> dict[tuple[str, int], str]:
        """The cause of each failed session, by prompt and session."""
        at = np.flatnonzero(self.failed).tolist()
        return {(self.prompt[i], int(self.session[i])): self.cause[i] for i in at}

    @cached_property
    def rows(self) -> Rows:
        """The rows' counts, for the planner."""
        return Rows.from_columns(
            prompt=np.repeat(self.prompt, self.num_rows),
            session=np.repeat(self.session, self.num_rows),
            trajectory=index_in_run(self.num_rows),
            **{name: self.row_columns[name] for name in TOKEN_COUNTS},
        )

    @cached_property
    def session_of_row(self) -> Ints:
        """The position of each row's session."""
        return np.repeat(np.arange(len(self)), self.num_rows)

    @cached_property
    def extra_fields(self) -> set[str]:
        """The extra fields that some row has."""
        return {name for names in {*self.row_columns["extra_names"].tolist()} for name in names.split("\n") if name}

    def session_key(self, i: int) -> SessionKey:
        """The key of the session at a position."""
        return SessionKey(self.round, self.prompt[i], int(self.session[i]), int(self.attempt[i]))

    def row_keys(self, at: Ints) -> list[RowKey]:
        """The keys of the rows at these positions."""
        of_session, trajectory = self.session_of_row[at], index_in_run(self.num_rows)[at]
        columns = (self.prompt[of_session], self.session[of_session], self.attempt[of_session], trajectory)
        return [RowKey(self.round, *key) for key in zip(*(column.tolist() for column in columns), strict=True)]

    def scores(self, on_failure: str) -> Scores:
        """The score of each session that counts: a failed one counts as zero, or not at all."""
        counts = ~self.failed | (on_failure == "zero")
        score = np.where(self.failed, 0.0, self.score)
        return Scores.from_columns(prompt=self.prompt[counts], session=self.session[counts], score=score[counts])

    def mean_metrics(self, prefix: str) -> dict[str, float]:
        """The mean of each metric over the sessions that reported it."""
        return {f"{prefix}/{n}/mean": mean_of(column[~np.isnan(column)]) for n, column in self.metrics.items()}

    def of_prompts(self, prompts: Collection[str]) -> "SessionTable":
        """The sessions of these prompts."""
        return self.take(np.flatnonzero([prompt in prompts for prompt in self.prompt.tolist()]))

    def _metric(self, name: str) -> Floats:
        return self.metrics.get(name, np.full(len(self), np.nan))
