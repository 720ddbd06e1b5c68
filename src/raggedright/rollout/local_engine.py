"""The local engine: any transformers causal language model, in this process, with all waiting requests in one batch.

`generate` queues a request and waits for its answer. While there are requests, one task of the event loop takes
turns: it lets whoever is ready submit first, reads newcomers in, decodes one token for all rows, and hands out what is
finished, so that its agents go on at once. Between turns the loop runs: time-outs and cancellations act, and a
cancelled request leaves the batch. An engine's failure reaches every request under way as an EngineError.

The engine belongs to no event loop for good: loops may use it one after another (`asyncio.run` once a round), never
two at once. The surprise: with `shared`, `update_weights` reads no weights. The model is the one that trains, and has
them already.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterable
from threading import get_ident

from torch import Tensor

from raggedright.errors import ConfigError
from raggedright.rollout.batch import Job
from raggedright.rollout.cache import Forward
from raggedright.rollout.engine import EngineContext, EngineError, Generation, Request
from raggedright.rollout.noise import as_key
from raggedright.rollout.stops import TextStops
from raggedright.rollout.turn_cache import TurnCache
from raggedright.rollout.turns import Turns, fail
from raggedright.rollout.weights import load_weights

_NO_LIMIT = 1 << 40


class LocalEngine:
    """Generates with a transformers model in this process."""

    def __init__(self, context: EngineContext) -> None:
        if context.max_batch_rows < 1:
            raise ConfigError(f"max_batch_rows is {context.max_batch_rows}; a batch has 1 row or more")
        self._forward = Forward(context.model, pad_token_id=context.pad_token_id, routers=context.routers)
        if not 0 <= context.pad_token_id < self._forward.vocabulary:
            raise ConfigError(
                f"pad_token_id is {context.pad_token_id} and the model has {self._forward.vocabulary:,} tokens"
            )
        self._model = context.model
        self._tokenizer = context.tokenizer
        self._max_batch_rows = context.max_batch_rows
        self._shared = context.shared
        self._version = 0
        self._closed = False
        self._incomplete = ""
        self._num_requests = 0
        self._turns: Turns | None = None
        self._turn_cache = TurnCache(context.kept_bytes)

    @property
    def context_tokens(self) -> int:
        """The most tokens that a context, with what is generated, may have."""
        return self._forward.max_positions or _NO_LIMIT

    async def generate(self, request: Request) -> Generation:
        """The continuation of a context, in a batch with whatever else is under way."""
        if self._closed:
            raise EngineError("the engine is closed and takes no more requests")
        if self._incomplete:
            raise EngineError(f"the last update of weights failed ({self._incomplete}); update them again first")
        turns = self._turns_here()
        job = Job(
            number=self._num_requests,
            context=self._context(request),
            key=as_key(request.noise),
            sampling=request.sampling,
            texts=self._text_stops(request),
            future=turns.loop.create_future(),
            media=request.media or None,
        )
        self._num_requests += 1
        turns.submit(job)
        return await job.future

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Generate as of `version` from now on; a copy loads full tensors by name, and needs every parameter."""
        self._turn_cache.clear()
        if not self._shared:
            self._incomplete = "it broke off"
            self._incomplete = load_weights(self._model, weights)
            if self._incomplete:
                raise EngineError(f"weights of version {version} do not fit the engine's model: {self._incomplete}")
        self._version = version

    def forget(self, noise: bytes) -> None:
        """Let go of what is kept of a trajectory."""
        self._turn_cache.forget(as_key(noise))

    def abort(self) -> None:
        """Every generation under way returns at once, with what it has; from any thread or signal handler."""
        self._settle(lambda job: job.finish("abort", self._version))

    def close(self) -> None:
        """Fail the requests under way and refuse later ones."""
        self._closed = True
        self._turn_cache.clear()
        self._settle(lambda job: fail(job, EngineError("the engine was closed while this request was under way")))

    def _settle(self, end: Callable[[Job], None]) -> None:
        if self._turns is not None:
            self._turns.settle(end, before=self._num_requests)

    def _turns_here(self) -> Turns:
        """The turns that the running loop takes; those of an earlier one, with whatever it left behind, are forgotten.

        Whose thread a loop runs in says whether it is this one; asyncio's own answer asks the kernel every time.
        """
        turns = self._turns
        if turns is not None and getattr(turns.loop, "_thread_id", None) == get_ident():
            return turns
        loop = asyncio.get_running_loop()
        if turns is None or turns.loop is not loop:
            if turns is not None and turns.busy and turns.loop.is_running():
                raise EngineError("the engine is at work in another event loop; use it from one loop at a time")
            self._turns = turns = Turns(
                self._forward,
                loop,
                max_batch_rows=self._max_batch_rows,
                turn_cache=self._turn_cache,
                version=lambda: self._version,
            )
        return turns

    def _context(self, request: Request) -> bytes:
        """The ids of a request that can be answered, as the cache takes them."""
        new = request.sampling.max_tokens
        try:
            ids = array("q", request.ids)
        except (TypeError, OverflowError) as error:
            raise EngineError(f"a request's ids are not whole numbers of 64 bits ({error})") from None
        if not ids:
            raise EngineError("a request has no ids; a context has 1 token or more, such as the tokenizer's first one")
        most, size = self._forward.max_positions or _NO_LIMIT, self._forward.vocabulary
        if len(ids) + new > most:
            raise EngineError(
                f"a context of {len(ids):,} tokens and max_tokens = {new:,} make {len(ids) + new:,}, and the model has "
                f"{most:,} positions; shorten the context or lower max_tokens"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= size:
            raise EngineError(
                f"token id {low if low < 0 else high:,} is outside the model's vocabulary of {size:,} (ids from 0); "
                "the tokenizer belongs to another model"
            )
        self._forward.sight.check(ids, request.media or None)
        return ids.tobytes()

    def _text_stops(self, request: Request) -> TextStops | None:
        texts = request.sampling.stop_texts
        if not texts:
            return None
        if self._tokenizer is None:
            raise EngineError(f"a request stops at {texts[0]!r}, and the engine has no tokenizer to decode with")
        return TextStops(texts, self._tokenizer)
