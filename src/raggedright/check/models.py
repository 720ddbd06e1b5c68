"""Models to check with: tiny ones made on the spot, or a model directory of the user's."""

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from raggedright.errors import ConfigError
from raggedright.tensors.media import has_vision

DTYPES = {"float64": torch.float64, "float32": torch.float32}
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
}


def _qwen3() -> PretrainedConfig:
    return AutoConfig.for_model("qwen3", **_TEXT)


def _qwen3_moe() -> PretrainedConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    return AutoConfig.for_model("qwen3_moe", **_TEXT, **experts)


def _qwen3_vl() -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {
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
    ids = {"image_token_id": 35, "video_token_id": 36, "vision_start_token_id": 37, "vision_end_token_id": 38}
    return AutoConfig.for_model("qwen3_vl", text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, **ids)


BUILTIN: dict[str, Callable[[], PretrainedConfig]] = {"qwen3": _qwen3, "qwen3-moe": _qwen3_moe, "qwen3-vl": _qwen3_vl}


def load_model(name: str, dtype: str, *, critic: bool = False, casts: bool = True, seed: int = 0) -> nn.Module:
    """An actor, or a critic with one output per token, in evaluation mode (no dropout) with gradients.

    Without `casts`, one of float64 is so throughout: what it would cast to float32 inside stays as it is.
    """
    torch.manual_seed(seed)
    config = _config(name)
    # Grouped matrix products have no float64 kernel.
    config._experts_implementation = "eager"
    if critic:
        config.num_labels = 1
        kind = AutoModelForTokenClassification
    else:
        kind = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
    try:
        model = kind.from_config(config) if name in BUILTIN else kind.from_pretrained(name, config=config)
    except (OSError, ValueError, SafetensorError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(f"--model {name}: transformers cannot load it ({cause})") from None
    model = nn.Module.to(model, DTYPES[dtype]).eval()
    return model if casts else _without_casts(model)


class _Double(TorchFunctionMode):
    """What casts float64 to float32 leaves it."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        given = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if given.get("dtype") is torch.float32:
                given["dtype"] = torch.float64
        return func(*args, **given)


def _without_casts(model: nn.Module) -> nn.Module:
    """Rows that share what they begin with add up their gradients before a cast, rows one by one behind it."""
    kind = type(model)

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        with _Double():
            return kind.forward(self, *args, **kwargs)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})  # not on the model, so that it can be copied
    return model


def has_critic(name: str) -> bool:
    """Whether transformers has a model with outputs per token, which a critic is made of, for this one's family."""
    return type(_config(name)) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING


def _config(name: str) -> PretrainedConfig:
    if name in BUILTIN:
        return BUILTIN[name]()
    if not (Path(name) / "config.json").is_file():
        raise ConfigError(
            f"--model {name}: not one of {', '.join(BUILTIN)} and not a model directory (it has no config.json)"
        )
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(f"--model {name}: transformers cannot read its config.json ({cause})") from None
