"""Metrics of a batch from its numbers: exact means over real items, whatever the plan padded or cut.

A metric has a level: `row` and `session` means count each real one once; `perf` counts all that runs, padding included.
Token-level metrics come from the losses, as sums weighted beforehand. Names are verl's where the meaning is the same.
"""

import numpy as np

from raggedright.advantages import Scores
from raggedright.arrays import Floats, Ints
from raggedright.plan.plan import Plan
from raggedright.rows import Rows


def row_metrics(rows: Rows) -> dict[str, float]:
    """Lengths by row, and rows by session."""
    real = rows.take(~rows.is_padding) if rows.is_padding.any() else rows
    rows_of_session = np.bincount(real.session_index, minlength=real.num_sessions)
    return {
        **_spread("prompt_length", real.prompt_tokens),
        **_spread("response_length", real.response_tokens),
        **_spread("rows_per_session", rows_of_session),
    }


def score_metrics(scores: Scores) -> dict[str, float]:
    """Scores by session: one with ten rows counts once, one without rows counts too."""
    return _spread("critic/score", scores.score)


def perf_metrics(plan: Plan) -> dict[str, float]:
    """What the trained roles run in a round, padding included."""
    steps = [step for role in plan.trained_roles for step in plan.steps(role) if not step.skipped]
    return {
        "perf/rows": float(sum(len(step.row) for step in steps)),
        "perf/tokens": float(sum(int(plan.lengths[step.row].sum()) for step in steps)),
        "perf/padding_rows": float(plan.num_padding_rows),
        "perf/micro_batches": float(sum(step.num_micro_batches for step in steps)),
    }


def _spread(name: str, values: Ints | Floats) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(np.mean(values, dtype=np.float64)),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
