"""Models to check with: tiny ones made on the spot, or a model directory of the user's.

They are loaded as a run loads them (`train/models.py`), so that what it switches off, or forgets to, shows here too.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig, PretrainedConfig

from raggedright.config.sections import Model
from raggedright.errors import ConfigError
from raggedright.tensors.images import has_vision
from raggedright.tensors.routing import Routers, find_routers
from raggedright.train.models import load_actor, load_critic, make_tokenizer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # every token is an ordinary one
_TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    **_NO_IDS,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_IMAGE_IDS = {"image_token_id": 35, "video_token_id": 36, "vision_start_token_id": 37, "vision_end_token_id": 38}
BUILTIN: dict[str, dict[str, object]] = {
    "qwen3": {"model_type": "qwen3", **_TEXT, "attention_dropout": 0.1},
    "qwen3-moe": {"model_type": "qwen3_moe", **_TEXT, **_EXPERTS},
    "qwen3-vl": {
        "model_type": "qwen3_vl",
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": _VISION,
        **_IMAGE_IDS,
    },
}
CRITICS: dict[str, dict[str, object]] = {  # of another family than any actor
    "mistral": {"model_type": "mistral", **_TEXT, "sliding_window": 8},
}
_MADE = {**BUILTIN, **CRITICS}


def load_model(
    name: str, dtype: str, *, critic: bool = False, casts: bool = True, recompute: bool = False, seed: int = 0
) -> nn.Module:
    """An actor, or a critic with one output per token, as a run has it; every dropout is off.

    Without `casts`, one of float64 is so throughout: what it would cast to float32 inside stays as it is. With
    `recompute` it is in training mode and recomputes activations.
    """
    _config(name)  # refuses an unknown name before anything is loaded
    try:
        loaded = _load(name, dtype, "sdpa", critic=critic, recompute=recompute, seed=seed)
    except ConfigError:
        try:  # families without sdpa
            loaded = _load(name, dtype, "eager", critic=critic, recompute=recompute, seed=seed)
        except ConfigError as error:
            raise ConfigError(f"--model {name}: {str(error).removeprefix(f'model.path is {name}: ')}") from None
    return loaded if casts or dtype != "float64" else leave_out_casts(loaded)


def _load(
    name: str, dtype: str, attention: Literal["sdpa", "eager"], *, critic: bool, recompute: bool, seed: int
) -> nn.Module:
    source = {"made": _MADE[name]} if name in _MADE else {"path": name}
    settings = {"dtype": dtype, "attention": attention, "activation_checkpointing": recompute}
    model, tokenizer = Model.model_validate({**source, **settings}), make_tokenizer("ab")
    if critic:
        return load_critic(model, None, tokenizer, seed=seed)
    return load_actor(model, tokenizer, seed=seed)


class _Double(TorchFunctionMode):
    """What is cast to float32 becomes float64."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func is Tensor.float:
            return args[0].double()
        given = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **given)


def _doubled(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def leave_out_casts(model: nn.Module) -> nn.Module:
    """Gradients of a weight are added up before or behind a cast, as rows are cut: 1e-7 apart in float32."""
    kind = type(model)

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with _Double():
                return kind.forward(self, *args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})  # not on the model, so that it can be copied
    return model


def known_routers(model: nn.Module) -> Routers | None:
    """The routers whose experts can be recorded and replayed; None where there are none of that kind."""
    try:
        return find_routers(model)
    except ConfigError:
        return None


def has_critic(name: str) -> bool:
    """Whether a critic can be made of this one's family."""
    config = _config(name)
    return has_vision(config) or type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING


def _config(name: str) -> PretrainedConfig:
    if name in _MADE:
        return AutoConfig.for_model(**_MADE[name])  # pyright: ignore[reportArgumentType]
    if not (Path(name) / "config.json").is_file():
        raise ConfigError(
            f"--model {name}: not one of {', '.join(_MADE)} and not a model directory (it has no config.json)"
        )
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(f"--model {name}: transformers cannot read its config.json ({cause})") from None
