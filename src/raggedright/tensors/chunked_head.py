"""Log-probs and entropy of response tokens from hidden states and the output head, a chunk of tokens at a time.

Whole logits [response tokens, vocabulary] do not fit: 16,000 tokens of a vocabulary of 152,000 are 10 GB in float32,
and log-softmax, exp and entropy hold several copies. Here no tensor has that shape, in either pass: the forward pass
keeps one log-prob and one entropy per token, and the backward pass computes a chunk's logits again.

The model's own forward runs, with its head replaced for the time of the call by one that keeps the hidden states and
returns a few test numbers as logits. What the model makes of these numbers shows what it does to logits after the head:
nothing, a factor (Cohere, Granite), or a soft cap (Gemma). A model that does something else, or whose head is not a
plain linear layer, has no chunks: `capture_hidden` returns None, and its logits are computed whole.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional

CHUNK_ELEMENTS = 2**24
"""Logits per chunk: 64 MB in float32, of which a pass holds up to three."""

_TEST_LOGITS = (-40.0, -7.0, -0.75, 0.5, 3.0, 25.0)
_TEST_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
_NUMBER_NAMES = re.compile("logit|multiplier")  # of config entries that change logits


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to the head's outputs: y = scale x, or cap tanh(scale x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, outputs: Tensor) -> Tensor:
        """The logits."""
        if self.scale != 1:
            outputs = outputs * self.scale
        return outputs if self.cap is None else torch.tanh(outputs / self.cap) * self.cap

    def gradient(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient of the head's outputs, in place; a soft cap needs the logits."""
        if self.cap is not None and logits is not None:
            gradient.mul_(1 - (logits / self.cap).square())
        return gradient.mul_(self.scale) if self.scale != 1 else gradient


_TRANSFORMS: WeakKeyDictionary[nn.Module, LogitTransform | None] = WeakKeyDictionary()


class Hidden(NamedTuple):
    """The hidden states that predict the response tokens, and the head that makes logits of them."""

    states: Tensor  # [N, hidden size]
    head: nn.Linear
    transform: LogitTransform


def capture_hidden(model: nn.Module, inputs: Mapping[str, Tensor], places: Tensor) -> Hidden | None:
    """Run the model up to its head; `places` index the flat tokens of the inputs. None if it has no chunks."""
    head = _linear_head(model)
    if head is None or _TRANSFORMS.get(model, LogitTransform()) is None:
        return None
    states: list[Tensor] = []
    test = torch.tensor(_TEST_LOGITS, device=places.device, dtype=head.weight.dtype)

    def keep(hidden: Tensor) -> Tensor:
        states.append(hidden)
        return test.to(hidden.dtype).expand(*hidden.shape[:-1], -1)

    with _replaced_forward(head, keep):
        try:
            logits = model(**inputs, use_cache=False).logits
        except (IndexError, RuntimeError, ValueError):
            if not states or model in _TRANSFORMS:
                raise
            logits = None  # after the head: it works with logits of the whole vocabulary
    if model not in _TRANSFORMS:
        _TRANSFORMS[model] = _find_transform(model, test, logits) if states else None
    transform = _TRANSFORMS[model]
    if transform is None or isinstance(head.weight, DTensor):  # a head that is sharded by itself
        return None
    return Hidden(states[0].flatten(0, -2).index_select(0, places), head, transform)


def _linear_head(model: nn.Module) -> nn.Linear | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    return head if is_plain else None


@contextmanager
def _replaced_forward(module: nn.Module, forward: object) -> Iterator[None]:
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def _find_transform(model: nn.Module, test: Tensor, logits: Tensor | None) -> LogitTransform | None:
    """The transform with numbers of the model's config that makes these logits of the test numbers."""
    if logits is None or logits.shape[-1] != len(test):
        return None
    config: Any = getattr(model, "config", None)
    entries = config.get_text_config().to_dict() if config is not None else {}
    numbers = [
        float(number)
        for name, number in entries.items()
        if isinstance(number, int | float) and number > 0 and _NUMBER_NAMES.search(name)
    ]
    seen = logits.flatten(0, -2)[0]
    tolerance = _TEST_TOLERANCE.get(seen.dtype, 0.02)
    for cap in (None, *numbers):
        for scale in (1.0, *numbers, *(1 / number for number in numbers)):
            transform = LogitTransform(scale, cap)
            if torch.allclose(transform(test.to(seen.dtype)), seen, rtol=tolerance, atol=0):
                return transform
    return None


