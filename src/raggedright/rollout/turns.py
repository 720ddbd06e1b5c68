"""One event loop's use of an engine: who waits, who decodes, and the task that takes turns between them.

The task lives while there are requests. A turn: whoever is ready to submit does so, newcomers are read in up to the
row limit, every row gets one token, and the loop runs. A failure inside a turn is given to every request under way,
each as an error of its own; so is the task's cancellation, which ends with the loop that it belongs to.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from raggedright.rollout.batch import Batch, Job
from raggedright.rollout.cache import Forward
from raggedright.rollout.engine import EngineError
from raggedright.rollout.turn_cache import TurnCache

# Turns of the event loop without a new request before a batch goes on: an agent may need some to get from one
# generation to its next.
_QUIET_TURNS = 3


class Turns:
    """The requests under way in one event loop."""

    def __init__(
        self,
        forward: Forward,
        loop: asyncio.AbstractEventLoop,
        *,
        max_batch_rows: int,
        turn_cache: TurnCache,
        version: Callable[[], int],
    ) -> None:
        self.loop = loop
        self._max_batch_rows = max_batch_rows
        self._version = version
        self._waiting: deque[Job] = deque()
        self._admitting: list[Job] = []
        self._batch = Batch(forward, turn_cache)
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether there are requests under way."""
        return self._task is not None

    def submit(self, job: Job) -> None:
        """Take a request; the task that will answer it starts if it does not run."""
        self._waiting.append(job)
        if self._task is None:
            self._task = self.loop.create_task(self._run())

    def settle(self, end: Callable[[Job], None], *, before: int) -> None:
        """End every job with a number below `before`, between two turns; from any thread or signal handler."""

        def settle() -> None:
            for job in [*self._batch.jobs, *self._waiting]:
                if job.number < before:
                    end(job)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(settle)

    async def _run(self) -> None:
        failure: BaseException = EngineError("the engine's task ended with requests under way")
        try:
            while self._waiting or self._batch.jobs:
                await self._let_others_submit()
                self._admit()
                await asyncio.sleep(0)
                self._batch.turn(self._version())
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._end_all(failure)

    def _end_all(self, failure: BaseException) -> None:
        """Nothing that is still under way waits for ever; after a clean end there is nothing left."""
        self._task = None
        left = [*self._batch.jobs, *self._waiting, *self._admitting]
        self._waiting.clear()
        self._admitting = []
        self._batch.clear()
        for job in left:
            fail(job, failure)

    async def _let_others_submit(self) -> None:
        quiet = 0
        while quiet < _QUIET_TURNS and len(self._waiting) < self._max_batch_rows - len(self._batch.jobs):
            seen = len(self._waiting)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == seen else 0

    def _admit(self) -> None:
        """Read newcomers in, first come first served, as many as there is room for."""
        free = self._max_batch_rows - len(self._batch.jobs)
        while self._waiting and len(self._admitting) < free:
            job = self._waiting.popleft()
            if not job.future.done():
                self._admitting.append(job)
        if self._admitting:
            self._batch.admit(self._admitting, self._version())
            self._admitting = []


def fail(job: Job, error: BaseException) -> None:
    """Give a job an error of its own, so that tracebacks do not pile up on one that is shared."""
    future = job.future
    if future.done() or future.get_loop().is_closed():
        return
    if isinstance(error, EngineError):
        own = EngineError(*error.args)
    elif isinstance(error, asyncio.CancelledError):
        own = EngineError("the engine's task was cancelled while this request was under way")
    elif isinstance(error, Exception):
        cause = str(error).partition("\n")[0]
        remedy = "; lower max_batch_rows or max_tokens" if "memory" in cause else ""
        own = EngineError(f"the model failed while it generated: {type(error).__name__}: {cause}{remedy}")
    else:
        future.cancel()
        return
    own.__cause__ = error
    future.set_exception(own)
