"""Faults of other planners, each a test: the name is the claim, the docstring the peer and its figure."""

import math
from dataclasses import replace

import numpy as np
import pytest

from properties.checks import check_plan, length_of, micro_batches, real_rows
from raggedright import Layout, Plan, Rows, make_plan
from raggedright.plan.layout import Align, LossAgg

ALIGNS: tuple[Align, ...] = ("steps", "lcm")
SEQ_MODES: tuple[LossAgg, ...] = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def make_rows(num_rows: int, num_prompts: int, *, low: int = 2, high: int = 900, seed: int = 0) -> Rows:
    return Rows.from_columns(
        prompt=[f"p{i % num_prompts:03}" for i in range(num_rows)],
        session=np.arange(num_rows) // num_prompts,
        trajectory=np.zeros(num_rows, dtype=np.int64),
        prompt_tokens=np.ones(num_rows, dtype=np.int64),
        response_tokens=np.random.default_rng(seed).integers(low - 1, high, num_rows),
    )


def planned(rows: Rows, layout: Layout) -> Plan:
    plan = make_plan(rows, layout)
    check_plan(plan)
    return plan


def weight_by_key(plan: Plan) -> dict[str, float]:
    """Weight of each real row over the steps of one epoch."""
    return {
        str(plan.rows.key[i]): weight
        for step in plan.steps("actor")
        for i, weight in zip(step.row.tolist(), step.weight.tolist(), strict=True)
        if i < len(plan.rows)
    }


@pytest.mark.parametrize("align", ALIGNS)
def test_no_step_is_left_with_one_real_row(align: Align) -> None:
    """verl 0.9.1: mini-batch 256, dp 8, 257 rows -> 255 padding rows and an optimizer step on 1 real row."""
    layout = Layout(dp_size=8, batch_size=64, mini_batch_size=32, rollout_n=8, align=align)
    plan = planned(make_rows(257, 64), layout)
    assert [len(real_rows(plan, step)) >= 128 for step in plan.steps("actor")] == [True, True]
    assert plan.num_padding_rows == (255 if align == "lcm" else 0)


@pytest.mark.parametrize("align", ALIGNS)
def test_a_step_of_padding_alone_is_skipped(align: Align) -> None:
    """verl 0.9.1: a padding-only mini-batch still steps AdamW; weights move by 77 % of the previous step."""
    layout = Layout(dp_size=2, batch_size=8, mini_batch_size=2, rollout_n=1, align=align, critic_mini_batch_size=8)
    plan = planned(make_rows(1, 1), layout)
    assert sum(not step.skipped for step in plan.steps("actor")) == 1
    assert len(plan.steps("actor")) == 4


@pytest.mark.parametrize("loss_agg", SEQ_MODES)
def test_padding_is_in_no_denominator(loss_agg: LossAgg) -> None:
    """verl 0.9.1: 20 real + 12 padding rows, dp 4: the gradient of sequence means is off by 0.375 (12 / 32)."""
    layout = Layout(dp_size=4, batch_size=8, mini_batch_size=8, rollout_n=4, align="lcm", loss_norm_tokens=1_000)
    plan = planned(make_rows(20, 8), replace(layout, loss_agg=loss_agg))
    assert plan.num_padding_rows == 12
    per_row = {"seq-mean-token-sum": 1 / 20, "seq-mean-token-sum-norm": 1 / 20_000}
    weights = weight_by_key(plan)
    for key, loss_tokens in zip(plan.rows.key.tolist(), plan.rows.loss_tokens.tolist(), strict=True):
        assert weights[key] == per_row.get(loss_agg, 1 / (20 * loss_tokens))


def test_padding_tokens_are_in_no_token_denominator() -> None:
    """rLLM #508: padding tokens in the denominator take ~40 % off the effective learning rate."""
    layout = Layout(dp_size=4, batch_size=8, mini_batch_size=8, rollout_n=4, align="lcm", min_row_tokens=512)
    plan = planned(make_rows(20, 8, high=40), layout)
    assert set(weight_by_key(plan).values()) == {1 / int(plan.rows.loss_tokens.sum())}


@pytest.mark.parametrize("loss_agg", SEQ_MODES)
def test_weights_do_not_depend_on_the_cut(loss_agg: LossAgg) -> None:
    """verl 0.9.1: the norm mode depends on the micro-batch cut even without padding (0.434)."""
    rows = make_rows(64, 8)
    one = Layout(dp_size=1, batch_size=8, mini_batch_size=4, rollout_n=8, loss_agg=loss_agg, loss_norm_tokens=1_000)
    weights = weight_by_key(planned(rows, one))
    for dp_size in (2, 5, 64):
        for cut in (replace(one, micro_batch_tokens=900), replace(one, micro_batch_tokens=None, micro_batch_rows=1)):
            assert weight_by_key(planned(rows, replace(cut, dp_size=dp_size, micro_batch_multiple=2))) == weights


@pytest.mark.parametrize("num_rows", [16, 100, 512, 1_300, 3_509])
def test_optimizer_steps_do_not_grow_with_rows(num_rows: int) -> None:
    """verl, Agent Lightning, verl-agent, ROLL #407: 16 configured, 38-54 taken; schedule exhausted at 123 of 200."""
    layout = Layout(dp_size=8, batch_size=64, mini_batch_size=4, rollout_n=8)
    assert len(make_plan(make_rows(num_rows, 64), layout).steps("actor")) == 16


