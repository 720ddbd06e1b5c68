"""The ledger: what became of every session and row of a batch. Each ends in exactly one state.

    trained   one of its loss tokens was in a step that ran
    failed    the session ended without rows: it raised, timed out, or returned nothing
    dropped   because of the config (over_long = "drop")
    skipped   it has no loss token, so there is nothing to learn from it; or it was sampled and then left out of the
              batch, because its prompt has no signal or the batch was full (dynamic sampling)

Outcomes are recorded with their exact cause. Where they are shown, causes that differ only in numbers and quoted text
are counted together (`group_similar`). Padding rows are counted separately. `close_ledger` recounts the plan row by row
and role by role, and raises an error if the sums are wrong: no row can be lost between `Rows` and steps.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from raggedright.arrays import Bools, Ints
from raggedright.errors import RaggedRightError, RowsError
from raggedright.plan.planner import Plan
from raggedright.rows import Rows

State = Literal["trained", "failed", "dropped", "skipped"]


class LedgerError(RaggedRightError):
    """A plan lost or repeated a row: a bug in raggedright."""


class Outcome(NamedTuple):
    """A state and its cause; trained needs none."""

    state: State
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.state} ({self.cause})" if self.cause else self.state


TRAINED = Outcome("trained")
DROPPED = Outcome("dropped", "over_long")
SKIPPED = Outcome("skipped", "no loss tokens")


_VARIES = re.compile(r"""(?<!\w)(['"`]).*?\1(?!\w)|\b\w*\d[\w.,]*""")
_OUTCOMES = (TRAINED, DROPPED, SKIPPED)  # a session is trained if one of its rows is, and so on


@dataclass(frozen=True, eq=False)
class Ledger:
    """Outcomes of a batch by row key and by (prompt, session), and the number of padding rows."""

    _real: Rows
    _of_row: Ints  # each an index into _OUTCOMES
    _failed: Mapping[tuple[str, int], str]
    _left_out: Mapping[Outcome, Rows]
    num_padding_rows: int

    @cached_property
    def rows(self) -> Mapping[str, Outcome]:
        """By the row's key."""
        outcomes = zip(self._real.key.tolist(), self._of_row.tolist(), strict=True)
        left_out = {key: outcome for outcome, rows in self._left_out.items() for key in rows.key.tolist()}
        return {key: _OUTCOMES[i] for key, i in outcomes} | left_out

    @cached_property
    def sessions(self) -> Mapping[tuple[str, int], Outcome]:
        """By prompt and session; those that failed come last."""
        names = zip(self._real.prompt.tolist(), self._real.session.tolist(), strict=True)
        outcomes = zip(names, self._of_session[self._real.session_index].tolist(), strict=True)
        left_out = {
            name: outcome
            for outcome, rows in self._left_out.items()
            for name in zip(rows.prompt.tolist(), rows.session.tolist(), strict=True)
        }
        failed = {session: Outcome("failed", cause) for session, cause in self._failed.items()}
        return {name: _OUTCOMES[i] for name, i in outcomes} | left_out | failed

    @cached_property
    def _of_session(self) -> Ints:
        outcomes = np.full(self._real.num_sessions, len(_OUTCOMES))
        np.minimum.at(outcomes, self._real.session_index, self._of_row)
        return outcomes

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
        return _count(self._of_row, (), {outcome: len(rows) for outcome, rows in self._left_out.items()})

    def _count_sessions(self) -> list[tuple[Outcome, int]]:
        left_out = {outcome: rows.num_sessions for outcome, rows in self._left_out.items()}
        return _count(self._of_session, self._failed.values(), left_out)


def without_details(cause: str) -> str:
    """A cause with a placeholder for each number, word with a digit, and quoted text."""
    return _VARIES.sub("…", cause)


def group_similar(counts: Mapping[str, int]) -> Counter[str]:
    """Counts of outcomes in words, summed where only details differ: then `such as` and one example name them."""
    groups: dict[str, Counter[str]] = {}
    for text, count in counts.items():
        groups.setdefault(without_details(text), Counter())[text] += count
    grouped: Counter[str] = Counter()
    for group in groups.values():
        example = group.most_common(1)[0][0]
        grouped[example.replace("(", "(such as ", 1) if len(group) > 1 else example] = group.total()
    return grouped


def close_ledger(
    plan: Plan,
    failed: Mapping[tuple[str, int], str] | None = None,
    skipped: Mapping[str, Rows] | None = None,
) -> Ledger:
    """The ledger of a planned batch; `failed` has the cause of each (prompt, session) that ended without rows.

    `skipped` has, by cause, rows that were sampled and are not in the plan.
    """
    rows = plan.rows
    real = np.flatnonzero(~rows.is_padding)
    trained = _recount(plan, real)
    dropped = np.zeros(len(rows), dtype=bool)
    dropped[plan.dropped] = True
    of_row = np.where(trained, 0, np.where(dropped, 1, 2))[real]
    left_out = {Outcome("skipped", cause): some for cause, some in (skipped or {}).items() if len(some)}
    ledger = Ledger(
        rows if len(real) == len(rows) else rows.take(real), of_row, dict(failed or {}), left_out, plan.num_padding_rows
    )
    _check_left_out(plan, left_out)
    with_rows = {*zip(rows.prompt[real].tolist(), rows.session[real].tolist(), strict=True)} if failed else set()
    for session in ledger._failed.keys() & with_rows:
        cause = ledger._failed[session]
        raise RowsError(f"session {session[0]}/{session[1]} failed ({cause}) but has rows; leave them out")
    return ledger


def _check_left_out(plan: Plan, left_out: Mapping[Outcome, Rows]) -> None:
    """Raise an error if a row that was left out is planned."""
    planned = {*plan.rows.key.tolist()} if left_out else set()
    for outcome, rows in left_out.items():
        if both := [key for key in rows.key.tolist() if key in planned]:
            raise LedgerError(f"row {both[0]} is {outcome} and is planned; please report this with the rows")


def _recount(plan: Plan, real: Ints) -> Bools:
    """Which rows trained; an error unless every role has each planned row once per epoch and no dropped row."""
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


def _count(outcomes: Ints, failed: Iterable[str], left_out: Mapping[Outcome, int]) -> list[tuple[Outcome, int]]:
    """The number of items with each outcome, `trained` first."""
    counts = zip(_OUTCOMES, np.bincount(outcomes, minlength=len(_OUTCOMES)).tolist(), strict=True)
    total = Counter({outcome: count for outcome, count in counts if count})
    total.update(left_out)
    total.update(Outcome("failed", cause) for cause in failed)
    return sorted(total.items(), key=lambda item: (item[0] != TRAINED, item[0]))


def _sum(counts: list[tuple[Outcome, int]]) -> str:
    grouped = group_similar({str(outcome): count for outcome, count in counts})
    return f"{grouped.total():,} = " + (" + ".join(f"{count:,} {outcome}" for outcome, count in grouped.items()) or "0")
