"""The ledger: what became of every session and row of a batch. Each ends in exactly one state.

    trained   a loss token of it was in a step that ran
    failed    the session ended without rows: it raised, timed out, returned nothing
    dropped   the config asked for it (over_long = "drop")
    skipped   it has no loss token, so there is nothing to learn from it

Padding rows are counted beside them. `close_ledger` recounts the plan itself, row by row and role by role, and raises
where the sums do not come out: nothing can vanish between rows and steps.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from raggedright.arrays import Bools, Ints
from raggedright.errors import RaggedRightError, RowsError
from raggedright.plan.plan import Plan

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


@dataclass(frozen=True, eq=False)
class Ledger:
    """Outcomes of a batch: by row key, by (prompt, session), and the padding beside them."""

    rows: Mapping[str, Outcome]
    sessions: Mapping[tuple[str, int], Outcome]
    num_padding_rows: int

    def __str__(self) -> str:
        rows, sessions = _sum(self.rows), _sum(self.sessions)
        return f"sessions: {sessions}\nrows: {rows}\npadding rows: {self.num_padding_rows:,}"

    def to_dict(self) -> dict[str, int | dict[str, int]]:
        """Counts by outcome, for JSON."""
        return {
            "sessions": {str(outcome): count for outcome, count in _count(self.sessions)},
            "rows": {str(outcome): count for outcome, count in _count(self.rows)},
            "padding_rows": self.num_padding_rows,
        }


def close_ledger(plan: Plan, failed: Mapping[tuple[str, int], str] | None = None) -> Ledger:
    """The ledger of a planned batch; `failed` gives the cause for each (prompt, session) that ended without rows."""
    rows = plan.rows
    real = np.flatnonzero(~rows.is_padding)
    trained = _recount(plan, real)
    dropped = np.zeros(len(rows), dtype=bool)
    dropped[plan.dropped] = True
    outcomes = (TRAINED, DROPPED, SKIPPED)  # a session is trained if one of its rows is, and so on
    of_row = np.where(trained, 0, np.where(dropped, 1, 2))[real]
    index = rows.session_index[real]
    of_session = np.full(rows.num_sessions, len(outcomes))
    np.minimum.at(of_session, index, of_row)
    by_row = {key: outcomes[i] for key, i in zip(rows.key[real].tolist(), of_row.tolist(), strict=True)}
    names = zip(rows.prompt[real].tolist(), rows.session[real].tolist(), strict=True)
    by_session = {name: outcomes[i] for name, i in zip(names, of_session[index].tolist(), strict=True)}
    for session, cause in (failed or {}).items():
        if session in by_session:
            raise RowsError(f"session {session[0]}/{session[1]} failed ({cause}) and yet has rows; leave them out")
        by_session[session] = Outcome("failed", cause)
    return Ledger(by_row, by_session, plan.num_padding_rows)


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


def _count(outcomes: Mapping[str, Outcome] | Mapping[tuple[str, int], Outcome]) -> list[tuple[Outcome, int]]:
    return sorted(Counter(outcomes.values()).items(), key=lambda item: (item[0] != TRAINED, item[0]))


def _sum(outcomes: Mapping[str, Outcome] | Mapping[tuple[str, int], Outcome]) -> str:
    counts = _count(outcomes)
    return f"{len(outcomes):,} = " + (" + ".join(f"{count:,} {outcome}" for outcome, count in counts) or "0")
