# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""verl's own worker groups on gloo: its actor workers with FSDP2 engines, and a small new model.

They are started as in verl's trainer, without a rollout, and can also return their full weights. There is no critic:
verl loads a value model with flash attention regardless of the config, and a CPU has none.
"""

import cpu_ranks  # noqa: F401 isort: skip, before verl queries the device

import uuid
from pathlib import Path

import ray
import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoModelForCausalLM
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.engine_workers import ActorRolloutRefWorker

from raggedright.train.load_models import make_tokenizer

SYMBOLS = "0123456789abcdefgh"


def make_model(folder: Path) -> None:
    """A Qwen3 of one layer, and a tokenizer."""
    tokenizer = make_tokenizer(SYMBOLS, ["<|im_end|>"])
    torch.manual_seed(0)
    settings = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
        "tie_word_embeddings": False, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def engine_settings() -> dict[str, object]:
    """Settings for float32 on a CPU, and SGD with learning rate 1, so that a change of weights is a gradient."""
    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    return {
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.strategy": "fsdp2",
        f"{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.use_torch_compile": False,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 64,
        f"{actor}.optim.lr": 1.0,
        f"{actor}.optim.optimizer": "SGD",
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.clip_grad": 1e9,
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"{model}.override_config.attn_implementation": "eager",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 64,
    }


class ProbedActor(ActorRolloutRefWorker):
    """verl's actor worker, whose weights can be read."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.full_tensor() for name, value in self.actor.engine.module.state_dict().items()}


def start_actor(config: DictConfig, dp_size: int) -> RayWorkerGroup:
    """The actor's ranks, with their model initialised."""
    init = RayClassWithInitArgs(ray.remote(ProbedActor), config=config.actor_rollout_ref, role="actor")
    workers = RayWorkerGroup(_pool(dp_size), init, device_name="cpu")
    workers.init_model()
    return workers


def _pool(dp_size: int) -> RayResourcePool:
    return RayResourcePool([dp_size], use_gpu=True, max_colocate_count=1, name_prefix=uuid.uuid4().hex)
