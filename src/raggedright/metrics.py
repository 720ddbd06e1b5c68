"""Metrics of a batch from its numbers: exact means over real items, whatever the plan padded or cut.

A metric has a level: `row`, `session` and `prompt` count each real one once; `perf` counts all that runs, padding too.
Token-level metrics come from the losses, as sums weighted beforehand. Names are verl's where the meaning is the same.
"""

import numpy as np

from raggedright.advantages import Scores, prompts_with_signal
from raggedright.arrays import Floats, Ints, mean_of, std_of
from raggedright.plan.planner import Plan
from raggedright.rows import Rows
from raggedright.sessions import SessionTable


def row_metrics(rows: Rows) -> dict[str, float]:
    """Lengths by row, rows by session, and the share of rows without a loss token."""
    real = rows.take(~rows.is_padding) if rows.is_padding.any() else rows
    rows_of_session = np.bincount(real.session_index, minlength=real.num_sessions)
    return {
        **_spread("prompt_length", real.prompt_tokens),
        **_spread("response_length", real.response_tokens),
        **_spread("rows_per_session", rows_of_session),
        **({"rows/no_loss_ratio": float(np.mean(real.loss_tokens == 0))} if len(real) else {}),
    }


def session_metrics(table: SessionTable) -> dict[str, float]:
    """Shares of failed sessions and of generations that ended at a limit of length, and means of agents' reports."""
    generations, cut = (int(table.row_columns[name].sum()) for name in ("generations", "cut_generations"))
    return {
        "sessions/failed_ratio": float(table.failed.mean()) if len(table) else 0.0,
        **({"response_length/clip_ratio": cut / generations} if generations else {}),
        **table.mean_metrics("session"),
    }


def score_metrics(scores: Scores) -> dict[str, float]:
    """Scores by session: one with ten rows counts once, one without rows counts too."""
    found = _spread("critic/score", scores.score)
    if found:
        differ = found["critic/score/min"] < found["critic/score/max"]  # else zero, without rounding
        found["critic/score/std"] = std_of(scores.score) if differ else 0.0
    return found


def signal_metrics(scores: Scores, num_prompts: int) -> dict[str, float]:
    """The share of a round's prompts whose scores are all equal, so that advantages within the prompt are zero."""
    return {"prompts/no_signal_ratio": 1 - len(prompts_with_signal(scores)) / max(num_prompts, 1)}


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
        f"{name}/mean": mean_of(values),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
