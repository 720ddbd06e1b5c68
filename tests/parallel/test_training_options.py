"""Every way to train runs for real on one rank, and changes what it should and nothing else."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from parallel.whole_runs import EXPERTS, distance, rollouts_of, train_one, weights_of, write_run
from raggedright.advantages import Estimator, PolicyLoss
from raggedright.train.world import World

ALONE = World(0, 1, torch.device("cpu"))
Changes = dict[str, dict[str, object]]


def trained(folder: Path, *changes: Changes) -> Path:
    train_one(write_run(folder, *changes), ALONE)
    return folder


def rounds_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "round"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain") / "run")


def test_activation_checkpointing_changes_no_weight(plain: Path, tmp_path: Path):
    run = trained(tmp_path / "run", {"model": {"activation_checkpointing": True}})
    assert distance(weights_of(run), weights_of(plain)) < 1e-12


def test_activation_checkpointing_replays_the_same_experts_when_it_computes_again(tmp_path: Path):
    """The routers run again in the backward pass, where other experts would be other activations."""
    balanced: Changes = {**EXPERTS, "experts": {"balance_coef": 0.1}}
    plain = trained(tmp_path / "plain", balanced)
    run = trained(tmp_path / "run", balanced, {"model": {"activation_checkpointing": True}})
    assert distance(weights_of(run), weights_of(plain)) < 1e-12


def test_replay_changes_what_is_learnt_once_the_router_has_moved_and_can_be_left_out(tmp_path: Path):
    replayed, natural = (
        trained(tmp_path / str(replay), {**EXPERTS, "experts": {"replay": replay}}) for replay in (True, False)
    )
    assert rollouts_of(replayed) == rollouts_of(natural)
    assert distance(weights_of(replayed), weights_of(natural)) > 1e-6
    assert not any(name.startswith("actor/experts") for name in rounds_of(natural)[0]["metrics"])


def test_the_store_changes_no_weight(plain: Path, tmp_path: Path):
    run = trained(tmp_path / "run", {"store": {"backend": "memory"}})
    assert distance(weights_of(run), weights_of(plain)) == 0


def test_the_same_command_twice_gives_the_same_bits(plain: Path, tmp_path: Path):
    run = trained(tmp_path / "run")
    assert rollouts_of(run) == rollouts_of(plain)
    assert distance(weights_of(run), weights_of(plain)) == 0


def test_mixed_precision_keeps_master_weights_in_their_type(tmp_path: Path):
    run = trained(tmp_path / "run", {"model": {"dtype": "float32", "compute_dtype": "bfloat16"}})
    start = trained(tmp_path / "start", {"model": {"dtype": "float32"}, "optimizer": {"lr": 1e-30}})
    assert {weight.dtype for weight in weights_of(run).values()} == {torch.float32}
    assert 1e-6 < distance(weights_of(run), weights_of(start)) < 0.1
    assert abs(rounds_of(run)[0]["metrics"]["rollout_corr/kl"]) < 0.05


@pytest.mark.parametrize("advantages", get_args(Estimator))
@pytest.mark.parametrize("policy_loss", get_args(PolicyLoss))
def test_every_estimator_trains_with_every_loss(tmp_path: Path, advantages: str, policy_loss: str):
    run = trained(tmp_path / "run", {"algorithm": {"advantages": advantages, "policy_loss": policy_loss}})
    (event,) = rounds_of(run)
    assert event["metrics"]["actor/grad_norm"] > 1e-3
    assert event["optimizer_steps"] == 4


def test_dr_grpo_is_grpo_without_std_and_with_the_sum_norm(tmp_path: Path):
    options: Changes = {
        "algorithm": {"std": False},
        "train": {"loss_agg": "seq-mean-token-sum-norm", "loss_norm_tokens": 8},
    }
    assert rounds_of(trained(tmp_path / "run", options))[0]["metrics"]["actor/grad_norm"] > 1e-3


def test_while_the_critic_warms_up_the_actor_waits(tmp_path: Path):
    gae: Changes = {
        "algorithm": {"advantages": "gae"},
        "critic": {"mini_batch_size": 2, "warmup_rounds": 1, "lr": 1e-3},
        "train": {"rounds": 2, "epochs": 1},
        "optimizer": {"decay": "linear", "final": 0.0},
    }
    first, second = rounds_of(trained(tmp_path / "run", gae))
    assert "actor/pg_loss" not in first["metrics"]
    assert first["optimizer_steps"] == 3  # of the critic: 6 prompts, 2 a step
    assert second["optimizer_steps"] == 3 + 2
    assert second["metrics"]["actor/lr"] == pytest.approx(0.0, abs=1e-12)  # the actor's schedule spans its own rounds
    assert first["metrics"]["critic/vf_loss"] > 0


def test_rows_over_the_budget_are_counted_where_the_config_drops_them(tmp_path: Path):
    options: Changes = {"train": {"micro_batch_tokens": 15, "over_long": "drop"}}
    (event,) = rounds_of(trained(tmp_path / "run", options))
    rows = event["ledger"]["rows"]
    assert rows["dropped (over_long)"] > 0
    assert sum(rows.values()) == event["rows"]


def test_a_run_in_the_readers_hands_names_every_metric_of_the_contract(plain: Path):
    metrics = rounds_of(plain)[0]["metrics"]
    for name in (
        "critic/score/mean", "response_length/mean", "rows_per_session/mean", "actor/pg_loss", "actor/ppo_kl",
        "actor/pg_clipfrac", "actor/entropy", "actor/grad_norm", "actor/lr", "perf/rows", "perf/tokens",
        "perf/padding_rows", "perf/tokens_per_second", "rollout_corr/kl",
    ):  # fmt: skip
        assert name in metrics
    assert abs(metrics["rollout_corr/kl"]) < 1e-7  # training sees the rollout's own distribution


@pytest.mark.parametrize("collate", ["packed", "padded", "tree"])
def test_tokens_are_trained_at_the_temperature_they_were_sampled_with(tmp_path: Path, collate: str):
    """Log-probs that training computes are those of the rollout, which float32 rounds; at one temperature for all
    tokens they would be apart by far more."""
    agent: Changes = {"agent": {"name": "parallel.whole_runs:vary"}, "rollout": {"temperature": 0.8}}
    run = trained(tmp_path / "run", agent, {"train": {"collate": collate, "epochs": 1}})
    metrics = rounds_of(run)[0]["metrics"]
    assert 0 <= metrics["rollout_corr/k3_kl"] < 1e-12
    assert metrics["rollout_corr/log_ppl_abs_diff"] < 1e-6
    assert metrics["actor/grad_norm"] > 1e-3
