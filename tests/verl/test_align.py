# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The deal of rows to verl's mini-batches and ranks: properties over ragged batches, and figures of verl's faults."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raggedright import Layout, Rows, close_ledger
from raggedright.integrations.verl.align import Grid, by_rank, make_verl_plan

pytestmark = pytest.mark.filterwarnings("ignore")


@st.composite
def batches(draw) -> Rows:
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


@settings(max_examples=60)
@given(batches(), st.sampled_from([1, 2, 3, 8]), st.integers(1, 6), st.sampled_from([1, 2, 3]), st.booleans())
def test_every_row_once_and_equal_counts_on_every_rank_and_step(rows, dp_size, mini_batch_size, multiple, trains):
    layout = Layout(dp_size=dp_size, batch_size=6, mini_batch_size=mini_batch_size, rollout_n=2)
    critic = Grid(dp_size=dp_size, mini_batch_size=3, rows_multiple=multiple)
    plan = make_verl_plan(rows, layout, Grid(dp_size=dp_size, mini_batch_size=mini_batch_size, trains=trains), critic)
    close_ledger(plan)
    trainable = int((rows.loss_tokens > 0).sum())
    for role in plan.trained_roles:
        steps = plan.steps(role)
        configured = -(-6 // (mini_batch_size if role == "actor" else 3))
        assert len(steps) == max(1, min(configured, trainable))
        sizes = [np.diff(step.bounds) for step in steps]
        assert len({int(size) for of_step in sizes for size in of_step}) == 1
        assert all(size % (multiple if role == "critic" else 1) == 0 for size in sizes[0])
        real = [int((step.row < len(rows)).sum()) for step in steps]
        assert max(real) - min(real) <= 1
        learned = [int((rows.loss_tokens[step.row[step.row < len(rows)]] > 0).sum()) for step in steps]
        assert min(learned) > 0 or trainable == 0
        assert sorted(by_rank(steps).tolist()) == list(range(len(by_rank(steps))))
        equal = dp_size * (multiple if role == "critic" else 1)
        assert len(by_rank(steps)) - len(rows) < equal * len(steps) or len(rows) < len(steps)


def test_padding_is_what_the_ranks_need_and_no_more():
    """verl 0.9.1 pads to the LCM: dp 2, mini-batch 32 x n 4, 298 rows -> 384; two would do."""
    rows = one_row_sessions(298)
    layout = Layout(dp_size=2, batch_size=96, mini_batch_size=32, rollout_n=4)
    assert make_verl_plan(rows, layout, Grid(dp_size=2, mini_batch_size=32)).num_padding_rows == 2


def test_real_rows_are_spread_over_the_mini_batches():
    """verl 0.9.1, mini-batch 256, dp 8: 257 rows -> 255 padding rows and an optimizer step on 1 real row."""
    rows = one_row_sessions(257)
    for align, padding in (("steps", 15), ("lcm", 255)):
        layout = Layout(dp_size=8, batch_size=256, mini_batch_size=128, rollout_n=2, align=align)
        plan = make_verl_plan(rows, layout, Grid(dp_size=8, mini_batch_size=128))
        assert [int((step.row < 257).sum()) for step in plan.steps("actor")] in ([128, 129], [129, 128])
        assert plan.num_padding_rows == padding


def test_ranks_are_level_within_each_mini_batch():
    rows = one_row_sessions(400, lengths=np.random.default_rng(0).lognormal(6, 1, 400).astype(int) + 1)
    layout = Layout(dp_size=4, batch_size=400, mini_batch_size=100, rollout_n=1)
    plan = make_verl_plan(rows, layout, Grid(dp_size=4, mini_batch_size=100))
    for step in plan.steps("actor"):
        tokens = [int(plan.lengths[step.row[a:b]].sum()) for a, b in pairwise(step.bounds)]
        assert max(tokens) / np.mean(tokens) < 1.03


def one_row_sessions(count: int, lengths: np.ndarray | None = None) -> Rows:
    return Rows.from_columns(
        prompt=[f"p{i}" for i in range(count)], session=[0] * count, trajectory=[0] * count, prompt_tokens=[2] * count,
        response_tokens=lengths if lengths is not None else [5] * count,
    )  # fmt: skip
