# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""One stored batch through verl's trainer and through ours: what each would train on, and the error of its numbers.

Both trainers run their `_balance_batch` and `_compute_advantage` on equal rows in a real TransferQueue. Their rows are
then read back rank by rank and trained by verl's update (`ranks_in_turn.py`) with the losses that each of them sets.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transfer_queue as tq
from ranks_in_turn import Model, Row, update
from stored import Ranks, make_config, make_trainer, put_sessions
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CriticConfig
from verl.workers.utils.losses import ppo_loss, value_loss

from raggedright.plan.assign import token_weights
from raggedright.rows import Rows
from raggedright.verl import weighted_losses

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
FIELDS = (
    "input_ids", "prompts", "responses", "response_mask", "loss_mask", "old_log_probs", "advantages", "values",
    "returns",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of a trainer's steps on a batch: each rank's rows, how they are cut, and its metrics."""

    trainer: object
    whole: KVBatchMeta
    ranks: list[list[Row]]
    keys: list[list[str]]
    num_mini_batch: int
    info: dict[str, object]
    metrics: dict[str, float]

    @property
    def padding(self) -> tuple[int, int]:
        """Padding rows and their tokens."""
        lengths = [tag["seq_len"] for tag in self.whole.tags if tag.get("is_padding")]
        return len(lengths), sum(lengths)

    def mini_batches(self) -> list[list[str]]:
        """The keys of each mini-batch, over all ranks."""
        size = len(self.keys[0]) // self.num_mini_batch
        return [[k for rank in self.keys for k in rank[i * size : (i + 1) * size]] for i in range(self.num_mini_batch)]

    def real(self) -> dict[str, Row]:
        """Rows that are not padding, by key."""
        padding = {key for key, tag in zip(self.whole.keys, self.whole.tags, strict=True) if tag.get("is_padding")}
        pairs = [(k, r) for ks, rs in zip(self.keys, self.ranks, strict=True) for k, r in zip(ks, rs, strict=True)]
        return {key: row for key, row in pairs if key not in padding}


def train_with(mode: str, sessions, folder: Path, *, dp_size: int, role: str = "actor", **settings: object) -> Trained:
    """Run a trainer's steps up to the update on these sessions; `mode` is verl's `sync` or ours."""
    estimator = {"algorithm.adv_estimator": "gae"} if role == "critic" else {}
    config = make_config(folder, trainer__v1__trainer_mode=mode, **estimator, **settings)
    trainer = make_trainer(config, Ranks(dp_size), Ranks(dp_size))
    metrics: dict[str, float] = {}
    whole = trainer._balance_batch(put_sessions(sessions), metrics)
    if mode == "sync":
        whole = replace_fields(trainer._compute_advantage(_filled(whole), metrics), whole)
        section = config.critic if role == "critic" else config.actor_rollout_ref.actor
        size = section.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
        batch, num_mini_batch, info = whole, len(whole) // size, {"global_batch_size": size}
    else:
        whole = trainer._compute_advantage(whole, metrics)
        info = trainer._update_info(role, config.critic if role == "critic" else config.actor_rollout_ref.actor)
        num_mini_batch = int(info["num_mini_batch"])  # pyright: ignore[reportArgumentType]
        batch = trainer._round.view(role)
    parts = batch.chunk(dp_size)
    weight = (
        [weighted_losses.CRITIC_WEIGHT if role == "critic" else weighted_losses.ACTOR_WEIGHT] if mode != "sync" else []
    )
    ranks = [_read(part, [*FIELDS, *weight]) for part in parts]
    drop = ("num_mini_batch", "epochs", "seed", "dataloader_kwargs", "temperature")
    info = {name: value for name, value in info.items() if name not in drop}
    done = Trained(trainer, whole, ranks, [list(part.keys) for part in parts], num_mini_batch, info, metrics)
    tq.kv_clear(keys=whole.keys, partition_id="train")
    return done


def replace_fields(returned: KVBatchMeta, whole: KVBatchMeta) -> KVBatchMeta:
    """verl's steps return a batch without order or tags; the rows themselves do not change."""
    assert set(returned.keys) == set(whole.keys)
    return whole


def _filled(whole: KVBatchMeta) -> KVBatchMeta:
    """verl's padding rows copy row 0's fields at full length if it does not know the field: cut them to one token."""
    padding = [key for key, tag in zip(whole.keys, whole.tags, strict=True) if tag.get("is_padding")]
    if padding:
        zeros = torch.zeros(len(padding), 1)
        names = ("old_log_probs", "ref_log_prob", "values", "entropy")
        fields = tq.kv_batch_get(keys=padding, partition_id="train", select_fields=["loss_mask"]).select()
        for name in names:
            fields[name] = zeros
        tq.kv_batch_put(keys=padding, partition_id="train", fields=fields)
    return whole


def _read(part: KVBatchMeta, names: list[str]) -> list[Row]:
    columns = {}
    data = tq.kv_batch_get(keys=list(part.keys), partition_id="train", select_fields=names)
    for name in names:
        columns[name] = [value.double() if value.is_floating_point() else value for value in data[name].unbind()]
    return [
        {name: columns[name][i] % 11 if name in _IDS else columns[name][i] for name in names} for i in range(len(part))
    ]


_IDS = ("input_ids", "prompts", "responses")


def gradient_errors(trained: Trained, mode: str, *, role: str = "actor", max_tokens: int = 160) -> list[float]:
    """The relative error of each mini-batch's gradient, compared with that of its real rows one by one."""
    if role == "critic":
        config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, cliprange_value=0.5)
    else:
        config = replace(omega_conf_to_dataclass(trained.trainer.config.actor_rollout_ref.actor), loss_agg_mode=mode)
    ours = weighted_losses.ACTOR_WEIGHT in trained.ranks[0][0] or weighted_losses.CRITIC_WEIGHT in trained.ranks[0][0]
    loss = {
        ("actor", True): weighted_losses.weighted_policy_loss, ("critic", True): weighted_losses.weighted_value_loss,
        ("actor", False): ppo_loss, ("critic", False): value_loss,
    }[role, ours]  # fmt: skip
    model = Model()
    gradients, _ = update(
        model, trained.ranks, partial(loss, config), num_mini_batch=trained.num_mini_batch, info=trained.info,
        max_tokens=max_tokens,
    )  # fmt: skip
    real, errors = trained.real(), []
    norm = int(trained.trainer.config.data.max_response_length)
    for gradient, keys in zip(gradients, trained.mini_batches(), strict=True):
        rows = [real[key] for key in keys if key in real]
        right = right_gradient(model, rows, [key for key in keys if key in real], mode, role, config, norm)
        errors.append(
            float((gradient - right).norm() / right.norm()) if rows and right.norm() else float(gradient.norm())
        )
    return errors


