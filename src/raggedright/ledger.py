"""The ledger: what became of every session and row of a batch. Each ends in exactly one state.

    trained   a loss token of it was in a step that ran
    failed    the session ended without rows: it raised, timed out, returned nothing
    dropped   the config asked for it (over_long = "drop")
    skipped   it has no loss token, so there is nothing to learn from it

Padding rows are counted beside them. `close_ledger` recounts the plan itself, row by row and role by role, and raises
where the sums do not come out: nothing can vanish between rows and steps.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from raggedright.arrays import Bools, Ints
from raggedright.errors import RaggedRightError, RowsError
from raggedright.plan.plan import Plan
from raggedright.rows import Rows

State = Literal["trained", "failed", "dropped", "skipped"]


class LedgerError(RaggedRightError):
    """A plan lost or repeated a row: a fault of ours, worth stopping for."""


class Outcome(NamedTuple):
    """A state and its cause; trained needs none."""

    state: State
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.state} ({self.cause})" if self.cause else self.state


TRAINED = Outcome("trained")
DROPPED = Outcome("dropped", "over_long")
SKIPPED = Outcome("skipped", "no loss tokens")


_OUTCOMES = (TRAINED, DROPPED, SKIPPED)  # a session is trained if one of its rows is, and so on


@dataclass(frozen=True, eq=False)
class Ledger:
    """Outcomes of a batch: by row key, by (prompt, session), and the padding beside them."""

    _real: Rows
    _of_row: Ints  # each a place in _OUTCOMES
    _failed: Mapping[tuple[str, int], str]
    num_padding_rows: int

    @cached_property
    def rows(self) -> Mapping[str, Outcome]:
        """By the row's key."""
        outcomes = zip(self._real.key.tolist(), self._of_row.tolist(), strict=True)
        return {key: _OUTCOMES[i] for key, i in outcomes}

    @cached_property
    def sessions(self) -> Mapping[tuple[str, int], Outcome]:
        """By prompt and session; those that failed come last."""
        names = zip(self._real.prompt.tolist(), self._real.session.tolist(), strict=True)
        outcomes = zip(names, self._of_session[self._real.session_index].tolist(), strict=True)
        failed = {session: Outcome("failed", cause) for session, cause in self._failed.items()}
        return {name: _OUTCOMES[i] for name, i in outcomes} | failed

    @cached_property
    def _of_session(self) -> Ints:
        found = np.full(self._real.num_sessions, len(_OUTCOMES))
        np.minimum.at(found, self._real.session_index, self._of_row)
        return found

    def __str__(self) -> str:
        rows, sessions = _sum(self._count_rows()), _sum(self._count_sessions())
        return f"sessions: {sessions}\nrows: {rows}\npadding rows: {self.num_padding_rows:,}"

    def to_dict(self) -> dict[str, int | dict[str, int]]:
        """Counts by outcome, for JSON."""
        return {
            "sessions": {str(outcome): count for outcome, count in self._count_sessions()},
            "rows": {str(outcome): count for outcome, count in self._count_rows()},
            "padding_rows": self.num_padding_rows,
        }

    def _count_rows(self) -> list[tuple[Outcome, int]]:
        return _count(self._of_row, ())

    def _count_sessions(self) -> list[tuple[Outcome, int]]:
        return _count(self._of_session, self._failed.values())


def close_ledger(plan: Plan, failed: Mapping[tuple[str, int], str] | None = None) -> Ledger:
    """The ledger of a planned batch; `failed` gives the cause for each (prompt, session) that ended without rows."""
    rows = plan.rows
    real = np.flatnonzero(~rows.is_padding)
    trained = _recount(plan, real)
    dropped = np.zeros(len(rows), dtype=bool)
    dropped[plan.dropped] = True
    of_row = np.where(trained, 0, np.where(dropped, 1, 2))[real]
    ledger = Ledger(
        rows if len(real) == len(rows) else rows.take(real), of_row, dict(failed or {}), plan.num_padding_rows
    )
    with_rows = {*zip(rows.prompt[real].tolist(), rows.session[real].tolist(), strict=True)} if failed else set()
    for session in ledger._failed.keys() & with_rows:
        cause = ledger._failed[session]
        raise RowsError(f"session {session[0]}/{session[1]} failed ({cause}) and yet has rows; leave them out")
    return ledger


def _recount(plan: Plan, real: Ints) -> Bools:
    """Which rows trained; an error unless every role has each planned row once an epoch and each dropped row never."""
    num_rows = len(plan.rows)
    expected = np.zeros(num_rows, dtype=np.int64)
    expected[real] = 1
    expected[plan.dropped] = 0
    trained = np.zeros(num_rows, dtype=bool)
    for role, steps in plan.roles.items():
        for epoch in range(plan.layout.epochs if role != "forward" else 1):
            placed = np.zeros(num_rows, dtype=np.int64)
            for step in steps:
                if step.epoch == epoch:
                    row = step.row[step.row < num_rows]
                    placed += np.bincount(row, minlength=num_rows)
                    weight = step.weight[step.row < num_rows]
                    trained[row[weight > 0]] |= role != "forward" and not step.skipped
            wrong = np.flatnonzero(placed != expected)
            if len(wrong):
                i = wrong[0]
                raise LedgerError(
                    f"{role}, epoch {epoch}: row {plan.rows.key[i]} is planned {placed[i]} times, not {expected[i]}, "
                    f"and {len(wrong) - 1:,} others are wrong too; please report this with the rows"
                )
    return trained


def _count(outcomes: Ints, failed: Iterable[str]) -> list[tuple[Outcome, int]]:
    """How often each outcome is there, `trained` first."""
    counts = zip(_OUTCOMES, np.bincount(outcomes, minlength=len(_OUTCOMES)).tolist(), strict=True)
    found = Counter({outcome: count for outcome, count in counts if count})
    found.update(Outcome("failed", cause) for cause in failed)
    return sorted(found.items(), key=lambda item: (item[0] != TRAINED, item[0]))


def _sum(counts: list[tuple[Outcome, int]]) -> str:
    total = sum(count for _, count in counts)
    return f"{total:,} = " + (" + ".join(f"{count:,} {outcome}" for outcome, count in counts) or "0")
