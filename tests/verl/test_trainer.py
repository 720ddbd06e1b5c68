# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The trainer's steps on rows in a real TransferQueue: padding rows, advantages, metrics, ledger, rows on disk."""

import math
from threading import Event, Thread

import numpy as np
import pytest
import torch
import transfer_queue as tq
from stored import Ranks, make_config, make_trainer, put_sessions, ragged_sessions
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn

from raggedright import ConfigError, Layout, Rows, Scores, make_plan, session_advantages
from raggedright.verl.queue import get_field, get_row, rows_by_field

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("queue")]
TEN_ROWS = [("p0", i, [(3, 5)] * (10 if i == 0 else 1), float(i == 0)) for i in range(4)]


def run_steps(trainer, batch) -> tuple[object, dict[str, float]]:
    """The steps of a round that need no model, from the batch to its metrics."""
    metrics: dict[str, float] = {}
    trainer._get_n_gpus_for_throughput = lambda: 1
    whole = trainer._compute_advantage(trainer._balance_batch(batch, metrics), metrics)
    trainer._compute_metrics(whole, metrics, {"step": 1.0}, global_steps=1, epoch=0)
    return whole, metrics


def advantages_by_session(whole) -> dict[str, float]:
    """The advantage of each session, which is the same in all of its rows."""
    by_session: dict[str, set[float]] = {}
    for key, values in zip(whole.keys, get_field(whole, "advantages"), strict=True):
        by_session.setdefault(key.rsplit("_", 1)[0], set()).add(float(values[0]))
    assert all(len(values) == 1 for values in by_session.values())
    return {
        key.rsplit("_", 1)[1]: values.pop() for key, values in by_session.items() if not key.startswith("<padding>")
    }


@pytest.mark.parametrize("kind", ["text", "images", "experts"])
def test_padding_rows_have_every_field_of_the_real_ones(kind, tmp_path):
    """verl 0.9.1 copies row 0, including per-token fields that it does not know, at full length."""
    batch = put_sessions(ragged_sessions(), kind=kind, extra=True)
    whole, metrics = run_steps(make_trainer(make_config(tmp_path), Ranks(4)), batch)
    padding = whole.keys[len(batch) :]
    assert len(padding) == metrics["ledger/total/padding_rows"] == -len(batch) % 8
    assert {len(positions) for positions in rows_by_field(whole).values()} == {len(whole)}
    row = get_row(whole, padding[-1])
    assert row["input_ids"].tolist() == [1, 1]
    assert row["unknown_field"].shape == (1, 3)
    assert row["position_ids"].shape == ((4, 2) if kind == "images" else (2,))
    assert not row["response_mask"].any()
    assert row["multi_modal_inputs"] == {}
    if kind == "experts":
        assert row["routed_experts"].tolist() == [[[0, 1, 2]] * 2] * 2
    assert len({get_row(whole, key)["uid"] for key in padding}) == len(padding)


def test_padding_rows_also_have_fields_that_only_some_rows_have(tmp_path):
    """Trinity-RFT #568 crashes on a dummy row without routed_experts; here only some rows have it."""
    routed, plain = put_sessions(ragged_sessions(2), kind="experts"), put_sessions(ragged_sessions(2, seed=8))
    routed.keys, routed.tags = routed.keys + plain.keys, routed.tags + plain.tags
    whole = make_trainer(make_config(tmp_path), Ranks(8))._balance_batch(routed, {})
    assert len(whole) > len(routed)
    assert get_row(whole, whole.keys[-1])["routed_experts"].shape == (2, 2, 3)


def test_a_batch_is_planned_while_agent_loops_write_other_rows(tmp_path):
    """In the asynchronous modes, TransferQueue 0.1.11 cannot copy its dictionaries while rows are written."""
    others, stop = [], Event()

    def write() -> None:
        while not stop.is_set():
            others.append(put_sessions(ragged_sessions(2), extra=len(others) % 2 == 0))

    trainer, writer = make_trainer(make_config(tmp_path), Ranks(4)), Thread(target=write, daemon=True)
    writer.start()
    try:
        for seed in range(6):
            batch = put_sessions(ragged_sessions(seed=seed))
            whole, _ = run_steps(trainer, batch)
            assert {len(positions) for positions in rows_by_field(whole).values()} == {len(whole)}
    finally:
        stop.set()
        writer.join()
    assert len(others) > 6
    tq.kv_clear(keys=[key for other in others for key in other.keys], partition_id="train")


