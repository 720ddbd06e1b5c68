"""Every mode against hand calculations; `properties` compares them with a naive one over random batches."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.naive import declared_sum, denominators
from properties.strategies import LOSS_AGGS, batches
from raggedright import ConfigError, Layout, Rows, make_plan, token_weights
from raggedright.plan.layout import LossAgg

# prompt, session, trajectory, response tokens, loss tokens, padding
TABLE = [
    ("a", 0, 0, 10, 4, False),
    ("a", 0, 1, 10, 6, False),
    ("a", 1, 0, 10, 5, False),
    ("b", 0, 0, 10, 5, False),
    ("b", 1, 0, 10, 0, False),  # no loss token: counts nowhere
    ("c", 0, 0, 10, 0, False),  # a prompt without any
    ("x", 0, 0, 10, 9, True),  # padding, whatever it says
]
BY_HAND: dict[LossAgg, list[Fraction]] = {
    "token-mean": [Fraction(1, 20)] * 4,
    "seq-mean-token-mean": [Fraction(1, 4 * t) for t in (4, 6, 5, 5)],
    "seq-mean-token-sum": [Fraction(1, 4)] * 4,
    "seq-mean-token-sum-norm": [Fraction(1, 4 * 50)] * 4,
    "session-mean": [Fraction(1, 3 * 10), Fraction(1, 3 * 10), Fraction(1, 3 * 5), Fraction(1, 3 * 5)],
    "prompt-mean": [Fraction(1, 2 * 15)] * 3 + [Fraction(1, 2 * 5)],
}


def table_rows() -> Rows:
    prompt, session, trajectory, response, loss, padding = zip(*TABLE, strict=True)
    return Rows.from_columns(
        prompt=prompt,
        session=session,
        trajectory=trajectory,
        prompt_tokens=[1] * len(TABLE),
        response_tokens=response,
        loss_tokens=loss,
        is_padding=padding,
    )


def session_of_ten() -> Rows:
    """A prompt whose first session emitted ten rows of two tokens, and whose three others one of five."""
    return Rows.from_columns(
        prompt=["p"] * 13,
        session=[0] * 10 + [1, 2, 3],
        trajectory=[*range(10), 0, 0, 0],
        prompt_tokens=[1] * 13,
        response_tokens=[2] * 10 + [5] * 3,
    )


def test_every_mode_is_calculated_by_hand() -> None:
    assert set(BY_HAND) == set(LOSS_AGGS)


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_weights_match_the_hand_calculation(loss_agg: LossAgg) -> None:
    weights = token_weights(table_rows(), loss_agg, loss_norm_tokens=50)
    assert weights.dtype == np.float64
    assert weights.tolist() == [*map(float, BY_HAND[loss_agg]), 0.0, 0.0, 0.0]


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_items_are_counted_within_each_step(loss_agg: LossAgg) -> None:
    """Session a/0 and prompt a stand in both steps, as align lcm may cut them."""
    rows = table_rows()
    step = np.array([0, 1, 1, 0, 0, 1, 1])
    weights = token_weights(rows, loss_agg, step=step, loss_norm_tokens=50)
    for number in (0, 1):
        alone = rows.take(step == number)
        assert weights[step == number].tolist() == token_weights(alone, loss_agg, loss_norm_tokens=50).tolist()


def test_by_hand_within_steps() -> None:
    """Step 0 holds a/0/0 (4 tokens) and b/0/0 (5), step 1 a/0/1 (6) and a/1/0 (5)."""
    step = np.array([0, 1, 1, 0, 0, 1, 1])
    by_session = token_weights(table_rows(), "session-mean", step=step)[:4]
    assert by_session.tolist() == [1 / 8, 1 / 12, 1 / 10, 1 / 10]
    by_prompt = token_weights(table_rows(), "prompt-mean", step=step)[:4]
    assert by_prompt.tolist() == [1 / 8, 1 / 11, 1 / 11, 1 / 10]


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_a_row_in_no_step_weighs_and_counts_nothing(loss_agg: LossAgg) -> None:
    rows = table_rows()
    step = np.array([0, -1, 0, -1, 0, 0, 0])
    weights = token_weights(rows, loss_agg, step=step, loss_norm_tokens=50)
    assert weights[[1, 3]].tolist() == [0.0, 0.0]
    assert weights[step == 0].tolist() == token_weights(rows.take(step == 0), loss_agg, loss_norm_tokens=50).tolist()


def test_a_session_of_ten_rows_counts_once() -> None:
    """uni-agent #185, verl #7580: 13 % of sessions had 34 % of the gradient, for they emitted more rows."""
    rows = session_of_ten()
    share = token_weights(rows, "session-mean") * rows.loss_tokens
    assert np.allclose([share[:10].sum(), *share[10:]], 0.25, rtol=1e-15)


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_padding_leaves_weights_alone(loss_agg: LossAgg) -> None:
    """verl 0.9.1: 20 real and 12 padding rows at dp 4 put sequence means off by 0.375."""
    rows = session_of_ten()
    weights = token_weights(rows.with_padding(12, 2), loss_agg, loss_norm_tokens=50)
    assert weights[:13].tolist() == token_weights(rows, loss_agg, loss_norm_tokens=50).tolist()
    assert weights[13:].tolist() == [0.0] * 12


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_token_mean_of_unequal_micro_batches_is_over_all_tokens(loss_agg: LossAgg) -> None:
    """TRL #7206: 100 tokens at 2.0 and 900 at 0.5 gave 1.25, a mean of means; the mean over tokens is 0.65."""
    rows = Rows.from_columns(
        prompt=["a", "b"], session=[0, 0], trajectory=[0, 0], prompt_tokens=[1, 1], response_tokens=[100, 900]
    )
    layout = Layout(dp_size=2, batch_size=2, mini_batch_size=2, loss_agg=loss_agg, loss_norm_tokens=1_000)
    (step,) = make_plan(rows, layout).steps("actor")
    objective = {0: 100 * 2.0, 1: 900 * 0.5}
    total = sum(weight * objective[i] for i, weight in zip(step.row.tolist(), step.weight.tolist(), strict=True))
    expected: dict[LossAgg, float] = {
        "token-mean": 0.65,
        "seq-mean-token-mean": 1.25,
        "seq-mean-token-sum": 325.0,
        "seq-mean-token-sum-norm": 0.325,
        "session-mean": 1.25,
        "prompt-mean": 1.25,
    }
    assert total == pytest.approx(expected[loss_agg], rel=1e-15)


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_without_loss_tokens_nothing_weighs(loss_agg: LossAgg) -> None:
    rows = table_rows()
    for nothing in (rows.take(rows.loss_tokens == 0), rows.take(rows.is_padding), rows.take(np.zeros(7, dtype=bool))):
        assert not token_weights(nothing, loss_agg, loss_norm_tokens=50).any()


