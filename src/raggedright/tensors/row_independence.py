"""Checks before a run that a model gives a row the same outputs in any micro-batch; no model declares this.

Three things are checked, on two random rows that are longer than the windows and kernels in the model's config, or on
one such row if a micro-batch has only one:

- No output of a row depends on another row, or on a later token of its own row: the gradient with respect to the
  input embeddings is exactly zero there. This holds at any scale of the weights; weights that are all zero would hide
  a dependence, so they are filled with noise for the check.
- The outputs of a row in a micro-batch equal those of the row alone, up to rounding. This finds positions that do not
  restart at each row, and choices without a gradient. It is measured in float32, because the rounding of bfloat16 is as
  large as some of these errors; flash attention, which has no float32, is measured in the run's dtype.
- Rotary embeddings whose frequencies follow the longest row of a micro-batch (longrope, dynamic NTK), and attention in
  chunks or with a scale counted from the start of a pack, are found in the config; they are right while rows and packs
  are short.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raggedright.errors import ConfigError
from raggedright.plan.layout import DEFAULT_TOKENS
from raggedright.rows import Rows
from raggedright.tensors.collate import Collator, MicroBatch
from raggedright.tensors.forward import check_tree, forward_outputs
from raggedright.tensors.images import placeholder_ids

# Names of lengths in the configs of transformers, and of similar names that are not lengths.
_LENGTH = re.compile(r"window|local_attention|chunk_(size|length)|block_size|index_topk|conv|kernel|floor_scale")
_NOT_LENGTH = re.compile(r"feed_forward|audio|image|vision|layers|pattern|bias|dtype|multiple")
_MIN_TOKENS = 12
# Relative to the spread of the outputs. Measured over all families in docs/models.md: rounding is at most 1e-6 in
# float32 and 5e-2 in bfloat16 (a router's choice), and a dependence without a gradient is 2e-2 or more.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class Dependence:
    """How much the outputs of a row depend on anything but the row so far; zero, up to rounding, in a sound model."""

    others: float  # largest gradient at tokens of the other row, relative to the largest of all
    later: float  # the same at later tokens of the row
    drift: float  # difference from the outputs of the row alone, relative to their spread


def check_packs(
    model: nn.Module,
    collator: Collator,
    *,
    row_tokens: int | None = None,
    micro_batch_tokens: int | None = None,
    micro_batch_rows: int | None = None,
    key: str = "model",
) -> None:
    """A ConfigError if a row's outputs depend on the micro-batch it is in.

    `row_tokens` and `micro_batch_tokens` are the most tokens of a row and of a micro-batch, `micro_batch_rows` the most
    rows of a micro-batch (None: no limit), `key` is the config section of the model.
    """
    if row_tokens is not None:
        row_tokens = max(row_tokens, collator.min_row_tokens)
    name = f"{key}: model type {_model_type(model)!r}"
    _check_rope(model, row_tokens, name)
    num_rows = 1 if micro_batch_rows == 1 else 2
    if collator.how == "packed" and num_rows > 1:
        _check_chunks(model, micro_batch_tokens, name)
    if collator.how == "tree":
        check_tree(model, row_tokens, key)
    lengths = probe_lengths(
        model, collator, row_tokens=row_tokens, micro_batch_tokens=micro_batch_tokens, num_rows=num_rows
    )
    _check_probe(model, collator, lengths, name)


def _check_probe(model: nn.Module, collator: Collator, lengths: Sequence[int], name: str) -> None:
    with _in_float32(model):
        dtype = _compute_dtype(model)
        try:
            dependence = measure(model, collator, lengths)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:  # in the model's code
            remedy = "set model.dtype = 'float32'" if dtype is torch.float64 else "use another model"
            rows = f"rows of {' and '.join(f'{length:,}' for length in lengths)} tokens"
            raise ConfigError(
                f"{name} does not run on {rows} in {dtype} "
                f"({type(error).__name__}: {' '.join(str(error).split()):.200}); {remedy}"
            ) from error
    tolerance = _TOLERANCE[dtype]
    if dependence.later > 0:
        raise ConfigError(
            f"{name} is not causal: the output at a token depends on later tokens (gradient {dependence.later:.2g} "
            "where it must be 0), so a row has no log-probs that were sampled; use a causal model, or set is_decoder = "
            "true in its config.json if the family has it"
        )
    if dependence.others == 0 and dependence.drift <= tolerance:
        return
    if collator.how == "padded":
        raise ConfigError(
            f"{name} gives a row other outputs in a micro-batch than alone (by {dependence.drift:.2g} of their spread; "
            f"rounding stays below {tolerance:.0e}), and no collation avoids it; use another model"
        )
    _check_probe(model, replace(collator, how="padded"), lengths, name)  # raises if the remedy would not help
    raise ConfigError(
        f"{name} does not keep its rows apart when train.collate is {collator.how} (outputs of a row differ from "
        f"those of the row alone by {dependence.drift:.2g} of their spread, and another row's tokens have a gradient "
        f"of {dependence.others:.2g} on them); set train.collate = 'padded'"
    )


def measure(model: nn.Module, collator: Collator, lengths: Sequence[int]) -> Dependence:
    """The dependence of one or two random rows of these lengths in one micro-batch."""
    collator = replace(collator, even_tokens=10**9)  # so that there is one tree
    ids = _random_rows(model, lengths)
    device = next(model.parameters()).device
    with _zeros_filled(model):
        micro = _collate(collator, ids).to(device)
        with torch.enable_grad(), _embeddings(model) as leaves:
            outputs = forward_outputs(model, micro)
        padded = replace(collator, how="padded")
        with torch.no_grad():
            alone = [forward_outputs(model, _collate(padded, [row]).to(device)) for row in ids]
        others, later = _gradients(micro, outputs, leaves)
    return Dependence(others, later, _drift(micro.per_row(outputs.detach()), alone))


def _gradients(micro: MicroBatch, outputs: Tensor, leaves: list[Tensor]) -> tuple[float, float]:
    """The largest gradient at tokens of the other row and at later tokens, relative to the largest of all.

    Rows have one prompt token, so `logit_index` has the places of a row's tokens.
    """
    tokens = micro.inputs["input_ids"].numel()
    leaves = [leaf for leaf in leaves if leaf.shape[:-1].numel() == tokens]
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(outputs.shape, generator=generator).to(outputs)
    others = later = 0.0
    places = micro.per_row(micro.logit_index)
    for place, row_outputs, factor in zip(places, micro.per_row(outputs), micro.per_row(factors), strict=True):
        row = torch.zeros(tokens, dtype=torch.bool, device=outputs.device)
        row[place] = True
        for part in {len(place), (len(place) + 1) // 2}:
            total = (row_outputs[:part] * factor[:part]).sum()
            for gradient in torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True) if leaves else ():
                if gradient is None:
                    continue
                size = gradient.flatten(0, -2).abs().amax(-1)
                seen, largest = row.clone(), float(size.max()) or 1.0
                seen[place[part:]] = False
                others = max(others, float((size * ~row).max()) / largest)
                later = max(later, float((size * (row & ~seen)).max()) / largest)
    return others, later


def _drift(together: tuple[Tensor, ...], alone: list[Tensor]) -> float:
    """The larger root mean square of a row's difference, relative to the standard deviation of the outputs."""
    outputs = torch.cat(alone).double()
    spread = float((outputs - outputs.mean(0)).square().mean().sqrt()) or 1.0
    pairs = zip(together, alone, strict=True)
    return max(float((row.double() - expected.double()).square().mean().sqrt()) for row, expected in pairs) / spread


