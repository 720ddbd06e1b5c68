"""The only module that calls a model in training: log-probs, entropy and values of a micro-batch's response tokens.

The cache is always off, a packed micro-batch never has a mask, and a tree has a mask with four dims. With a cache, or
with a mask of ones, transformers would treat a pack as one long sequence: log-probs would be wrong by several nats,
silently.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raggedright.errors import ConfigError, RowsError
from raggedright.tensors.chunked_head import capture_hidden, token_outputs
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.images import placeholder_ids

TEMPERATURES = "rollout_temperatures"
"""The field with the temperature of each response token, for rows that were not sampled at the run's temperature."""


def temperature_of(micro: MicroBatch, default: float) -> Tensor | float:
    """The temperature of each response token: the recorded one, or `default` where it is 0 or not recorded."""
    recorded = micro.fields.get(TEMPERATURES)
    return default if recorded is None else torch.where(recorded > 0, recorded, default)


class TokenOutputs(NamedTuple):
    """Per response token, in float32 or a wider dtype."""

    log_probs: Tensor
    entropy: Tensor


def forward_log_probs(
    model: nn.Module,
    micro: MicroBatch,
    *,
    temperature: Tensor | float = 1.0,
    entropy_graph: bool = True,
    chunk_tokens: int | None = None,
) -> TokenOutputs:
    """Log-probability of each response token, and the entropy of the distribution it came from.

    `temperature` is one number, or one number per response token.
    Without `entropy_graph` the entropy has no gradient, for losses that only report it.
    Logits exist for `chunk_tokens` tokens at a time (default: as many as fit 64 MB), which changes only rounding.
    """
    log_probs, entropy = _token_outputs(model, micro, temperature, chunk_tokens)
    return TokenOutputs(log_probs, entropy if entropy_graph else entropy.detach())


def forward_chosen(model: nn.Module, micro: MicroBatch, *, temperature: Tensor | float = 1.0) -> Tensor:
    """The log-probability of each response token, for passes without a gradient of the entropy."""
    return _token_outputs(model, micro, temperature, entropy=False)[0]


def _token_outputs(
    model: nn.Module,
    micro: MicroBatch,
    temperature: Tensor | float,
    chunk_tokens: int | None = None,
    *,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    _check(model, micro)
    masked_ids = placeholder_ids(getattr(model, "config", None))
    hidden = capture_hidden(model, micro.inputs, micro.logit_index)
    if hidden is None:
        return whole_outputs(forward_outputs(model, micro), micro.labels, temperature, masked_ids)
    return token_outputs(
        hidden,
        micro.labels,
        temperature=temperature,
        masked_ids=masked_ids,
        entropy=entropy,
        chunk_tokens=chunk_tokens,
    )


def whole_outputs(
    logits: Tensor, labels: Tensor, temperature: Tensor | float, masked_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """What `token_outputs` computes, from logits of the whole vocabulary: [N, vocabulary]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / (temperature.to(logits.dtype)[:, None] if isinstance(temperature, Tensor) else temperature)
    if masked_ids:
        # Not -inf: the entropy would multiply it by zero.
        lowest = torch.finfo(logits.dtype).min / 2
        logits = logits.index_fill(-1, torch.tensor(masked_ids, device=logits.device), lowest)
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, labels[:, None]).squeeze(-1), entropy


def forward_values(model: nn.Module, micro: MicroBatch) -> Tensor:
    """The critic's value before each response token; the model has one output per token."""
    values = forward_outputs(model, micro)
    return values.to(torch.promote_types(values.dtype, torch.float32)).squeeze(-1)


def forward_outputs(model: nn.Module, micro: MicroBatch) -> Tensor:
    """The model's outputs at the places that predict response tokens: [N, outputs]."""
    _check(model, micro)
    if micro.one_sequence and "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(**micro.inputs, use_cache=False, logits_to_keep=micro.logit_index).logits[0]
    logits = model(**micro.inputs, use_cache=False).logits.flatten(0, 1)
    return logits.index_select(0, micro.logit_index)  # faster than [] in backward if rows of a tree share places


def _check(model: nn.Module, micro: MicroBatch) -> None:
    """Refuse a tree that the model would misread, and ids without an embedding.

    The ids are known on the CPU; on a GPU the lookup would fail later.
    """
    if micro.is_tree:
        check_tree(model, micro.longest_row)
    size = vocabulary_size(model)
    if size is None:
        return
    if micro.token_id >= size:
        raise ConfigError(
            f"token_id of the Collator, which fills rows up, is {micro.token_id:,} and the model's vocabulary has "
            f"{size:,} ids, counted from 0; give it one of these, such as padding_token_id(tokenizer)"
        )
    for token in micro.extremes:
        if not 0 <= token.id < size:
            raise RowsError(
                f"{token.row}: field input_ids has id {token.id:,} at token {token.token:,} and the model's vocabulary "
                f"has {size:,} ids, counted from 0; is the row from the tokenizer of another model?"
            )


def vocabulary_size(model: nn.Module) -> int | None:
    """The number of token ids that a model has embeddings for; None if it does not say."""
    model = getattr(model, "module", model)  # of a wrapper such as DistributedDataParallel
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    return embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else None


def check_tree(model: nn.Module, row_tokens: int | None, key: str = "model") -> None:
    """Refuse a model that would misread a tree's mask, given rows of up to `row_tokens` tokens (None: of any length).

    transformers also uses the mask unchanged in layers with a sliding window, so rows must not be longer than it.
    """
    config: Any = getattr(model, "config", None)
    if config is None:  # not a model of transformers
        return
    attention, text = config._attn_implementation, config.get_text_config(decoder=True)
    if attention != "sdpa":
        raise ConfigError(
            f"{key}: collate is tree and the model's attention is {attention}; a tree needs sdpa: set model.attention "
            "to 'sdpa', or collate to packed or padded"
        )
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or (["sliding_attention"] if window else [])
    others = sorted({*kinds} - {"full_attention"})
    most = window if others == ["sliding_attention"] and window else 0
    if others and (row_tokens is None or row_tokens > most):
        layers = f"layers without full attention ({', '.join(others)}{f' of {most:,} tokens' * bool(most)})"
        rows = "rows of any length" if row_tokens is None else f"rows of up to {row_tokens:,} tokens"
        remedy = f", or rollout.max_row_tokens to {most} or less" if most else ""
        raise ConfigError(
            f"{key}: collate is tree, with {rows}, and model type {text.model_type!r} has {layers}; set collate to "
            f"packed or padded{remedy}"
        )
