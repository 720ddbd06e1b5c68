"""Advantages of any finite scores, against the same formulas in exact arithmetic."""

from decimal import Context, Decimal
from fractions import Fraction
from math import ldexp
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from raggedright import RowsError, Scores, session_advantages
from raggedright.advantages import Estimator, prompts_with_signal
from raggedright.arrays import ROUNDING

ESTIMATORS = get_args(Estimator)
NORMALISED = ("reinforce++", "reinforce++-baseline")
EXACT = Context(prec=80, Emin=-9999, Emax=9999)
any_scores = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(allow_nan=False, allow_infinity=False)), min_size=1, max_size=12
)
usual_scores = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-50, 50)), min_size=1, max_size=12)


def advantages(sessions: list[tuple[str, float]], estimator: Estimator) -> np.ndarray:
    prompt, score = zip(*sessions, strict=True)
    scores = Scores.from_columns(prompt=prompt, session=range(len(score)), score=score)
    return session_advantages(scores, estimator)


def decimal_of(value: Fraction) -> Decimal:
    return EXACT.divide(Decimal(value.numerator), Decimal(value.denominator))


def exact_advantages(sessions: list[tuple[str, float]], estimator: Estimator) -> list[Decimal]:
    """The definitions as they are written, without a rounding before the square root."""
    names = [name for name, _ in sessions]
    groups = names if estimator != "reinforce++" else ["batch"] * len(sessions)
    centred, std = [Fraction(0)] * len(sessions), [Decimal(0)] * len(sessions)
    for name in set(groups):
        at = [i for i, group in enumerate(groups) if group == name]
        scores = [Fraction(sessions[i][1]) for i in at]
        equal = max(scores) - min(scores) <= Fraction(ROUNDING) * max(map(abs, scores))
        for i, score in zip(at, scores, strict=True):
            centred[i] = Fraction(0) if equal else score - sum(scores, Fraction(0)) / len(scores)
        deviation = std_of([centred[i] for i in at])
        for i in at:
            std[i] = deviation
            if estimator == "rloo":
                centred[i] *= Fraction(len(at), max(len(at) - 1, 1))
    if estimator == "rloo":
        return [*map(decimal_of, centred)]
    if estimator == "grpo":
        return [EXACT.divide(decimal_of(c), EXACT.add(s, Decimal("1e-6"))) for c, s in zip(centred, std, strict=True)]
    of_batch = std_of(centred)
    return [EXACT.divide(decimal_of(c), of_batch) if of_batch else Decimal(0) for c in centred]


def std_of(centred: list[Fraction]) -> Decimal:
    return EXACT.sqrt(decimal_of(sum(c * c for c in centred) / Fraction(max(len(centred) - 1, 1))))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(any_scores)
@example([("a", 1e200), ("a", 0.0), ("b", 2e200)])
@example([("a", 1.7e308), ("a", 1.7e308), ("a", 0.0)])
@example([("a", 1.7e308), ("a", -1.7e308)])
@example([("a", 5e-324), ("a", 0.0), ("b", 1.0)])
@example([("a", 0.3), ("a", 0.1 + 0.2)])
@example([("a", 1e300), ("a", 1.1e300), ("b", 1.0), ("b", 2.0)])
def test_advantages_of_any_finite_scores_are_those_of_exact_arithmetic(estimator, sessions):
    """Scores of 1e200 had advantages of 0, and 1.7e308 NaN."""
    exact = exact_advantages(sessions, estimator)
    share_of_limit = max(map(abs, exact)) / Decimal(2) ** 1024
    assume(abs(share_of_limit - 1) > Decimal("1e-12"))  # nearer, it depends on the rounding
    if share_of_limit > 1:
        with pytest.raises(RowsError, match="too large for a float64"):
            advantages(sessions, estimator)
        return
    computed = advantages(sessions, estimator)
    largest = max(abs(score) for _, score in sessions)
    for value, right in zip(computed.tolist(), exact, strict=True):
        # A mean is rounded to the size of the scores, and a difference may be a small part of it.
        slack = Decimal("1e-12") * max(1, abs(right)) if estimator != "rloo" else Decimal(ldexp(largest, -49))
        assert abs(Decimal(value) - right) <= max(slack, rounding_of(sessions, estimator) * 2**8)


def rounding_of(sessions: list[tuple[str, float]], estimator: Estimator) -> Decimal:
    """How much of an advantage the rounding of a mean can be: the largest score over the least deviation."""
    names = {"batch"} if estimator == "reinforce++" else {name for name, _ in sessions}
    most = Decimal(0)
    for name in names:
        scores = [score for group, score in sessions if name in (group, "batch")]
        spread = Fraction(max(scores)) - Fraction(min(scores))
        if spread:
            share = EXACT.divide(decimal_of(Fraction(max(map(abs, scores)))), decimal_of(spread))
            most = max(most, share * len(sessions))
    return most * Decimal(2.0**-52) if estimator != "rloo" else Decimal(0)


@given(any_scores)
@example([("a", 0.3), ("a", 0.1 + 0.2), ("b", 1.7e308), ("b", -1.7e308)])
def test_prompts_with_signal_are_those_with_an_advantage(sessions):
    prompt, score = zip(*sessions, strict=True)
    scores = Scores.from_columns(prompt=prompt, session=range(len(score)), score=score)
    moved = {name for name, value in zip(prompt, advantages(sessions, "grpo"), strict=True) if value}
    assert prompts_with_signal(scores) == moved


@pytest.mark.parametrize("estimator", NORMALISED)
@given(usual_scores, st.integers(-900, 900))
def test_rewards_in_other_units_have_the_same_advantages(estimator, sessions, exponent):
    scaled = [(name, ldexp(score, exponent)) for name, score in sessions]
    assert advantages(scaled, estimator).tolist() == advantages(sessions, estimator).tolist()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(usual_scores, st.integers(-1000, 1000))
def test_a_reward_added_to_every_session_changes_no_advantage(estimator, sessions, more):
    shifted = [(name, score + more) for name, score in sessions]
    np.testing.assert_allclose(advantages(shifted, estimator), advantages(sessions, estimator), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(st.floats(1e-300, 1e300), st.lists(st.integers(-4, 4), min_size=1, max_size=8))
@example(0.3, [0, 1])
def test_scores_that_differ_by_rounding_alone_have_no_advantage(estimator, score, ulps):
    """reinforce++ made advantages of -1 and 0 of the scores 0.3 and 0.1 + 0.2."""
    sessions = [("a", score + count * float(np.spacing(score))) for count in ulps]
    assert advantages(sessions, estimator).tolist() == [0.0] * len(ulps)
