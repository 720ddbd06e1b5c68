"""What a round leaves behind: the ledger in verl's metrics, means by session, and its rows as JSONL.

Names with `total` are summed by verl over the updates of a round, others are averaged.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from raggedright.advantages import Scores
from raggedright.ledger import State, close_ledger
from raggedright.metrics import score_metrics
from raggedright.plan.plan import Plan
from raggedright.rows import Rows


def failed_sessions(rows: Rows, rollout_n: int, num_prompts: int) -> dict[tuple[str, int], str]:
    """Sessions that should have rows and have none; a prompt without any row has no name here."""
    seen: dict[str, set[int]] = {}
    for prompt, session in zip(rows.prompt.tolist(), rows.session.tolist(), strict=True):
        seen.setdefault(prompt, set()).add(session)
    nameless = {f"<prompt without rows>{i}": set() for i in range(num_prompts - len(seen))}
    return {
        (prompt, session): "no rows"
        for prompt, sessions in {**seen, **nameless}.items()
        for session in range(rollout_n)
        if session not in sessions
    }


def ledger_metrics(plan: Plan, failed: Mapping[tuple[str, int], str]) -> dict[str, float]:
    """What became of every session and row, as numbers for verl's logger."""
    ledger = close_ledger(plan, failed)
    metrics = {"ledger/total/padding_rows": float(ledger.num_padding_rows)}
    metrics["ledger/total/padding_tokens"] = float(ledger.num_padding_rows * plan.layout.min_row_tokens)
    for what, outcomes in (("rows", ledger.rows), ("sessions", ledger.sessions)):
        counts = Counter(outcome.state for outcome in outcomes.values())
        for state in get_args(State):
            if (what, state) != ("rows", "failed"):  # a session that failed has no rows
                metrics[f"ledger/total/{what}_{state}"] = float(counts[state])
    for role in plan.trained_roles:
        metrics[f"ledger/total/{role}_steps"] = float(len(plan.steps(role)))
    return metrics


def session_metrics(rounds: Sequence[tuple[Scores, Rows]]) -> dict[str, float]:
    """Scores and rows by session over the updates of a round, each session counted once."""
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
    """The round's real rows, one a line, as `raggedright plan` reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    rows.to_jsonl(directory / f"{name}.jsonl")
