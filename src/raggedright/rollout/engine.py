"""The interface of every rollout engine: token ids in; sampled ids, their log-probs and the weight version out.

Nothing is re-tokenised: the ids are those that were sampled. A log-prob is that of the distribution from which its
token was drawn (after temperature, top-k and top-p); the log-prob of a greedy token is that of the plain softmax. Every
request is answered, or its `generate` raises: none waits forever.

Each request carries its own random key. The token at position t of a row depends on the row's logits and on a number
that depends on (noise, t) only, so it does not matter in which batch a request runs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from numpy import integer
from numpy.typing import NDArray
from torch import Tensor, nn

from raggedright.errors import ConfigError, RaggedRightError
from raggedright.tensors.routing import Routers

FinishReason = Literal["stop", "length", "abort"]

Media = Mapping[str, Tensor]
"""The processor's output for the images of a context: pixel_values and image_grid_thw of all of them."""

MIN_TEMPERATURE = 1e-4
"""For tokens that are trained: logits divided by much less exceed the range of float32."""


class EngineError(RaggedRightError):
    """A request cannot be answered, or the engine failed while it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn and when to stop; temperature 0 is greedy, top_k 0 and top_p 1 cut nothing.

    A generated token among `stop_ids` ends the generation and is part of it; so does a token that completes one of
    `stop_texts`, for which the engine needs a tokenizer.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; a generation has 1 token or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature is {self.temperature}; it is 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it is above 0 and at most 1 (1 cuts nothing)")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it is 0 (cuts nothing) or a number of tokens")
        if "" in self.stop_texts:
            raise ConfigError("stop_texts has an empty text, which every text contains; leave it out")


class Request(NamedTuple):
    """The whole context so far, how to continue it, and the key of the trajectory's noise (`sampling.noise_key`)."""

    ids: Sequence[int]
    sampling: Sampling
    noise: bytes
    media: Media | None = None


def join_media(media: Iterable[Media | None]) -> Media:
    """The media of several images or rows as one, in their order."""
    parts = [each for each in media if each]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


class Generation(NamedTuple):
    """The tokens of one request, and the version of the weights that sampled the last of them.

    `routed_experts` [positions, layers, topk] are the experts of the context and of all new tokens except the last,
    which was never fed to the model; None where the engine does not record them.
    """

    ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    routed_experts: NDArray[integer] | None = None


class Decoder(Protocol):
    """The part of a tokenizer that an engine needs to stop at a text."""

    def decode(self, token_ids: list[int]) -> str | list[str]:
        """The text of some tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine is made with: an engine is any callable that takes an EngineContext and options of its own.

    With `shared`, `model` is the model that trains, so an update of the weights is already in it; otherwise it is a
    copy that `update_weights` loads into. `kept_bytes` limits the keys and values that an engine keeps of trajectories
    between their generations (0 keeps none). With `routers`, the experts of every position are recorded.
    """

    model: nn.Module
    tokenizer: Decoder | None = None
    pad_token_id: int = 0
    max_batch_rows: int = 512
    shared: bool = True
    kept_bytes: int = 1 << 30
    routers: Routers | None = None


class Engine(Protocol):
    """Generates tokens for any number of requests at once."""

    async def generate(self, request: Request) -> Generation:
        """Continue a context; requests that are under way at the same time share batches."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Generate with these weights from now on, and report `version`."""
        ...

    def forget(self, noise: bytes) -> None:
        """Release what is kept of the trajectory with this noise: it will not generate again."""
        ...

    def abort(self) -> None:
        """Make every generation under way return at once, with the tokens it has and finish_reason "abort"."""
        ...

    def close(self) -> None:
        """Fail the requests under way and refuse later ones."""
        ...

    @property
    def context_tokens(self) -> int:
        """The most tokens that a context together with its generated tokens may have."""
        ...