def test_a_huge_constant_does_not_wrap_around() -> None:
    weights = token_weights(table_rows(), "seq-mean-token-sum-norm", loss_norm_tokens=2**62)
    assert weights[:4].tolist() == [1 / 2**64] * 4


def test_a_mode_without_its_constant_or_unknown_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="loss_norm_tokens"):
        token_weights(table_rows(), "seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match="'mean'"):
        token_weights(table_rows(), "mean")  # type: ignore[arg-type]


@given(batches(), st.sampled_from(LOSS_AGGS), st.integers(1, 3))
def test_weights_equal_the_naive_ones(rows: Rows, loss_agg: LossAgg, num_steps: int) -> None:
    step = np.arange(len(rows)) % (num_steps + 1) - 1
    weights = token_weights(rows, loss_agg, step=step, loss_norm_tokens=77)
    for number in range(num_steps):
        members = np.flatnonzero(step == number).tolist()
        one_over = denominators(rows, members, loss_agg, 77)
        assert weights[members].tolist() == [1.0 / one_over[i] if i in one_over else 0.0 for i in members]
        if one_over:
            losses = [int(rows.loss_tokens[i]) for i in one_over]
            total = sum(Fraction(loss, one_over[i]) for i, loss in zip(one_over, losses, strict=True))
            assert total == declared_sum(losses, loss_agg, 77)