def probe_lengths(
    model: nn.Module,
    collator: Collator,
    *,
    row_tokens: int | None = None,
    micro_batch_tokens: int | None = None,
    num_rows: int = 2,
) -> tuple[int, ...]:
    """One or two lengths: more than twice any length in the model's config, within the limits of the run.

    A length in the config that the rows together cannot reach is ignored: longer rows would only take more time.
    """
    text = _text_config(model)
    whole = micro_batch_tokens or DEFAULT_TOKENS
    if num_rows == 2:  # in a pack, the other row has two thirds of the longer one, and one token
        whole = whole // 2 if collator.how == "padded" else 3 * whole // 5 - 1
    limits = (row_tokens, getattr(text, "max_position_embeddings", None), whole)
    most = min(limit for limit in limits if isinstance(limit, int) and limit > 0)
    together = most + (2 * most // 3 + 1 if num_rows == 2 and collator.how != "padded" else 0)
    long = max(3, min(max(_MIN_TOKENS, 2 * longest_length(text, below=together) + 5), most))
    return (max(2, min(2 * long // 3 + 1, most)), long)[-num_rows:]


def is_length(name: str) -> bool:
    """Whether a key of a model's config is a window, chunk, block or kernel: a number of tokens."""
    return _LENGTH.search(name) is not None and _NOT_LENGTH.search(name) is None


def longest_length(config: object, *, below: float = inf) -> int:
    """The largest window, chunk, block or kernel in a config that is below a limit; 0 if there is none."""
    values = {**vars(config)} if config is not None else {}
    named = (value for name, value in values.items() if is_length(name))
    lengths = (value for value in named if isinstance(value, int) and not isinstance(value, bool))
    return max((length for length in lengths if length < below), default=0)


def _check_rope(model: nn.Module, row_tokens: int | None, name: str) -> None:
    """Refuse rows beyond the length at which frequencies begin to follow the longest row of a micro-batch."""
    for kind, limit in rope_limits(model):
        if row_tokens is None or row_tokens > limit:
            most = "rows have no limit" if row_tokens is None else f"rows may have {row_tokens:,} tokens"
            raise ConfigError(
                f"{name} has rope type {kind!r}, whose frequencies depend on the longest row of a micro-batch when it "
                f"has more than {limit:,} tokens, and {most}; set rollout.max_row_tokens = {limit} or less"
            )


def rope_limits(model: nn.Module) -> list[tuple[str, int]]:
    """Rope types that depend on the longest row, each with the length up to which they do not."""
    limits = set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        config: Any = getattr(module, "config", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str):
                continue
            if kind == "longrope":
                parameters = config.rope_parameters if layer is None else config.rope_parameters[layer]
                limits.add((kind, int(parameters["original_max_position_embeddings"])))
            elif "dynamic" in kind:
                limits.add((kind, int(config.max_position_embeddings)))
    return sorted(limits)


def _check_chunks(model: nn.Module, micro_batch_tokens: int | None, name: str) -> None:
    """Refuse packs longer than what transformers counts from the start of the pack, not of the row."""
    text = _text_config(model)
    chunk, scale = (getattr(text, key, None) for key in ("attention_chunk_size", "floor_scale"))
    limits: dict[str, int] = {}
    if chunk and "chunked_attention" in (getattr(text, "layer_types", None) or ["chunked_attention"]):
        limits[f"attends in chunks of {chunk:,} tokens"] = chunk
    if scale and getattr(text, "attn_temperature_tuning", False):
        limits[f"scales attention in steps of {scale:,} tokens (floor_scale)"] = scale
    for what, limit in sorted(limits.items(), key=lambda item: item[1]):
        if micro_batch_tokens is None or micro_batch_tokens > limit:
            most = "have no limit" if micro_batch_tokens is None else f"may have {micro_batch_tokens:,} tokens"
            raise ConfigError(
                f"{name} {what}, counted from the start of a pack, and packs {most}; set train.collate = 'padded', or "
                f"train.micro_batch_tokens = {limit} or less"
            )


def _random_rows(model: nn.Module, lengths: Sequence[int]) -> list[Tensor]:
    """One row, or two that share their first two tokens, as branches of a tree do, and then differ."""
    text = _text_config(model)
    size = int(getattr(text, "vocab_size", 2))
    placeholders = placeholder_ids(getattr(model, "config", None))
    text_ids = torch.tensor([token for token in range(min(size, 10_000)) if token not in placeholders])
    generator = torch.Generator().manual_seed(0)
    rows = [text_ids[torch.randint(len(text_ids), (n,), generator=generator)] for n in lengths]
    short, long = rows[0], rows[-1]
    long[:2] = short[:2]
    if len(rows) == 2 and len(short) > 2 and bool(short[2] == long[2]):
        long[2] = text_ids[text_ids != short[2]][0]
    return rows


def _collate(collator: Collator, ids: list[Tensor]) -> MicroBatch:
    sizes = [len(row) for row in ids]
    rows = Rows.from_columns(
        prompt=[f"p{i}" for i in range(len(ids))],
        session=[0] * len(ids),
        trajectory=[0] * len(ids),
        prompt_tokens=[1] * len(ids),
        response_tokens=[size - 1 for size in sizes],
    )
    fields = [{"input_ids": row, "response_mask": torch.ones(len(row) - 1, dtype=torch.long)} for row in ids]
    return collator(rows, fields, weight=np.zeros(len(ids)), step_loss_tokens=1)


@contextmanager
def _embeddings(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the input embeddings of the passes inside, as leaves of the graph."""
    leaves: list[Tensor] = []

    def as_leaf(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # some models write into their embeddings

    get: Any = getattr(model, "get_input_embeddings", None)
    hook = get().register_forward_hook(as_leaf) if get is not None else None
    try:
        yield leaves
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def _zeros_filled(model: nn.Module) -> Iterator[None]:
    """Fills parameters that are all zero, such as a new head or gate, with noise inside."""
    zeros = [parameter for parameter in model.parameters() if not parameter.any()]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in zeros:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Half-precision weights and autocast are float32 inside; not with flash attention, which has no float32."""
    if "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", "")):
        yield
        return
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    dtypes = [tensor.dtype for tensor in tensors]
    try:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(torch.promote_types(dtype, torch.float32))
        with torch.autocast(tensors[0].device.type, enabled=False):
            yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


def _compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of matrix products."""
    parameter = next(model.parameters())
    if torch.is_autocast_enabled(parameter.device.type):
        return torch.get_autocast_dtype(parameter.device.type)
    return parameter.dtype


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _model_type(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", type(model).__name__)
