"""Metrics of a batch from its numbers: exact means over real items, for any padding and any cut.

A metric has a level: `row`, `session` and `prompt` count each real item once; `perf` counts all work, padding included.
Token-level metrics come from the losses, as weighted sums. Names are those of verl where the meaning is the same.
"""

import numpy as np

from raggedright.advantages import Scores, prompts_with_signal
from raggedright.arrays import Floats, Ints, mean_of, std_of
from raggedright.plan.planner import Plan
from raggedright.rows import Rows
from raggedright.sessions import SessionTable


def row_metrics(rows: Rows) -> dict[str, float]:
    """Lengths of rows, rows per session, and the share of rows without a loss token."""
    real = rows.take(~rows.is_padding) if rows.is_padding.any() else rows
    rows_of_session = np.bincount(real.session_index, minlength=real.num_sessions)
    return {
        **_spread("prompt_length", real.prompt_tokens),
        **_spread("response_length", real.response_tokens),
        **_spread("rows_per_session", rows_of_session),
        **({"rows/no_loss_ratio": float(np.mean(real.loss_tokens == 0))} if len(real) else {}),
    }


def session_metrics(table: SessionTable) -> dict[str, float]:
    """Shares of failed sessions and of generations cut at a length limit, and means of what agents report."""
    generations, cut = (int(table.row_columns[name].sum()) for name in ("generations", "cut_generations"))
    return {
        "sessions/failed_ratio": float(table.failed.mean()) if len(table) else 0.0,
        **({"response_length/clip_ratio": cut / generations} if generations else {}),
        **table.mean_metrics("session"),
    }


def score_metrics(scores: Scores) -> dict[str, float]:
    """Scores per session: a session with ten rows counts once, and so does one without rows."""
    metrics = _spread("critic/score", scores.score)
    if metrics:
        differ = metrics["critic/score/min"] < metrics["critic/score/max"]  # if not, zero without rounding
        metrics["critic/score/std"] = std_of(scores.score) if differ else 0.0
    return metrics


def signal_metrics(scores: Scores, num_prompts: int) -> dict[str, float]:
    """The share of a round's prompts whose scores are all equal, so that advantages within the prompt are zero."""
    return {"prompts/no_signal_ratio": 1 - len(prompts_with_signal(scores)) / max(num_prompts, 1)}


def perf_metrics(plan: Plan) -> dict[str, float]:
    """The work of the trained roles in a round, padding included."""
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
