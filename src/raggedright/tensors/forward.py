"""The one door to a model: log-probs, entropy and values of a micro-batch's response tokens, flat.

The cache is always off, a packed micro-batch never has a mask, and a tree has one with four dims: with a cache, or with
a mask of ones, transformers takes a pack for one long sequence and is wrong by nats without a word.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raggedright.errors import ConfigError
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.media import placeholder_ids


class TokenOutputs(NamedTuple):
    """Per response token, in float32 at least."""

    log_probs: Tensor
    entropy: Tensor


def forward_log_probs(
    model: nn.Module, micro: MicroBatch, *, temperature: float = 1.0, entropy_graph: bool = True
) -> TokenOutputs:
    """Log-probability of each response token, and the entropy of the distribution it came from.

    Without `entropy_graph` the entropy has no gradient, for a loss that only reports it.
    """
    log_probs = _distributions(model, micro, temperature)
    with torch.set_grad_enabled(entropy_graph and torch.is_grad_enabled()):
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return TokenOutputs(_chosen(log_probs, micro), entropy)


def forward_chosen(model: nn.Module, micro: MicroBatch, *, temperature: float = 1.0) -> Tensor:
    """The log-probabilities alone."""
    return _chosen(_distributions(model, micro, temperature), micro)


def _distributions(model: nn.Module, micro: MicroBatch, temperature: float) -> Tensor:
    """Log-probabilities of all tokens at each response token: [N, tokens]."""
    logits = _outputs(model, micro)
    if temperature != 1:
        logits = logits / temperature
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if never := placeholder_ids(getattr(model, "config", None)):
        # Not -inf: the entropy would multiply it by zero.
        least = torch.finfo(logits.dtype).min / 2
        logits = logits.index_fill(-1, torch.tensor(never, device=logits.device), least)
    return torch.log_softmax(logits, dim=-1)


def _chosen(log_probs: Tensor, micro: MicroBatch) -> Tensor:
    return log_probs.gather(-1, micro.labels[:, None]).squeeze(-1)


def forward_values(model: nn.Module, micro: MicroBatch) -> Tensor:
    """The critic's value before each response token; the model has one output per token."""
    values = _outputs(model, micro)
    return values.to(torch.promote_types(values.dtype, torch.float32)).squeeze(-1)


def _outputs(model: nn.Module, micro: MicroBatch) -> Tensor:
    """The model's outputs at the places that predict response tokens: [N, outputs]."""
    if micro.is_tree:
        _check_tree(model)
    if micro.one_sequence and "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(**micro.inputs, use_cache=False, logits_to_keep=micro.logit_index).logits[0]
    logits = model(**micro.inputs, use_cache=False).logits.flatten(0, 1)
    return logits.index_select(0, micro.logit_index)  # rows of a tree share places, and [] is slow to add those up


def _check_tree(model: nn.Module) -> None:
    """Refuse a model that would take a tree's mask for something else, without a word."""
    config: Any = getattr(model, "config", None)
    if config is None:  # no model of transformers: what it takes is its author's business
        return
    attention, text = config._attn_implementation, config.get_text_config(decoder=True)
    if attention != "sdpa":
        raise ConfigError(f"collate is tree and the model's attention is {attention}; a tree takes sdpa: set it")
    kinds = getattr(text, "layer_types", None) or (["sliding_window"] if getattr(text, "sliding_window", None) else [])
    others = sorted({*kinds} - {"full_attention"})
    if others:
        raise ConfigError(
            f"collate is tree, and model type {text.model_type!r} has layers that do not see all that came before "
            f"({', '.join(others)}); set collate to packed or padded"
        )