def token_outputs(
    hidden: Hidden,
    labels: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    masked_ids: Sequence[int] = (),
    entropy: bool = True,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of its distribution, [N] each, in float32 or a wider dtype.

    `masked_ids` have no probability. Without `entropy` the second is zero and costs nothing.
    """
    states, head, transform = hidden
    device = states.device
    if torch.is_autocast_enabled(device.type):
        states = states.to(torch.get_autocast_dtype(device.type))
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor(temperature, dtype=torch.float64, device=device)
    rule = _Rule(
        transform=transform,
        masked_ids=torch.tensor(masked_ids, dtype=torch.int64, device=device),
        entropy=entropy,
        chunk_tokens=chunk_tokens or max(1, CHUNK_ELEMENTS // len(head.weight)),
    )
    return _ChunkedHead.apply(states, head.weight, head.bias, labels, temperature.expand(len(labels)), rule)


class _Rule(NamedTuple):
    """How a chunk's logits are made of the head's outputs, apart from tensors with a gradient."""

    transform: LogitTransform
    masked_ids: Tensor
    entropy: bool
    chunk_tokens: int


class _ChunkedHead(torch.autograd.Function):
    """Computes in the dtype of the hidden states, and sums the gradients of the head in the dtype of its weight."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: Tensor, rule: _Rule
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(states.dtype, torch.float32)
        head = _cast(weight, bias, states.dtype)
        log_probs, entropy = (torch.zeros(len(labels), dtype=dtype, device=states.device) for _ in range(2))
        for part in _parts(len(labels), rule.chunk_tokens):
            chunk, _ = _chunk_log_probs(states[part], *head, temperature[part], rule)
            log_probs[part] = chunk.gather(-1, labels[part, None]).squeeze(-1)
            if rule.entropy:
                entropy[part] = -chunk.exp().mul_(chunk).sum(-1)
        ctx.save_for_backward(states, weight, bias, labels, temperature, entropy)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        if not rule.entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride], of the decorator's type
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        log_prob_gradient, entropy_gradient = gradients
        states, weight, bias, labels, temperature, entropy = ctx.saved_tensors
        rule: _Rule = ctx.rule
        head = _cast(weight, bias, states.dtype)
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        states_gradient = torch.empty_like(states) if needs_states else None
        weight_gradient = torch.zeros_like(weight) if needs_weight else None
        bias_gradient = torch.zeros_like(bias) if needs_bias else None
        for part in _parts(len(labels), rule.chunk_tokens):
            chunk, capped = _chunk_log_probs(states[part], *head, temperature[part], rule)
            gradient = chunk.exp()
            if entropy_gradient is not None:  # of each logit: -p (log p + entropy)
                chunk.add_(entropy[part, None]).mul_(-entropy_gradient[part, None])
            else:
                chunk.zero_()
            if log_prob_gradient is not None:  # of each logit: (1 at the label) - p
                chunk.sub_(log_prob_gradient[part, None])
            gradient.mul_(chunk)
            if log_prob_gradient is not None:
                gradient.scatter_add_(-1, labels[part, None], log_prob_gradient[part, None])
            if len(rule.masked_ids):
                gradient.index_fill_(-1, rule.masked_ids, 0.0)
            gradient.div_(temperature[part, None].to(gradient.dtype))
            gradient = rule.transform.gradient(gradient, capped).to(states.dtype)
            if states_gradient is not None:
                torch.mm(gradient, head[0], out=states_gradient[part])
            if weight_gradient is not None and weight.dtype == states.dtype:
                weight_gradient.addmm_(gradient.T, states[part])
            elif weight_gradient is not None:
                weight_gradient += gradient.T @ states[part]
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
        return states_gradient, weight_gradient, bias_gradient, None, None, None


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _chunk_log_probs(
    states: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, rule: _Rule
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the whole vocabulary, and the logits before the temperature if they have a soft cap."""
    logits = rule.transform(functional.linear(states, weight, bias))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    capped = None if rule.transform.cap is None else logits.clone()
    logits.div_(temperature[:, None].to(logits.dtype))
    if len(rule.masked_ids):
        # Not -inf: the entropy would multiply it by zero.
        logits.index_fill_(-1, rule.masked_ids, torch.finfo(logits.dtype).min / 2)
    return logits.sub_(logits.logsumexp(-1, keepdim=True)), capped
