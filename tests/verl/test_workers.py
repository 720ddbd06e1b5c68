# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""verl's own actor workers, two gloo ranks with its FSDP2 engine, driven by the trainer's steps.

The optimizer is SGD with learning rate 1, so the change of the weights is the gradient: it must be that of the rows one
by one, computed here with the same model in float32.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from gloo_workers import engine_settings, make_model, start_actor
from stored import make_config, make_trainer, put_sessions, ragged_sessions
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass

from raggedright.verl import weighted_losses
from raggedright.verl.queue import get_field

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("queue")]
FIELDS = ("input_ids", "responses", "response_mask", "old_log_probs", "advantages", weighted_losses.ACTOR_WEIGHT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def trainer(queue, folder) -> Iterator[object]:
    """One step per round, each session counted once."""
    settings = {"trainer.v1.raggedright.loss_agg": "session-mean", "actor_rollout_ref.actor.ppo_mini_batch_size": 4}
    config = make_config(folder, **engine_settings(), **settings)
    workers = start_actor(config, 2)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    workers.set_loss_fn(partial(weighted_losses.weighted_policy_loss, config=actor))
    yield make_trainer(config, workers)
    for worker in workers.workers:
        ray.kill(worker)


@pytest.mark.parametrize("num_prompts", [4, 3, 1])
def test_verls_workers_move_weights_by_the_gradient_of_the_rows_one_by_one(num_prompts, trainer, folder):
    metrics: dict[str, float] = {}
    start = trainer.actor_rollout_wg.weights()[0]
    sessions = [(p, s, rows, float(s)) for p, s, rows, _ in ragged_sessions(num_prompts, seed=num_prompts)]
    whole = trainer._balance_batch(put_sessions(sessions, computed=False), metrics)
    for step in ("_compute_old_log_prob", "_compute_advantage", "_update_actor"):
        whole = getattr(trainer, step)(whole, metrics)
    end = trainer.actor_rollout_wg.weights()[0]
    rows = [dict(zip(FIELDS, row, strict=True)) for row in zip(*(get_field(whole, n) for n in FIELDS), strict=True)]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(start)
    for row in rows:
        if row["response_mask"].any():
            (summed_loss(model, row) * row[weighted_losses.ACTOR_WEIGHT]).sum().backward()
    change = torch.cat([(start[name] - end[name]).flatten() for name in start])
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    right = torch.cat([gradients[name].flatten() for name in start])
    assert float((change - right).norm() / right.norm()) < 2e-5
    assert metrics["ledger/total/padding_rows"] == len(whole) - metrics["ledger/total/rows_trained"]
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


def summed_loss(model: torch.nn.Module, row: dict[str, Tensor]) -> Tensor:
    """The clipped objective of a row, over its loss tokens."""
    ids, count = row["input_ids"], len(row["responses"])
    log_probs = torch.log_softmax(model(ids.unsqueeze(0)).logits[0, -count - 1 : -1], dim=-1)
    chosen = log_probs.gather(-1, row["responses"].unsqueeze(-1)).squeeze(-1)
    ratio = (chosen - row["old_log_probs"]).exp()
    objective = torch.minimum(ratio * row["advantages"], ratio.clamp(0.8, 1.2) * row["advantages"])
    return -(objective * row["response_mask"]).sum()
