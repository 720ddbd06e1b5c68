"""Loads the models of a run: actor, critic and tokenizer.

Randomly initialised weights depend on the seed alone. Models are always in evaluation mode, also while they train:
dropout and router noise would give the same row different log-probs in every micro-batch.
"""

from collections.abc import Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from raggedright.config.sections import Model
from raggedright.errors import ConfigError
from raggedright.tensors.images import has_vision
from raggedright.train.vision_models import MADE_TOKENS, check_family, made_values, with_value_head

EOS, PAD = "<eos>", "<pad>"


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer of the model directory, or one of single characters for a made model."""
    if model.path is None:
        assert model.symbols is not None
        assert model.made is not None
        return make_tokenizer(model.symbols, MADE_TOKENS if "vision_config" in model.made else ())
    _check_folder("model.path", model.path)
    return AutoTokenizer.from_pretrained(model.path)


def make_tokenizer(symbols: str, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per symbol, an end-of-text token, a padding token, and special tokens."""
    names = [*symbols, EOS, PAD]
    if len(set(names)) < len(names):
        raise ConfigError(f"model.symbols is {symbols!r}: a symbol is in it twice")
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
    made.add_tokens([*special], special_tokens=True)
    return made


def load_actor(model: Model, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> nn.Module:
    """The policy, on the CPU."""
    config = _model_config(model, tokenizer)
    kind = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
    return _load(kind, model.path, config, model, seed)


def load_critic(model: Model, path: str | None, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> nn.Module:
    """A model with one output per token, on the CPU: from `path`, or the actor's model with a new head."""
    key = "model.path"
    if path is not None:
        key = "critic.path"
        _check_folder(key, path)
        model = model.model_copy(update={"path": path, "made": None})
    config = _model_config(model, tokenizer)
    if has_vision(config):  # transformers has no token classifiers for these
        return with_value_head(_load(AutoModelForImageTextToText, model.path, config, model, seed + 1, key))
    config.num_labels = 1
    return _load(AutoModelForTokenClassification, model.path, config, model, seed + 1, key)


def stop_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> frozenset[int]:
    """The tokens that end a reply: the tokenizer's end of text, and those of the model's generation config."""
    settings = getattr(model, "generation_config", None)
    eos_ids = (getattr(tokenizer, "eos_token_id", None), getattr(settings, "eos_token_id", None))
    return frozenset(i for ids in eos_ids for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))


def _check_folder(key: str, path: str) -> None:
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{key} is {path}, which is not a model directory: it has no config.json")


def _model_config(model: Model, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    if model.path is not None:
        config = AutoConfig.from_pretrained(model.path)
    else:
        assert model.made is not None
        special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        values = {"vocab_size": len(tokenizer), **special, **model.made}
        if "vision_config" in model.made:
            values = made_values(model.made, tokenizer)
        try:
            config = AutoConfig.for_model(**values)  # pyright: ignore[reportArgumentType]
        except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
            cause = " ".join(str(error).split())
            raise ConfigError(f"model.made: transformers refuses it ({cause})") from None
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False  # transformers' balance loss is a mean over a micro-batch
    if has_vision(config):
        check_family(config)
    if model.dtype == "float64":
        config._experts_implementation = "eager"  # grouped matrix products have no float64 kernel
    return config


def _load(
    kind: type[AutoModelForCausalLM] | type[AutoModelForImageTextToText] | type[AutoModelForTokenClassification],
    path: str | None,
    config: PretrainedConfig,
    model: Model,
    seed: int,
    key: str = "model.path",
) -> nn.Module:
    torch.manual_seed(seed)
    # transformers does the cast to bfloat16: it keeps rotary frequencies in float32, as other engines do.
    dtype, attention = getattr(torch, model.dtype), model.attention
    try:
        if path is None:
            made_dtype = torch.float32 if model.dtype == "float64" else dtype  # the same weights in both
            loaded = kind.from_config(config, dtype=made_dtype, attn_implementation=attention)
        else:
            loaded = kind.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError, ImportError, SafetensorError, RuntimeError) as error:
        cause = str(error).splitlines()[0]
        source = f"{key} is {path}" if path else "model.made"
        if "ignore_mismatched_sizes" in cause:
            cause = "its weights have other shapes than the model's: does its head have several outputs per token?"
        if "does not support an attention implementation" in cause or "does not support Flash Attention" in cause:
            raise ConfigError(
                f"{source}: model type {config.model_type!r} has no {model.attention} attention; "
                "set model.attention = 'eager'"
            ) from None
        raise ConfigError(f"{source}: transformers cannot load it as {kind.__name__} ({cause})") from None
    if model.dtype == "float64":
        nn.Module.to(loaded, dtype)  # including frequencies and other parts that families keep in float32
    loaded.eval()
    if model.activation_checkpointing and not checkpoint_layers(loaded):
        raise ConfigError(
            f"model.activation_checkpointing is true and model type {config.model_type!r} has no layers that "
            "transformers can recompute; set it to false"
        )
    return loaded


def checkpoint_layers(model: nn.Module) -> int:
    """Recompute the activations of layers in the backward pass; returns the number of such layers.

    transformers does this in training mode only, in which dropout and noise are active.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.__class__ = _checkpointed(type(layer))  # not on the instance, so it can still be copied
    return len(layers)


@cache
def _checkpointed(kind: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        if torch.is_grad_enabled():
            return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)
        return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": wraps(kind.forward)(forward), "__module__": kind.__module__})