def right_gradient(model: Model, rows: list[Row], keys: list[str], mode: str, role: str, config, norm: int) -> Tensor:
    """The gradient of the rows one by one, with the weights of the mode."""
    names = [key.rsplit("_", 2) for key in keys]
    counted = Rows.from_columns(
        prompt=[name[0] for name in names], session=[int(name[1]) for name in names],
        trajectory=[int(name[2]) for name in names], prompt_tokens=[len(row["prompts"]) for row in rows],
        response_tokens=[len(row["responses"]) for row in rows],
        loss_tokens=[int(row["response_mask"].sum()) for row in rows],
    )  # fmt: skip
    weights = token_weights(counted, mode, loss_norm_tokens=norm)  # pyright: ignore[reportArgumentType]
    model.zero_grad()
    for row, weight in zip(rows, weights.tolist(), strict=True):
        made = model(torch.nested.as_nested_tensor([row["input_ids"]], layout=torch.jagged))
        made = {name: value.values()[-len(row["responses"]) - 1 : -1].unsqueeze(0) for name, value in made.items()}
        one = {name: row[name].unsqueeze(0) for name in FIELDS}
        if role == "critic":
            loss, _ = core_algos.compute_value_loss(
                made["values"], one["returns"], one["values"], one["response_mask"], config.cliprange_value
            )
        else:
            alone = replace(config, loss_agg_mode="token-mean", global_batch_info={})
            loss, _ = core_algos.compute_policy_loss_vanilla(
                one["old_log_probs"], made["log_probs"], one["advantages"], one["response_mask"], "token-mean", alone
            )
        if weight:
            (loss * int(row["response_mask"].sum()) * weight).backward()
    return model.gradient()


def imbalance(trained: Trained) -> float:
    """The cost of the slowest rank over the mean, summed over mini-batches: 1.0 is perfectly balanced."""
    size = len(trained.keys[0]) // trained.num_mini_batch
    lengths = {key: tag["seq_len"] for key, tag in zip(trained.whole.keys, trained.whole.tags, strict=True)}
    cost = np.array([[lengths[k] * (47_000 + lengths[k]) for k in rank] for rank in trained.keys], dtype=float)
    of_step = cost.reshape(len(trained.keys), trained.num_mini_batch, size).sum(axis=2)
    return float(of_step.max(axis=0).sum() / of_step.mean(axis=0).sum())