def test_padding_rows_are_as_long_as_context_parallel_needs(tmp_path):
    """verl #7449: a two-token padding row breaks packed context parallel."""
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    config = make_config(tmp_path, **{"actor_rollout_ref.actor.megatron": sizes})
    whole = make_trainer(config, Ranks(8))._balance_batch(put_sessions(ragged_sessions()), {})
    row = get_row(whole, whole.keys[-1])
    assert (len(row["input_ids"]), len(row["prompts"]), len(row["old_log_probs"])) == (16, 1, 15)


@pytest.mark.parametrize("settings", [{}, {"trainer.v1.raggedright.align": "lcm"}, {"trainer.critic_warmup": 5}])
def test_padding_does_not_change_metrics(settings, tmp_path):
    """verl #7771: one sequence, 3 padding rows: training_ppl 7.39 -> 2.60; its KL controller is affected as well."""
    keys = {"algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "gae", **settings}
    by_dp_size = []
    for dp_size in (1, 8):
        trainer = make_trainer(make_config(tmp_path, **keys), Ranks(dp_size), Ranks(dp_size))
        by_dp_size.append(run_steps(trainer, put_sessions(ragged_sessions()))[1])
    assert by_dp_size[0]["ledger/total/padding_rows"] < by_dp_size[1]["ledger/total/padding_rows"]
    performance = (
        "global_seqlen",
        "perf",
        "timing",
        "ledger/total/padding",
        "raggedright",
        "ledger/total/actor",
        "ledger/total/critic",
    )
    same = {name: value for name, value in by_dp_size[0].items() if not name.startswith(performance)}
    assert {"rollout_corr/training_ppl", "actor/reward_kl_penalty", "critic/advantages/mean"} <= set(same)
    for name, value in same.items():
        assert by_dp_size[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_score_counts_each_session_once(tmp_path):
    _, metrics = run_steps(make_trainer(make_config(tmp_path), Ranks(2)), put_sessions(TEN_ROWS))
    assert metrics["critic/score/mean"] == 0.25
    assert metrics["rows_per_session/mean"] == 13 / 4


@pytest.mark.parametrize("estimator", list(AdvantageEstimator))
def test_every_estimator_counts_each_session_once_or_is_refused_by_name(estimator, tmp_path):
    """verl 0.9.1: rewards 1, 0, 0, 0 and 10 rows in session 0: RLOO 0.25 (right: 1.0)."""
    config = make_config(tmp_path, **{"algorithm.adv_estimator": estimator.value, "actor_rollout_ref.rollout.n": 4})
    refused = ("remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")
    if estimator.value in refused:
        with pytest.raises(ConfigError, match=f"adv_estimator '{estimator.value}'"):
            make_trainer(config, Ranks(1))
        return
    whole, _ = run_steps(make_trainer(config, Ranks(2), Ranks(2)), put_sessions(TEN_ROWS))
    assert config.algorithm.adv_estimator == estimator.value
    if estimator.value == "gae":
        return
    advantages = advantages_by_session(whole)
    tokens = torch.tensor([40, 4, 4, 4])
    mask = (torch.arange(40) < tokens.unsqueeze(-1)).long() if estimator.value == "opo" else torch.ones(4, 1).long()
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[0, 0] = 1
    index = np.array(["p"] * 4, dtype=object)
    right, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards, response_mask=mask, index=index, config=config.algorithm
    )
    assert [advantages[str(i)] for i in range(4)] == pytest.approx(right[:, 0].tolist(), rel=1e-5)
    names = {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce++"}
    names["reinforce_plus_plus_baseline"] = "reinforce++-baseline"
    if estimator.value in names:
        scores = Scores.from_columns(prompt=["p"] * 4, session=range(4), score=[1.0, 0, 0, 0])
        ours = session_advantages(scores, names[estimator.value])
        assert [advantages[str(i)] for i in range(4)] == pytest.approx(ours.tolist(), rel=1e-4)


def test_a_group_of_one_gets_zero_and_kl_is_summed_over_a_session(tmp_path):
    """verl returns the reward of a single session, and subtracts only the KL of its last row."""
    sessions = [("p0", 0, [(3, 5), (3, 6)], 1.0), ("p0", 1, [(3, 4)], 0.0), ("p1", 0, [(3, 4)], 5.0)]
    keys = {"algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "rloo", "algorithm.kl_ctrl.kl_coef": 0.1}
    batch = put_sessions(sessions)
    whole, _ = run_steps(make_trainer(make_config(tmp_path, **keys), Ranks(1)), batch)
    old, ref, mask = (get_field(batch, name) for name in ("old_log_probs", "ref_log_prob", "response_mask"))
    kl = [float(((o - r) * m).sum()) for o, r, m in zip(old, ref, mask, strict=True)]
    first, second = 1.0 - 0.1 * (kl[0] + kl[1]), 0.0 - 0.1 * kl[2]
    advantages = [float(values[0]) for values in get_field(batch, "advantages")]
    assert advantages == pytest.approx([first - second, first - second, second - first, 0.0], abs=1e-5)
    assert len(whole) >= len(batch)


def test_weights_follow_a_mask_that_rejection_changes(tmp_path):
    keys = {
        "algorithm.rollout_correction.rollout_rs": "token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.7_1.4",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    }
    batch = put_sessions(ragged_sessions())
    before = sum(int(mask.sum()) for mask in get_field(batch, "response_mask"))
    whole, _ = run_steps(make_trainer(make_config(tmp_path, **keys), Ranks(2)), batch)
    counts = [int(mask.sum()) for mask in get_field(whole, "response_mask")]
    weights = [float(weight) for weight in get_field(whole, "raggedright_actor_weight")]
    assert 0 < sum(counts) < before
    assert math.fsum(c * w for c, w in zip(counts, weights, strict=True)) == pytest.approx(1.0, rel=1e-5)


def test_actor_and_critic_have_their_own_steps_and_padding(tmp_path):
    """During critic warm-up the actor has no steps, and verl's row multiple does not include it either."""
    keys = {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 1, "trainer.critic_warmup": 2}
    trainer = make_trainer(make_config(tmp_path, **keys), Ranks(2), Ranks(4))
    batch = put_sessions(ragged_sessions())
    whole, metrics = run_steps(trainer, batch)
    plan = trainer._round.plan
    assert plan.trained_roles == ("critic",)
    assert len(plan.steps("critic")) == metrics["ledger/total/critic_steps"] == 4
    assert len(trainer._round.view("critic")) % (4 * 4) == 0
    assert len(trainer._round.view("forward")) == len(batch) + len(batch) % 2
    trainer.global_steps = 2
    whole, metrics = run_steps(trainer, put_sessions(ragged_sessions()))
    assert metrics["ledger/total/actor_steps"] == 2
    weights = torch.stack(get_field(whole, "raggedright_critic_weight"))
    assert (weights[len(batch) :] == 0).all()


def test_the_ledger_counts_failed_sessions_and_rows_can_be_planned_again(tmp_path):
    sessions = ragged_sessions(3)[:-1]  # one of four prompts has no rows, and neither has one session of another prompt
    trainer = make_trainer(make_config(tmp_path), Ranks(2))
    _, metrics = run_steps(trainer, put_sessions(sessions))
    assert metrics["ledger/total/sessions_trained"] == 5
    assert metrics["ledger/total/sessions_failed"] == 3
    file = tmp_path / "raggedright_rows" / "1_0.jsonl"
    rows = Rows.from_jsonl(file)
    assert len(rows) == metrics["ledger/total/rows_trained"]
    assert len(make_plan(rows, Layout(dp_size=2, batch_size=4, mini_batch_size=2)).steps("actor")) == 2


def test_an_unknown_option_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.v1\.raggedright\.algin is not an option"):
        make_trainer(make_config(tmp_path, **{"trainer.v1.raggedright.algin": "lcm"}))


def test_the_asynchronous_trainers_share_the_steps(tmp_path):
    """Their sampling is verl's; plans and weights are the same."""
    keys = {"trainer.v1.trainer_mode": "raggedright_colocate_async"}
    trainer = make_trainer(make_config(tmp_path, **keys), Ranks(4))
    assert trainer.trainer_mode == "colocate_async"
    assert type(trainer.replay_buffer).__name__ == "ReplayBufferAsync"
    separate = {
        "trainer.v1.trainer_mode": "raggedright_separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 2,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
    }
    trainer = make_trainer(make_config(tmp_path, **separate), Ranks(4))
    whole, metrics = run_steps(trainer, put_sessions(ragged_sessions(2)))
    assert metrics["ledger/total/actor_steps"] == 1
    tq.kv_clear(keys=whole.keys, partition_id="train")
