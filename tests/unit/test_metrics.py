"""The metrics contract: rows and sessions count once, padding never, except in what measures work."""

import pytest

from raggedright import Layout, Rows, Scores, make_plan
from raggedright.metrics import perf_metrics, row_metrics, score_metrics


def rows() -> Rows:
    """Session a/0 with three rows, a/1 with one."""
    return Rows.from_columns(
        prompt=["a"] * 4,
        session=[0, 0, 0, 1],
        trajectory=[0, 1, 2, 0],
        prompt_tokens=[4] * 4,
        response_tokens=[2, 4, 6, 8],
    )


def test_padding_leaves_metrics_alone():
    """verl 0.9.1 and verl #7771 averaged over padding rows."""
    plan = make_plan(rows(), Layout(dp_size=16, batch_size=1, mini_batch_size=1))
    assert plan.num_padding_rows == 12
    assert row_metrics(plan.padded_rows) == row_metrics(rows())
    assert row_metrics(rows()) == {
        "prompt_length/mean": 4, "prompt_length/max": 4, "prompt_length/min": 4,
        "response_length/mean": 5, "response_length/max": 8, "response_length/min": 2,
        "rows_per_session/mean": 2, "rows_per_session/max": 3, "rows_per_session/min": 1,
    }  # fmt: skip


def test_a_session_with_ten_rows_counts_once_in_the_score():
    scores = Scores.from_columns(prompt=["a", "a"], session=[0, 1], score=[1.0, 0.0])
    assert score_metrics(scores)["critic/score/mean"] == 0.5


def test_performance_metrics_count_what_runs():
    one = perf_metrics(make_plan(rows(), Layout(dp_size=1, batch_size=1, mini_batch_size=1)))
    many = perf_metrics(make_plan(rows(), Layout(dp_size=16, batch_size=1, mini_batch_size=1)))
    assert (one["perf/rows"], one["perf/padding_rows"], one["perf/tokens"]) == (4, 0, 36)
    assert (many["perf/rows"], many["perf/padding_rows"], many["perf/tokens"]) == (16, 12, 36 + 12 * 2)
    assert many["perf/micro_batches"] == 16


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_epoch_is_work(epochs):
    plan = make_plan(
        rows(), Layout(dp_size=1, batch_size=1, mini_batch_size=1, epochs=epochs, critic_mini_batch_size=1)
    )
    assert perf_metrics(plan)["perf/rows"] == 4 * 2 * epochs


def test_no_rows_have_no_lengths():
    assert row_metrics(rows().take(rows().session > 5)) == {}
