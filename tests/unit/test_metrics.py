"""The metrics contract: rows and sessions count once, padding never, except in what measures work."""

import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedright import Layout, Rows, Scores, make_plan, session_advantages
from raggedright.arrays import mean_of
from raggedright.metrics import perf_metrics, row_metrics, score_metrics, signal_metrics


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
        "rows_per_session/mean": 2, "rows_per_session/max": 3, "rows_per_session/min": 1, "rows/no_loss_ratio": 0,
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


def test_the_spread_of_scores_is_that_of_sessions_and_exactly_zero_where_all_are_equal():
    """0.1 + 0.1 + 0.1 is not 0.3: a deviation from the rounded mean would not be zero."""
    names = {"prompt": ["a", "a", "b"], "session": [0, 1, 0]}
    assert score_metrics(Scores.from_columns(**names, score=[0.1] * 3))["critic/score/std"] == 0
    assert score_metrics(Scores.from_columns(**names, score=[1.0, 2.0, 3.0]))["critic/score/std"] == 1
    assert score_metrics(Scores.from_columns(prompt=["a"], session=[0], score=[1.0]))["critic/score/std"] == 0


def test_a_prompt_has_no_signal_where_its_scores_are_equal_or_its_sessions_failed():
    """Of four prompts: one differs, one is equal, one has a single finished session, and all sessions of one failed."""
    scores = Scores.from_columns(prompt=["a", "a", "b", "b", "c"], session=[0, 1, 0, 1, 0], score=[0, 1, 0.5, 0.5, 1])
    assert signal_metrics(scores, num_prompts=4) == {"prompts/no_signal_ratio": 0.75}
    assert not session_advantages(scores, "grpo")[2:].any()


def test_rows_without_a_loss_token_are_counted_and_padding_is_not():
    some = replace(rows(), loss_tokens=np.array([2, 0, 6, 8]))
    plan = make_plan(some, Layout(dp_size=16, batch_size=1, mini_batch_size=1))
    assert row_metrics(plan.padded_rows)["rows/no_loss_ratio"] == 0.25


def test_means_of_huge_scores_do_not_overflow():
    """Rewards of 1e308 had a mean of inf."""
    scores = Scores.from_columns(prompt=["a"] * 3, session=[0, 1, 2], score=[1.3e308, 1.5e308, 1.7e308])
    metrics = score_metrics(scores)
    assert metrics["critic/score/mean"] == pytest.approx(1.5e308)
    assert mean_of(np.array([1.6e308, -1.0, 1.6e308, 1.6e308])) == pytest.approx(1.2e308)
    assert mean_of(np.array([1.6e308, 1.6e308])) == 1.6e308
    assert mean_of(np.array([sys.float_info.max] * 3)) == sys.float_info.max
    assert metrics["critic/score/std"] == pytest.approx(0.2e308)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_a_mean_of_any_finite_numbers_is_that_of_exact_arithmetic(values):
    exact = float(sum(map(Fraction, values)) / len(values))
    rounding = max(map(abs, values)) * 1e-14
    assert mean_of(np.array(values)) == pytest.approx(exact, abs=rounding)