@pytest.mark.parametrize("num_prompts", [1, 15, 44, 45, 46, 90])
def test_optimizer_steps_do_not_depend_on_how_many_prompts_arrived(num_prompts: int) -> None:
    layout = Layout(dp_size=2, batch_size=45, mini_batch_size=15, rollout_n=8, epochs=2)
    assert len(planned(make_rows(180, num_prompts), layout).steps("actor")) == 6


@pytest.mark.parametrize("align", ALIGNS)
def test_one_failed_rollout_drops_no_other_row(align: Align) -> None:
    """Agent Lightning drops 20 % of the rows to fit, slime 24.9 % of a batch after one failed rollout."""
    rows = make_rows(512, 64)
    layout = Layout(dp_size=8, batch_size=64, mini_batch_size=16, rollout_n=8, align=align)
    plan = planned(rows.take(rows.order != 100), layout)
    assert sum(len(real_rows(plan, step)) for step in plan.steps("actor")) == 511
    assert len(plan.dropped) == 0


@pytest.mark.parametrize("quadratic", [1, 1_000, 1_000_000])
def test_levelling_by_cost_never_exceeds_the_token_cap(quadratic: int) -> None:
    """slime: 33-66 % of micro-batches exceed the cap when it balances by FLOPs."""
    for seed in range(3):
        rows = make_rows(600, 60, low=2, high=8_192, seed=seed)
        layout = Layout(dp_size=8, batch_size=60, mini_batch_size=30, cost_quadratic=quadratic, cost_linear=1)
        for step in make_plan(rows, layout).steps("actor"):
            tokens = np.add.reduceat(rows.tokens[step.row], step.bounds[:-1])
            assert tokens.max() <= 8_192


def test_a_micro_batch_of_padding_costs_two_tokens() -> None:
    """prime-rl: a dummy micro-batch copies the heaviest one, at full cost."""
    plan = planned(make_rows(5, 5, low=700), Layout(dp_size=8, batch_size=5, mini_batch_size=5))
    (step,) = plan.steps("actor")
    padding = [batch for _, _, batch in micro_batches(step) if batch[0] >= len(plan.rows)]
    assert [[length_of(plan, i) for i in batch] for batch in padding] == [[2]] * 3
    assert plan.padded_rows.tokens[5:].tolist() == [2] * 3


def test_rows_are_split_before_padding_is_added() -> None:
    """prime-rl and others add dummy micro-batches; here 9 rows that fit 1 micro-batch make 8 without padding."""
    plan = planned(make_rows(9, 9, high=100), Layout(dp_size=8, batch_size=9, mini_batch_size=9))
    (step,) = plan.steps("actor")
    assert (step.num_micro_batches, plan.num_padding_rows) == (8, 0)


def test_padding_rows_are_as_long_as_context_parallel_needs() -> None:
    """verl #7449: a padding row of 2 tokens breaks packed context parallel."""
    layout = Layout(dp_size=8, batch_size=5, mini_batch_size=5, min_row_tokens=32, micro_batch_tokens=900)
    plan = planned(make_rows(5, 5, high=20), layout)
    assert plan.padded_rows.tokens[5:].tolist() == [32] * 3
    assert plan.lengths.tolist() == [32] * 8
    short = planned(make_rows(60, 5, high=20), replace(layout, dp_size=1, micro_batch_tokens=64))
    assert [step.num_micro_batches for step in short.steps("actor")] == [30]


@pytest.mark.parametrize("min_row_tokens", [2, 3, 64])
def test_a_padding_row_has_a_prompt_token_and_a_response_token(min_row_tokens: int) -> None:
    """The origin: the shortest sequence is one prompt token and one response token."""
    layout = Layout(dp_size=4, batch_size=1, mini_batch_size=1, min_row_tokens=min_row_tokens)
    padding = make_plan(make_rows(1, 1), layout).padded_rows.take(np.array([1, 2, 3]))
    assert padding.prompt_tokens.min() >= 1
    assert padding.response_tokens.min() >= 1


def test_padding_copies_no_real_row() -> None:
    """verl-agent and ROLL copy real rows, unmasked, and pollute the statistics of their group."""
    plan = planned(make_rows(3, 1), Layout(dp_size=8, batch_size=1, mini_batch_size=1))
    padded = plan.padded_rows
    assert padded.prompt_index[:3].tolist() == [padded.prompt_index[0]] * 3
    assert len(set(padded.prompt[3:].tolist()) | {padded.prompt[0]}) == 6
    assert not padded.loss_tokens[3:].any()


@pytest.mark.parametrize("dp_size", [2, 8])
def test_padding_is_below_the_data_parallel_size_of_a_step(dp_size: int) -> None:
    """rLLM #506, verl-agent: the world size taken for the data-parallel size over-pads by TP x PP x CP."""
    plan = planned(make_rows(dp_size + 1, 1, low=600), Layout(dp_size=dp_size, batch_size=1, mini_batch_size=1))
    assert plan.num_padding_rows < dp_size
    lcm = Layout(dp_size=dp_size, batch_size=4, mini_batch_size=3, rollout_n=5, align="lcm")
    assert planned(make_rows(31, 4), lcm).multiple == math.lcm(dp_size, 15)
