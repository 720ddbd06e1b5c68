"""Advantages of a round's tokens, by hand: what counts a session, what counts a row, what counts a token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from raggedright.config import Config
from raggedright.config.load import make_config
from raggedright.errors import RowsError
from raggedright.sessions import Session, SessionKey, SessionTable, Trajectory
from raggedright.train.token_advantages import token_advantages, token_rewards
from raggedright.train.train_round import check_learnable
from raggedright.train.world import TrainError

MASKS = {0: [[1.0, 0.0, 1.0], [1.0]], 1: [[1.0, 1.0, 0.0]]}  # of session 0's two rows and of session 1's one


def config_with(**sections: dict[str, object]) -> Config:
    return make_config(
        {
            "model": {"made": {"model_type": "qwen3"}, "symbols": "01"},
            "prompts": {"source": "tasks.jsonl"},
            "agent": {"name": "compaction"},
            "train": {"rounds": 2, "batch_size": 1, "mini_batch_size": 1},
            **sections,
        },
        source="test",
    )


def table_of(scores: dict[int, float | None], rewards: dict[tuple[int, int], float] | None = None) -> SessionTable:
    """One prompt; a session whose score is None has failed."""
    sessions = []
    for number, score in scores.items():
        trajectories = [
            Trajectory(
                input_ids=np.arange(2 + len(mask)),
                response_mask=np.array(mask, dtype=np.int64),
                rollout_log_probs=np.zeros(len(mask)),
                reward=(rewards or {}).get((number, i)),
            )
            for i, mask in enumerate(MASKS[number] if score is not None else [])
        ]
        cause = "raised" if score is None else ""
        sessions.append(Session(key=SessionKey(1, "p", number), score=score, cause=cause, trajectories=trajectories))
    return SessionTable.of(1, sessions)


def tokens_of(table: SessionTable, **columns: float) -> dict[str, torch.Tensor]:
    names = zip(table.rows.session.tolist(), table.rows.trajectory.tolist(), strict=True)
    mask = torch.tensor([m for session, trajectory in names for m in MASKS[session][trajectory]]).double()
    named = {name: torch.full_like(mask, value) for name, value in columns.items()}
    return {"response_mask": mask, "old_log_probs": torch.zeros_like(mask), **named}


def test_every_loss_token_of_a_session_gets_its_advantage_and_no_other():
    table = table_of({0: 1.0, 1: 0.0})
    config = config_with(algorithm={"std": False})
    found = token_advantages(config, table, table.scores("exclude"), tokens_of(table))
    assert found.advantages.tolist() == [0.5, 0.0, 0.5, 0.5, -0.5, -0.5, 0.0]
    assert found.metrics["critic/advantages/mean"] == pytest.approx((3 * 0.5 - 2 * 0.5) / 5)


def test_a_failed_session_is_left_out_of_its_group_or_scores_zero():
    table = table_of({0: 1.0, 1: None})
    config = config_with(algorithm={"advantages": "rloo"})
    alone, beside_zero = (
        token_advantages(config, table, table.scores(policy), tokens_of(table)) for policy in ("exclude", "zero")
    )
    assert alone.advantages[3] == 0.0
    assert beside_zero.advantages[3] == 1.0


def test_kl_in_the_reward_is_taken_off_as_its_sum_over_the_session():
    table = table_of({0: 1.0, 1: 1.0})
    config = config_with(algorithm={"std": False}, reference={"kl": "reward", "coef": 0.5, "estimator": "k1"})
    tokens = tokens_of(table, ref_log_probs=-0.2)  # 0.2 nats a loss token: three in session 0, two in session 1
    found = token_advantages(config, table, table.scores("exclude"), tokens)
    assert found.advantages[3] == pytest.approx((1 - 0.3) - (2 - 0.5) / 2)
    assert found.metrics["actor/reward_kl_penalty"] == pytest.approx(0.1)


def test_gae_puts_a_rows_reward_on_its_last_loss_token():
    table = table_of({0: 1.0, 1: 0.25}, rewards={(0, 1): 3.0})
    rewards = token_rewards(table, tokens_of(table)["response_mask"].bool(), None)
    assert rewards.tolist() == [0.0, 0.0, 1.0, 3.0, 0.0, 0.25, 0.0]


def test_gae_without_discount_returns_the_reward_at_every_loss_token():
    table = table_of({0: 1.0, 1: 0.25})
    config = config_with(algorithm={"advantages": "gae", "whiten": False}, critic={"mini_batch_size": 1})
    found = token_advantages(config, table, table.scores("exclude"), tokens_of(table, values=0.5))
    assert found.returns is not None
    assert found.returns.tolist() == [1.0, 0.0, 1.0, 1.0, 0.25, 0.25, 0.0]
    assert found.advantages.tolist() == [0.5, 0.0, 0.5, 0.5, -0.25, -0.25, 0.0]


def test_a_round_without_a_generated_token_ends_the_run_with_what_may_be_missing():
    table = table_of({0: 1.0, 1: 0.0})
    check_learnable(table)
    silent = np.zeros_like(table.row_columns["loss_tokens"])
    with pytest.raises(TrainError, match=r"none of its \d+ rows has a token that was generated.*is an `await` missing"):
        check_learnable(replace(table, row_columns={**table.row_columns, "loss_tokens": silent}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ["rloo", "gae"])
def test_an_advantage_that_is_too_large_to_train_with_names_its_row(estimator, dtype):
    """Rewards of 1e308 trained on infinite advantages, or on none, without a word."""
    table = table_of({0: 0.0, 1: 1e308})
    mini_batch_size = 1 if estimator == "gae" else None
    config = config_with(algorithm={"advantages": estimator}, critic={"mini_batch_size": mini_batch_size})
    tokens = {name: flat.to(dtype) for name, flat in tokens_of(table, values=0.5).items()}
    with pytest.raises(RowsError, match=r"row p/\d/0: its advantage or return is .*(inf|e\+308), too large"):
        token_advantages(config, table, table.scores("exclude"), tokens)


def test_huge_rewards_train_with_an_estimator_that_normalises():
    table = table_of({0: 0.0, 1: 1e308})
    found = token_advantages(config_with(), table, table.scores("exclude"), tokens_of(table))
    assert found.advantages[4].item() == pytest.approx(0.5**0.5)
