"""Advantages against calculations by hand; a session counts once, whatever it emitted."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedright import ConfigError, Rows, RowsError, Scores, broadcast_to_rows, session_advantages
from raggedright.advantages import Estimator

ESTIMATORS = get_args(Estimator)


def scores_of(**groups: list[float]) -> Scores:
    named = [(prompt, i, score) for prompt, scores in groups.items() for i, score in enumerate(scores)]
    prompt, session, score = zip(*named, strict=True)
    return Scores.from_columns(prompt=prompt, session=session, score=score)


def test_grpo_centres_and_scales_each_group():
    advantages = session_advantages(scores_of(a=[1, 0, 0, 0], b=[2, 4]), "grpo")
    # a: mean 1/4, squares (9 + 1 + 1 + 1) / 16 over 3: std 1/2. b: mean 3, std sqrt(2).
    np.testing.assert_allclose(advantages[:4], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(advantages[4:], [-1 / math.sqrt(2), 1 / math.sqrt(2)], rtol=1e-5)


def test_grpo_without_std_only_centres():
    assert session_advantages(scores_of(a=[1, 0, 0, 0]), "grpo", std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_a_session_with_the_others_of_its_prompt():
    """verl 0.9.1 counts rows: rewards 1, 0, 0, 0 with ten rows in session 0 gave 0.25; right is 1."""
    assert session_advantages(scores_of(a=[1, 0, 0, 0]), "rloo").tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_reinforce_plus_plus_whitens_over_all_sessions():
    advantages = session_advantages(scores_of(a=[1, 2], b=[3, 4]), "reinforce++")
    # mean 2.5, squares 2 x (2.25 + 0.25) over 3
    np.testing.assert_allclose(advantages, np.array([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(5 / 3))


def test_reinforce_plus_plus_baseline_centres_by_prompt_then_whitens():
    advantages = session_advantages(scores_of(a=[1, 2], b=[3, 7]), "reinforce++-baseline")
    # centred: -0.5, 0.5, -2, 2; squares 8.5 over 3
    np.testing.assert_allclose(advantages, np.array([-0.5, 0.5, -2, 2]) / math.sqrt(8.5 / 3))


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "reinforce++"])  # it has no groups
def test_a_group_of_one_gets_zero(estimator):
    assert session_advantages(scores_of(a=[0.7], b=[1, 0, 0.25]), estimator)[0] == 0.0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_scores_get_exactly_zero(estimator):
    assert session_advantages(scores_of(a=[0.1] * 3, b=[0.1] * 7), estimator).tolist() == [0.0] * 10


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_session_gets_no_advantage(estimator):
    assert len(session_advantages(Scores.from_columns(prompt=[], session=[], score=[]), estimator)) == 0


def test_ragged_groups_stay_groups():
    """slime merged ragged groups into one: [.167, .167, .167, -.833, .167, .167] instead of these."""
    advantages = session_advantages(scores_of(a=[1, 1, 1, 0], b=[1, 1]), "grpo", std=False)
    assert advantages.tolist() == [0.25, 0.25, 0.25, -0.75, 0, 0]


def test_rows_get_their_sessions_advantage_and_padding_gets_zero():
    scores = scores_of(a=[1, 0], b=[5])
    rows = Rows.from_columns(
        prompt=["a", "a", "a", "b"], session=[1, 0, 0, 0], trajectory=[0, 0, 1, 0],
        prompt_tokens=[1] * 4, response_tokens=[1] * 4,
    ).with_padding(2, 2)  # fmt: skip
    assert broadcast_to_rows(np.array([0.5, -0.5, 3.0]), scores, rows).tolist() == [-0.5, 0.5, 0.5, 3, 0, 0]


def test_sessions_without_rows_still_count_in_their_group():
    scores = scores_of(a=[1, 0])
    rows = Rows.from_columns(prompt=["a"], session=[0], trajectory=[0], prompt_tokens=[1], response_tokens=[1])
    assert broadcast_to_rows(session_advantages(scores, "rloo"), scores, rows).tolist() == [1.0]


def test_a_row_whose_session_has_no_score_is_named():
    rows = Rows.from_columns(prompt=["a"], session=[7], trajectory=[2], prompt_tokens=[1], response_tokens=[1])
    with pytest.raises(RowsError, match="row a/7/2: its session has no score"):
        broadcast_to_rows(np.array([1.0]), scores_of(a=[1]), rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_names_its_session(bad):
    with pytest.raises(RowsError, match=f"session a/1: score is {bad}"):
        scores_of(a=[1, bad])


def test_two_scores_for_a_session_are_refused():
    with pytest.raises(RowsError, match="session a/0 has two scores"):
        Scores.from_columns(prompt=["a", "a"], session=[0, 0], score=[1, 2])


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(RowsError, match="2 prompts, 2 sessions and 1 scores"):
        Scores.from_columns(prompt=["a", "a"], session=[0, 1], score=[1])


def test_an_unknown_estimator_is_refused_by_name():
    with pytest.raises(ConfigError, match="'gae2'; it must be one of grpo, rloo"):
        session_advantages(scores_of(a=[1]), "gae2")  # pyright: ignore[reportArgumentType]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-5, 5)), min_size=1, max_size=30), st.randoms())
def test_the_order_of_arrival_changes_no_bit(sessions, random):
    named = [(prompt, i, score) for i, (prompt, score) in enumerate(sessions)]
    shuffled = random.sample(named, len(named))
    for estimator in ESTIMATORS:
        results = []
        for order in (named, shuffled):
            prompt, session, score = zip(*order, strict=True)
            scores = Scores.from_columns(prompt=prompt, session=session, score=score)
            results.append(dict(zip(session, session_advantages(scores, estimator).tolist(), strict=True)))
        assert results[0] == results[1]
