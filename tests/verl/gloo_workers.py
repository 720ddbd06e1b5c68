"""verl's own worker groups on gloo: its actor and critic workers with FSDP2 engines, two ranks, a model made on the spot.

Started as verl's trainer starts them, without a rollout. `Probed` workers also hand out their full weights.
"""

import cpu_ranks  # noqa: F401 isort: skip, before verl asks for a device

import uuid
from pathlib import Path

import ray
import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoModelForCausalLM
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig

from raggedright.train.models import make_tokenizer

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


def engine_settings(prefix: str) -> dict[str, object]:
    """What an engine needs to run in float32 on a CPU, and plain steps of size 1 so that weights show gradients."""
    engine = f"{prefix}.fsdp_config" if prefix != "critic" else "critic.fsdp"
    return {
        f"{prefix}.strategy": "fsdp2",
        f"{engine}.strategy": "fsdp2",
        f"+{engine}.mixed_precision.param_dtype": "fp32",
        f"{engine}.use_torch_compile": False,
        f"{prefix}.use_dynamic_bsz": True,
        f"{prefix}.ppo_max_token_len_per_gpu": 64,
        f"{prefix}.optim.lr": 1.0,
        f"{prefix}.optim.optimizer": "SGD",
        f"{prefix}.optim.betas": "[0.9,0.99]",
        f"{prefix}.optim.weight_decay": 0.0,
        f"{prefix}.optim.clip_grad": 1e9,
    }


class ProbedActor(ActorRolloutRefWorker):
    """verl's actor worker, whose weights can be read."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.full_tensor() for name, value in self.actor.engine.module.state_dict().items()}


class ProbedCritic(TrainingWorker):
    """verl's training worker, whose weights can be read."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.full_tensor() for name, value in self.engine.module.state_dict().items()}


def start_actor(config: DictConfig, dp_size: int) -> RayWorkerGroup:
    """The actor's ranks, their model made."""
    init = RayClassWithInitArgs(ray.remote(ProbedActor), config=config.actor_rollout_ref, role="actor")
    workers = RayWorkerGroup(_pool(dp_size), init, device_name="cpu")
    workers.init_model()
    return workers


def start_critic(config: DictConfig, dp_size: int) -> RayWorkerGroup:
    """The critic's ranks, their model made."""
    critic = omega_conf_to_dataclass(config.critic)
    critic.engine.infer_max_token_len_per_gpu = critic.engine.max_token_len_per_gpu = 64
    settings = TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
    )
    workers = RayWorkerGroup(
        _pool(dp_size), RayClassWithInitArgs(ray.remote(ProbedCritic), config=settings), device_name="cpu"
    )
    workers.reset()
    return workers


def _pool(dp_size: int) -> RayResourcePool:
    return RayResourcePool([dp_size], use_gpu=True, max_colocate_count=1, name_prefix=uuid.uuid4().hex)
