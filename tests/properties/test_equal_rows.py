"""`cut = "equal-rows"`: its invariants over ragged batches, and figures of verl's faults."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raggedright import Layout, Rows, close_ledger, make_plan
from raggedright.plan.layout import Align


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Up to 12 sessions of up to 5 rows, some without loss tokens."""
    sessions = draw(
        st.lists(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=5), min_size=1, max_size=12)
    )
    rows = [(i, t, 1 + tokens, learns) for i, of in enumerate(sessions) for t, (tokens, learns) in enumerate(of)]
    return Rows.from_columns(
        prompt=[f"p{i // 2}" for i, _, _, _ in rows],
        session=[i % 2 for i, _, _, _ in rows],
        trajectory=[t for _, t, _, _ in rows],
        prompt_tokens=[3] * len(rows),
        response_tokens=[tokens for _, _, tokens, _ in rows],
        loss_tokens=[tokens * learns for _, _, tokens, learns in rows],
    )


@given(
    batches(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 5]), st.integers(1, 6), st.sampled_from([1, 2, 3]),
    st.booleans(), st.sampled_from(["steps", "lcm"]), st.integers(1, 2),
)  # fmt: skip
def test_every_row_once_and_equal_counts_on_every_rank_and_step(
    rows: Rows, dp_size: int, critic_dp_size: int, mini_batch_size: int, multiple: int, trains: bool, align: Align,
    epochs: int,
) -> None:  # fmt: skip
    layout = Layout(
        cut="equal-rows", dp_size=dp_size, batch_size=6, mini_batch_size=mini_batch_size, rollout_n=2, align=align,
        actor_trains=trains, critic_mini_batch_size=3, critic_dp_size=critic_dp_size, critic_rows_multiple=multiple,
        epochs=epochs,
    )  # fmt: skip
    plan = make_plan(rows, layout)
    close_ledger(plan)
    trainable = int((rows.loss_tokens > 0).sum())
    for role in plan.trained_roles:
        role_layout = layout.actor if role == "actor" else layout.critic
        assert role_layout is not None
        for epoch in range(epochs):
            steps = [step for step in plan.steps(role) if step.epoch == epoch]
            if align == "steps":
                assert len(steps) == max(1, min(-(-6 // role_layout.mini_batch_size), trainable))
            rows_of_rank = {int(size) for step in steps for size in np.diff(step.bounds)}
            assert len(rows_of_rank) == 1
            assert rows_of_rank.pop() % role_layout.rows_multiple == 0
            assert all((step.dp_size, step.num_slots) == (role_layout.dp_size, 1) for step in steps)
            real = [step.row[step.row < len(rows)] for step in steps]
            assert max(map(len, real)) - min(map(len, real)) <= 1
            learned = [int((rows.loss_tokens[row] > 0).sum()) for row in real]
            assert max(learned) - min(learned) <= 1
            assert min(learned) > 0 or trainable == 0
            placed = sorted(position for step in steps for position in step.row.tolist())
            assert placed == list(range(len(placed)))
            equal = role_layout.dp_size * role_layout.rows_multiple
            if align == "steps":
                assert len(placed) - len(rows) < equal * len(steps) or len(rows) < len(steps)


@given(batches(), st.sampled_from([1, 2, 3, 8]), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(rows: Rows, dp_size: int, random: Random) -> None:
    layout = Layout(cut="equal-rows", dp_size=dp_size, batch_size=6, mini_batch_size=2, rollout_n=2)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = make_plan(rows.take(np.array(order, dtype=np.int64)), layout)
    assert shuffled.digest() == make_plan(rows, layout).digest()


def test_padding_rows_in_the_input_are_ignored() -> None:
    rows = one_row_sessions(13)
    layout = Layout(cut="equal-rows", dp_size=2, batch_size=13, mini_batch_size=4)
    assert make_plan(rows.with_padding(5, 2), layout).num_padding_rows == make_plan(rows, layout).num_padding_rows == 3


def test_padding_is_what_the_ranks_need_and_no_more() -> None:
    """verl 0.9.1 pads to the LCM: dp 2, mini-batch 32 x n 4, 298 rows -> 384; two would do."""
    layout = Layout(cut="equal-rows", dp_size=2, batch_size=96, mini_batch_size=32, rollout_n=4)
    assert make_plan(one_row_sessions(298), layout).num_padding_rows == 2


def test_real_rows_are_spread_over_the_mini_batches() -> None:
    """verl 0.9.1, mini-batch 256, dp 8: 257 rows -> 255 padding rows and an optimizer step on 1 real row."""
    rows = one_row_sessions(257)
    layout = Layout(cut="equal-rows", dp_size=8, batch_size=256, mini_batch_size=128, rollout_n=2)
    for each, padding in ((layout, 15), (replace(layout, align="lcm"), 255)):
        plan = make_plan(rows, each)
        assert [int((step.row < 257).sum()) for step in plan.steps("actor")] in ([128, 129], [129, 128])
        assert plan.num_padding_rows == padding


def test_ranks_are_level_within_each_mini_batch() -> None:
    rows = one_row_sessions(400, lengths=np.random.default_rng(0).lognormal(6, 1, 400).astype(int) + 1)
    plan = make_plan(rows, Layout(cut="equal-rows", dp_size=4, batch_size=400, mini_batch_size=100))
    for step in plan.steps("actor"):
        tokens = [int(plan.lengths[step.row[a:b]].sum()) for a, b in pairwise(step.bounds)]
        assert max(tokens) / np.mean(tokens) < 1.03


def one_row_sessions(count: int, lengths: np.ndarray | None = None) -> Rows:
    return Rows.from_columns(
        prompt=[f"p{i}" for i in range(count)], session=[0] * count, trajectory=[0] * count, prompt_tokens=[2] * count,
        response_tokens=lengths if lengths is not None else [5] * count,
    )  # fmt: skip
