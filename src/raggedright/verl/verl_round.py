# pyright: reportMissingImports=false
"""One update in verl: the plan, the stored batch, the batch as each role receives it, and what is reported.

The whole batch (real rows, then padding rows) is what verl's loop holds, clears and measures. Each role trains on a
view of it, in the plan's order and with only as many padding rows as that role needs.

Metrics with `total` in their names are summed by verl over the updates of a round; others are averaged.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from transfer_queue import KVBatchMeta

from raggedright.advantages import Scores
from raggedright.arrays import Floats, Ints
from raggedright.ledger import State, close_ledger
from raggedright.metrics import score_metrics
from raggedright.plan.plan import Plan, Role
from raggedright.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class VerlRound:
    """The plan of an update and its batch; positions in the plan are positions in `whole`."""

    plan: Plan
    whole: KVBatchMeta

    @property
    def rows(self) -> Rows:
        """The real rows, which come first in the batch."""
        return self.plan.rows

    @property
    def real(self) -> KVBatchMeta:
        """The batch without padding rows."""
        return self.whole.select_keys(self.whole.keys[: len(self.rows)])

    def view(self, role: Role, extra_info: dict[str, object] | None = None) -> KVBatchMeta:
        """The batch of a role in verl's order: equal parts by rank, and each part in equal mini-batches."""
        batch = self.whole.select_keys([self.whole.keys[i] for i in self._dispatch_order(role)])
        if extra_info is not None:
            batch.extra_info = dict(extra_info)
        return batch

    def weights(self, role: Role) -> Floats:
        """The weight of each row of the whole batch in a role's steps; padding rows have zero."""
        weights = np.zeros(len(self.whole.keys))
        for step in self.plan.steps(role):
            weights[step.row] = step.weight
        return weights

    def trains(self, role: Role) -> bool:
        """Whether the role has a row with loss tokens."""
        return role in self.plan.roles and bool((self.rows.loss_tokens > 0).any())

    def scales(self, role: Role) -> tuple[float, float]:
        """Optimizer steps / loss tokens, and optimizer steps / rows with loss tokens."""
        num_steps, loss_tokens = len(self.plan.steps(role)), self.rows.loss_tokens
        return num_steps / max(1, int(loss_tokens.sum())), num_steps / max(1, int((loss_tokens > 0).sum()))

    def partitions(self, role: Role) -> list[list[int]]:
        """Positions on each rank, for all steps together."""
        return self._dispatch_order(role).reshape(self.plan.steps(role)[0].dp_size, -1).tolist()

    def _dispatch_order(self, role: Role) -> Ints:
        """All positions of a role, rank by rank, and step by step within a rank."""
        steps = self.plan.steps(role)
        return np.concatenate([step.micro_batch(rank, 0) for rank in range(steps[0].dp_size) for step in steps])


def failed_sessions(rows: Rows, rollout_n: int, num_prompts: int) -> dict[tuple[str, int], str]:
    """Sessions without rows; a prompt without any row has a made-up name, because verl's batch does not name it."""
    seen: dict[str, set[int]] = {}
    for prompt, session in zip(rows.prompt.tolist(), rows.session.tolist(), strict=True):
        seen.setdefault(prompt, set()).add(session)
    without_rows = {f"<prompt without rows>{i}": set() for i in range(num_prompts - len(seen))}
    return {
        (prompt, session): "no rows"
        for prompt, sessions in {**seen, **without_rows}.items()
        for session in range(rollout_n)
        if session not in sessions
    }


def ledger_metrics(plan: Plan, failed: Mapping[tuple[str, int], str]) -> dict[str, float]:
    """The outcome of every session and row, as numbers for verl's logger."""
    ledger = close_ledger(plan, failed)
    metrics = {"ledger/total/padding_rows": float(ledger.num_padding_rows)}
    metrics["ledger/total/padding_tokens"] = float(ledger.num_padding_rows * plan.layout.min_row_tokens)
    for items, outcomes in (("rows", ledger.rows), ("sessions", ledger.sessions)):
        counts = Counter(outcome.state for outcome in outcomes.values())
        for state in get_args(State):
            if (items, state) != ("rows", "failed"):  # a failed session has no rows
                metrics[f"ledger/total/{items}_{state}"] = float(counts[state])
    for role in plan.trained_roles:
        metrics[f"ledger/total/{role}_steps"] = float(len(plan.steps(role)))
    return metrics


def session_metrics(rounds: Sequence[tuple[Scores, Rows]]) -> dict[str, float]:
    """Scores, and rows per session, over the updates of a round, each session counted once."""
    if not rounds:
        return {}
    scores = Scores.from_columns(
        prompt=[prompt for scores, _ in rounds for prompt in scores.prompt.tolist()],
        session=[session for scores, _ in rounds for session in scores.session.tolist()],
        score=[score for scores, _ in rounds for score in scores.score.tolist()],
    )
    num_rows = sum(len(rows) for _, rows in rounds)
    return {**score_metrics(scores), "rows_per_session/mean": num_rows / max(len(scores), 1)}


def write_rows(rows: Rows, directory: Path, name: str) -> None:
    """Write the real rows as JSONL, the input of `raggedright plan`."""
    directory.mkdir(parents=True, exist_ok=True)
    rows.to_jsonl(directory / f"{name}.jsonl")
