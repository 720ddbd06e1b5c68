# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""Rows in a real TransferQueue as verl's agent loop writes them, and a trainer with verl's own config."""

import copy
import uuid
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

VOCABULARY = 24
EOS = 1


class Tokenizer:
    """The part of a tokenizer that the trainer uses."""

    eos_token_id = EOS
    pad_token_id = 0

    def decode(self, ids: Tensor, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids.tolist()))


def make_config(tmp_path: Path, **settings: object) -> DictConfig:
    """verl's own ppo_trainer config with the settings of a test; `__` stands for a dot."""
    values = {
        "trainer.v1.trainer_mode": "raggedright_sync",
        "trainer.default_local_dir": tmp_path,
        "trainer.device": "cpu",
        "data.train_batch_size": 4,
        "data.max_response_length": 40,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.model.path": tmp_path / "model",
        "algorithm.adv_estimator": "grpo",
    } | {name.replace("__", "."): value for name, value in settings.items()}
    config = copy.deepcopy(_verl_config())
    for name, value in values.items():
        OmegaConf.update(config, name.lstrip("+"), str(value) if isinstance(value, Path) else value, force_add=True)
    return config


@cache
def _verl_config() -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer")


def make_trainer(config: DictConfig, workers: object = None, critics: object = None):
    """The trainer that verl's entry point would make, with these workers instead of started ones."""
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.tokenizer, trainer.global_steps, trainer.local_trigger_step = Tokenizer(), 1, 0
    trainer.actor_rollout_wg = trainer.ref_policy_wg = workers
    trainer.critic_wg = critics
    trainer.ref_in_actor = False
    return trainer


class Ranks:
    """A worker group that only knows its number of ranks."""

    def __init__(self, dp_size: int) -> None:
        self._dispatch_info = {mesh: list(range(dp_size)) for mesh in ("actor", "train", "ref")}


def put_sessions(
    sessions: Sequence[tuple[str, int, Sequence[tuple[int, int]], float]],
    *,
    kind: str = "text",
    seed: int = 0,
    computed: bool = True,
    extra: bool = False,
) -> KVBatchMeta:
    """Store sessions (prompt, number, rows as (prompt, response) tokens, reward); the batch that verl would sample.

    `computed` adds the results of forward passes: old and reference log-probs, values. `extra` adds a per-token field
    with an unknown name.
    """
    generator = torch.Generator().manual_seed(seed)
    batch_uid = uuid.uuid4().hex[:6]
    rows, keys, tags = [], [], []
    for prompt, number, lengths, reward in sessions:
        uid = f"{prompt}-{batch_uid}"
        for trajectory, (prompt_len, response_len) in enumerate(lengths):
            row = _row(prompt_len, response_len, reward, kind, generator)
            row |= {"uid": uid, "session_id": number, "data_source": "made", "global_steps": 1}
            row["reward_model"] = {"ground_truth": "7"}
            if computed:
                draw = 0.3 * torch.randn(4, response_len, generator=generator)
                old = row["rollout_log_probs"] + draw[0]
                row |= {
                    "old_log_probs": old,
                    "ref_log_prob": old + draw[1],
                    "values": draw[2],
                    "entropy": draw[3].abs(),
                }
            if extra:
                row["unknown_field"] = torch.randn(response_len, 3, generator=generator)
            rows.append(row)
            keys.append(f"{uid}_{number}_{trajectory}")
            lengths_of_row = {
                "prompt_len": prompt_len,
                "response_len": response_len,
                "seq_len": prompt_len + response_len,
            }
            versions = {"global_steps": 1, "min_global_steps": 0, "max_global_steps": 0}
            tags.append({"status": "success", **lengths_of_row, **versions})
    tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags, extra_info={"temperature": 1.0})


def _row(prompt_len: int, response_len: int, reward: float, kind: str, generator: torch.Generator) -> dict:
    """A trajectory made with verl's output class, with the fields that its worker adds."""
    draw = torch.randint(2, VOCABULARY, (prompt_len + response_len,), generator=generator)
    mask = (torch.arange(response_len) % 5 != 4).long().tolist()
    log_probs = (-2 + 0.4 * torch.randn(response_len, generator=generator)).tolist()
    experts = None
    if kind == "experts":
        experts = torch.randint(8, (prompt_len + response_len, 2, 3), generator=generator).numpy()
    output = AgentLoopOutput(
        prompt_ids=draw[:prompt_len].tolist(), response_ids=draw[prompt_len:].tolist(), response_mask=mask,
        response_logprobs=log_probs, reward_score=reward, num_turns=2, metrics=AgentLoopMetrics(),
        routed_experts=experts,
        extra_fields={"reward_extra_info": {}, "min_global_steps": 0, "max_global_steps": 0},
    )  # fmt: skip
    row = output.as_dict()
    row["loss_mask"] = row["response_mask"]
    row["input_ids"] = draw
    positions = torch.arange(len(draw))
    row["position_ids"] = positions.expand(4, -1).clone() if kind == "images" else positions
    row["multi_modal_inputs"] = {}
    if kind == "images":
        row["multi_modal_inputs"] = {"pixel_values": torch.randn(4, 6, generator=generator)} if response_len % 2 else {}
    return row


def ragged_sessions(num_prompts: int = 4, sessions: int = 2, seed: int = 5, most: int = 4):
    """Sessions of one to four rows, of very different lengths, each with a reward."""
    generator = np.random.default_rng(seed)
    ragged = []
    for prompt in range(num_prompts):
        for number in range(sessions):
            lengths = [
                (int(generator.integers(2, 9)), int(generator.integers(1, 19)))
                for _ in range(int(generator.integers(1, most + 1)))
            ]
            ragged.append((f"p{prompt}", number, lengths, float(generator.integers(0, 2)) + 0.1 * number))
    return ragged
