"""The local engine: any causal language model of transformers, in this process, all waiting requests in one batch.

`generate` queues a request and waits for its answer. While there are requests, one task of the event loop runs decode
steps. A decode step: tasks that are ready to submit requests do so, new requests are read up to the row limit, every
row gets one token, and the event loop runs, so that time-outs and cancellations act and agents continue as soon as they
have their answer. A failure inside a step reaches every request under way, each as an EngineError of its own.

Event loops may use an engine one after another (`asyncio.run` once per round), never two at once. With `shared`,
`update_weights` reads no weights: the model is the one that trains, and has them already.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from raggedright.errors import ConfigError
from raggedright.rollout.decode_batch import Batch, Job
from raggedright.rollout.engine import EngineContext, EngineError, Generation, Request
from raggedright.rollout.kv_cache import Ids, KeptRows
from raggedright.rollout.local_model import LocalModel
from raggedright.rollout.sampling import TextStops, as_key

_NO_LIMIT = 1 << 40

# Iterations of the event loop without a new request before a batch continues: an agent may need some to get from one
# generation to its next.
IDLE_LOOP_ITERATIONS = 3


class LocalEngine:
    """Generates with a transformers model in this process."""

    def __init__(self, context: EngineContext) -> None:
        if context.max_batch_rows < 1:
            raise ConfigError(f"max_batch_rows is {context.max_batch_rows}; a batch has 1 row or more")
        self._model = LocalModel(context.model, pad_token_id=context.pad_token_id, routers=context.routers)
        if not 0 <= context.pad_token_id < self._model.vocabulary:
            raise ConfigError(
                f"pad_token_id is {context.pad_token_id} and the model has {self._model.vocabulary:,} tokens"
            )
        self._context = context
        self._kept_rows = KeptRows(context.kept_bytes)
        self._version = 0
        self._closed = False
        self._incomplete = ""  # what the last update of the weights lacked
        self._num_requests = 0
        self._decode_loop: _DecodeLoop | None = None

    @property
    def context_tokens(self) -> int:
        """The most tokens that a context together with its generated tokens may have."""
        return self._model.max_positions or _NO_LIMIT

    async def generate(self, request: Request) -> Generation:
        """Continue a context, in a batch with the other requests under way."""
        if self._closed:
            raise EngineError("the engine is closed and takes no more requests")
        if self._incomplete:
            raise EngineError(f"the last update of weights failed ({self._incomplete}); update them again first")
        decode_loop = self._decode_loop_here()
        job = Job(
            number=self._num_requests,
            context=self._check(request),
            key=as_key(request.noise),
            sampling=request.sampling,
            texts=self._text_stops(request),
            future=decode_loop.loop.create_future(),
            media=request.media or None,
        )
        self._num_requests += 1
        decode_loop.submit(job)
        return await job.future

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Report `version` from now on; an engine with a copy loads full tensors by name, and needs every parameter."""
        self._kept_rows.clear()
        if not self._context.shared:
            self._incomplete = "it was interrupted"
            self._incomplete = self._model.load(weights)
            if self._incomplete:
                raise EngineError(f"weights of version {version} do not fit the engine's model: {self._incomplete}")
        self._version = version

    def forget(self, noise: bytes) -> None:
        """Release what is kept of the trajectory with this noise."""
        self._kept_rows.drop(as_key(noise))

    def abort(self) -> None:
        """Make every generation under way return at once, with what it has; from any thread or signal handler."""
        self._end_requests(lambda job: job.finish("abort", self._version))

    def close(self) -> None:
        """Fail the requests under way and refuse later ones."""
        self._closed = True
        self._kept_rows.clear()
        self._end_requests(
            lambda job: _fail(job, EngineError("the engine was closed while this request was under way"))
        )

    def _end_requests(self, end: Callable[[Job], None]) -> None:
        """End the requests that were submitted so far, between two decode steps."""
        if self._decode_loop is not None and not self._decode_loop.loop.is_closed():
            self._decode_loop.loop.call_soon_threadsafe(self._decode_loop.end_jobs, end, self._num_requests)

    def _decode_loop_here(self) -> "_DecodeLoop":
        """That of the running event loop; that of an earlier one, with the requests it left behind, is dropped."""
        loop, decode_loop = asyncio.get_running_loop(), self._decode_loop
        if decode_loop is None or decode_loop.loop is not loop:
            if decode_loop is not None and decode_loop.task is not None and decode_loop.loop.is_running():
                raise EngineError("the engine is at work in another event loop; use it from one loop at a time")
            batch = Batch(self._model, self._kept_rows)
            self._decode_loop = decode_loop = _DecodeLoop(
                loop, batch, self._context.max_batch_rows, version=lambda: self._version
            )
        return decode_loop

    def _check(self, request: Request) -> Ids:
        """The ids of a request that can be answered."""
        try:
            ids = np.frombuffer(array("q", request.ids), dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise EngineError(f"a request's ids are not integers of 64 bits ({error})") from None
        if not len(ids):
            raise EngineError("a request has no ids; a context has 1 token or more, such as the tokenizer's first one")
        num_new, limit, size = request.sampling.max_tokens, self.context_tokens, self._model.vocabulary
        if len(ids) + num_new > limit:
            raise EngineError(
                f"a context of {len(ids):,} tokens and max_tokens = {num_new:,} make {len(ids) + num_new:,}, and the "
                f"model has {limit:,} positions; shorten the context or lower max_tokens"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise EngineError(
                f"token id {low if low < 0 else high:,} is outside the model's vocabulary of {size:,} (ids from 0); "
                "the tokenizer belongs to another model"
            )
        self._model.check_media(ids, request.media)
        return ids

    def _text_stops(self, request: Request) -> TextStops | None:
        texts, tokenizer = request.sampling.stop_texts, self._context.tokenizer
        if not texts:
            return None
        if tokenizer is None:
            raise EngineError(f"a request stops at {texts[0]!r}, and the engine has no tokenizer to decode with")
        return TextStops(texts, tokenizer)


class _DecodeLoop:
    """The requests under way in one event loop; `task` runs decode steps while there are any."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, batch: Batch, max_batch_rows: int, *, version: Callable[[], int]
    ) -> None:
        self.loop = loop
        self.task: asyncio.Task[None] | None = None
        self._batch, self._max_batch_rows, self._version = batch, max_batch_rows, version
        self._waiting: list[Job] = []

    def submit(self, job: Job) -> None:
        """Take a request; the task starts if it does not run."""
        self._waiting.append(job)
        if self.task is None:
            self.task = self.loop.create_task(self._run())

    def end_jobs(self, end: Callable[[Job], None], before: int) -> None:
        """End every job with a number below `before`."""
        for job in [*self._batch.jobs, *self._waiting]:
            if job.number < before:
                end(job)

    async def _run(self) -> None:
        failure: BaseException = EngineError("the engine's task ended with requests under way")
        try:
            while self._waiting or self._batch.jobs:
                await self._let_others_submit()
                self._admit()
                await asyncio.sleep(0)
                self._batch.decode_step(self._version())
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            self.task = None
            jobs = [*self._batch.jobs, *self._waiting]  # none after a clean end
            self._waiting.clear()
            self._batch.clear()
            for job in jobs:
                _fail(job, failure)

    async def _let_others_submit(self) -> None:
        quiet = 0
        while quiet < IDLE_LOOP_ITERATIONS and len(self._waiting) < self._max_batch_rows - len(self._batch.jobs):
            num_waiting = len(self._waiting)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == num_waiting else 0

    def _admit(self) -> None:
        """Read new requests, in the order in which they came, as many as there is room for."""
        self._waiting = [job for job in self._waiting if not job.future.done()]
        jobs = self._waiting[: self._max_batch_rows - len(self._batch.jobs)]
        if jobs:
            self._batch.admit(jobs, self._version())
            del self._waiting[: len(jobs)]


def _fail(job: Job, error: BaseException) -> None:
    """Raise the error in the job's `generate`, as an exception object of its own, so that tracebacks do not pile up."""
    future = job.future
    if future.done() or future.get_loop().is_closed():
        return
    if isinstance(error, EngineError):
        failure = EngineError(*error.args)
    elif isinstance(error, asyncio.CancelledError):
        failure = EngineError("the engine's task was cancelled while this request was under way")
    elif isinstance(error, Exception):
        cause = str(error).partition("\n")[0]
        remedy = "; lower max_batch_rows or max_tokens" if "memory" in cause else ""
        failure = EngineError(f"the model failed while it generated: {type(error).__name__}: {cause}{remedy}")
    else:
        future.cancel()
        return
    failure.__cause__ = error
    future.set_exception(failure)
