"""Advantages of a round's tokens, by hand: what counts a session, what counts a row, what counts a token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from raggedright.config import Config
from raggedright.config.load import make_config
from raggedright.store.listing import listing_of
from raggedright.store.protocol import Key, RowEntry, SessionEntry, SessionKey
from raggedright.store.rows import rows_of
from raggedright.train.advantages import token_advantages, token_rewards
from raggedright.train.round import check_any
from raggedright.train.sealed import SealedRound
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


def sealed_round(scores: dict[int, float | None], rewards: dict[tuple[int, int], float] | None = None) -> SealedRound:
    """One prompt; a session whose score is None has failed."""
    sessions = []
    for number, score in scores.items():
        key = SessionKey(1, "p", number)
        rows = tuple(
            RowEntry(
                key=Key(*key, trajectory),
                prompt_tokens=2,
                response_tokens=len(mask),
                loss_tokens=int(sum(mask)),
                is_padding=False,
                tags={"reward": (rewards or {}).get((number, trajectory))},
                field_names=frozenset(),
            )
            for trajectory, mask in enumerate(MASKS[number] if score is not None else [])
        )
        state = "failed" if score is None else "finished"
        sessions.append(SessionEntry(key=key, state=state, cause="" if rows else "raised", score=score, rows=rows))
    return SealedRound(1, listing_of(sessions), rows_of(sessions))


def tokens_of(sealed: SealedRound, **columns: float) -> dict[str, torch.Tensor]:
    mask = torch.tensor([m for e in sealed.entries for m in MASKS[e.key.session][e.key.trajectory]]).double()
    named = {name: torch.full_like(mask, value) for name, value in columns.items()}
    return {"response_mask": mask, "old_log_probs": torch.zeros_like(mask), **named}


def test_every_loss_token_of_a_session_gets_its_advantage_and_no_other():
    sealed = sealed_round({0: 1.0, 1: 0.0})
    config = config_with(algorithm={"std": False})
    found = token_advantages(config, sealed, sealed.scores("exclude"), tokens_of(sealed))
    assert found.advantages.tolist() == [0.5, 0.0, 0.5, 0.5, -0.5, -0.5, 0.0]
    assert found.metrics["critic/advantages/mean"] == pytest.approx((3 * 0.5 - 2 * 0.5) / 5)


def test_a_failed_session_is_left_out_of_its_group_or_scores_zero():
    sealed = sealed_round({0: 1.0, 1: None})
    config = config_with(algorithm={"advantages": "rloo"})
    alone, beside_zero = (
        token_advantages(config, sealed, sealed.scores(policy), tokens_of(sealed)) for policy in ("exclude", "zero")
    )
    assert alone.advantages[3] == 0.0
    assert beside_zero.advantages[3] == 1.0


def test_kl_in_the_reward_is_taken_off_as_its_sum_over_the_session():
    sealed = sealed_round({0: 1.0, 1: 1.0})
    config = config_with(algorithm={"std": False}, reference={"kl": "reward", "coef": 0.5, "estimator": "k1"})
    tokens = tokens_of(sealed, ref_log_probs=-0.2)  # 0.2 nats a loss token: three in session 0, two in session 1
    found = token_advantages(config, sealed, sealed.scores("exclude"), tokens)
    assert found.advantages[3] == pytest.approx((1 - 0.3) - (2 - 0.5) / 2)
    assert found.metrics["actor/reward_kl_penalty"] == pytest.approx(0.1)


def test_gae_puts_a_rows_reward_on_its_last_loss_token():
    sealed = sealed_round({0: 1.0, 1: 0.25}, rewards={(0, 1): 3.0})
    rewards = token_rewards(sealed, tokens_of(sealed)["response_mask"].bool(), None)
    assert rewards.tolist() == [0.0, 0.0, 1.0, 3.0, 0.0, 0.25, 0.0]


def test_gae_without_discount_returns_the_reward_at_every_loss_token():
    sealed = sealed_round({0: 1.0, 1: 0.25})
    config = config_with(algorithm={"advantages": "gae", "whiten": False}, critic={"mini_batch_size": 1})
    found = token_advantages(config, sealed, sealed.scores("exclude"), tokens_of(sealed, values=0.5))
    assert found.returns is not None
    assert found.returns.tolist() == [1.0, 0.0, 1.0, 1.0, 0.25, 0.25, 0.0]
    assert found.advantages.tolist() == [0.5, 0.0, 0.5, 0.5, -0.25, -0.25, 0.0]


def test_a_round_without_a_generated_token_ends_the_run_with_what_may_be_missing():
    sealed = sealed_round({0: 1.0, 1: 0.0})
    check_any(sealed)
    silent = np.zeros_like(sealed.rows.loss_tokens)
    with pytest.raises(TrainError, match=r"none of its \d+ rows has a token that was generated.*is an `await` missing"):
        check_any(replace(sealed, rows=replace(sealed.rows, loss_tokens=silent)))
