"""Runs the sessions of a round and records each in the store: finished with its trajectories, or failed with a cause.

An exception, an invalid return value or an unfinished task of an agent fails that session only, and is the cause that
is recorded; all other sessions produce identical results. Three errors are not an agent's and end the run: those
of the store, of the engine, and Ctrl-C. A failed session runs again under the next attempt number, up to
`settings.attempts` times; what a failure means for its group is decided by the trainer.

All sessions share one event loop in the calling thread. A context variable identifies the agent whose code is running,
also in the tasks that it starts (see `guard`); it is None while code of the runner or of the engine runs. The end of a
session cancels the tasks that its agent started, and no others.

A time-out does not wait for the agent. The agent is cancelled and gets a short grace period; one that swallows the
cancellation is left behind, its session closed, and never runs again after the round.
"""

import asyncio
import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from threading import get_ident

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from raggedright.agents.agent_session import Agent, RolloutSettings, Session, Task
from raggedright.agents.guard import (
    AgentRun,
    AgentTask,
    GuardedLoop,
    Watchdog,
    cause_of,
    is_of_agent,
    no_agent,
    one_line,
)
from raggedright.agents.trajectory import as_finite_float
from raggedright.agents.vision import Vision
from raggedright.errors import RaggedRightError
from raggedright.rollout.engine import Engine, EngineError, Generation, Request
from raggedright.sessions import Session as RecordedSession
from raggedright.sessions import SessionError, SessionKey, SessionTable, check_session
from raggedright.store.session_store import Store

CANCELLED = "cancelled"
# Sessions that end within this time of each other are recorded together, because a write to disk takes as long as a
# hundred short rows. What a crash loses in that time runs again.
FLUSH_SECONDS = 0.5
MAX_GRACE_SECONDS = 1.0  # between cancelling an agent and leaving it behind

OnDone = Callable[[int], None]
"""Is called with the number of sessions whose last attempt was just recorded."""

_log = logging.getLogger(__name__)
_Start = tuple[Task, SessionKey, int]  # a task, the key of its first attempt, and the number of its last one


class Runner:
    """Runs an agent on tasks, with an engine; `run` can be called any number of times. `vision` is for images."""

    def __init__(
        self,
        *,
        agent: Agent,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        settings: RolloutSettings,
        vision: Vision | None = None,
    ) -> None:
        self._agent, self._engine, self._tokenizer, self._settings = agent, engine, tokenizer, settings
        self._vision = vision
        self._current: _Rollout | None = None

    def run(
        self,
        store: Store,
        *,
        round: int,
        sessions: Sequence[tuple[Task, int]],
        greedy: bool = False,
        resume: bool = False,
        on_done: OnDone | None = None,
    ) -> SessionTable:
        """Run these (task, session number) pairs until each is finished or failed in the store; return their table.

        With `resume`, those that the store has as finished, or as failed in their last attempt, are not run again, and
        attempts that the store has count; without it, every session gets new attempts.
        `on_done` gets the number of sessions whose last attempt was just recorded. In the main thread an agent that
        blocks the loop is interrupted when its time is over; in other threads it is not (see `guard`).
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RaggedRightError("Runner.run drives an event loop of its own; call it outside of async code")
        settings = self._settings
        if greedy:
            settings = replace(settings, sampling=replace(settings.sampling, temperature=0.0))
        tasks: dict[tuple[str, int], Task] = {}
        for task, number in sessions:
            if (task.uid, number) in tasks:
                raise RaggedRightError(
                    f"round {round}: session {task.uid}/{number} is listed twice; number them 0, 1, ..."
                )
            tasks[task.uid, number] = task
        table = store.sessions(round)
        next_attempt, reused = dict.fromkeys(tasks, 0), []
        for i, name in enumerate(zip(table.prompt.tolist(), table.session.tolist(), strict=True)):
            if name in tasks:
                next_attempt[name] = int(table.attempt[i]) + 1
                if resume and (not table.failed[i] or next_attempt[name] >= settings.attempts):
                    del next_attempt[name]
                    reused.append(i)
        keys = [SessionKey(round, *name, attempt) for name, attempt in next_attempt.items()]
        recorder = SessionRecorder(store, round, keys, on_done)
        new_session = partial(
            Session,
            tokenizer=self._tokenizer,
            settings=settings,
            context_tokens=self._engine.context_tokens,
            vision=self._vision,
        )
        self._current = _Rollout(self._agent, self._engine, settings, recorder, new_session)
        started = [(tasks[k.prompt, k.session], k, settings.attempts - 1 + (0 if resume else k.attempt)) for k in keys]
        try:
            self._current.run(started)
        finally:
            self._current = None
        return SessionTable.join([table.take(np.array(reused, dtype=np.int64)), *recorder.final])

    def cancel(self, *, record: bool = True) -> None:
        """End the run that is under way, if any: sessions that have not ended become failed (cancelled).

        Without `record` nothing of them is stored, so that they can be run later as if they had never been started.
        Call it from a signal handler or from another thread; `run` returns soon after.
        """
        if (current := self._current) is not None:
            current.cancel(record=record)


class SessionRecorder:
    """Records the attempts that have ended in the store; the only place where that is done.

    `open` has the current attempt of each session that is not final, `final` the tables of those that are.
    """

    def __init__(self, store: Store, round: int, keys: Sequence[SessionKey], on_done: OnDone | None) -> None:
        self._store, self._round, self._on_done = store, round, on_done
        self.open = {(key.prompt, key.session): key for key in keys}
        self.final: list[SessionTable] = []
        self._ended: list[tuple[RecordedSession, bool]] = []

    def add(self, session: RecordedSession, *, is_last: bool) -> None:
        """Take an attempt that has ended, the last one of its session or not; `flush` records it."""
        self._ended.append((session, is_last))

    def flush(self) -> None:
        """Record all attempts that have ended."""
        ended, self._ended = self._ended, []
        self._store.append([session for session, _ in ended])
        final = [session for session, is_last in ended if is_last]
        self.final.append(SessionTable.of(self._round, final))
        for session, is_last in ended:
            key = session.key
            self.open[key.prompt, key.session] = key._replace(attempt=key.attempt + 1)
            if is_last:
                del self.open[key.prompt, key.session]
        if self._on_done is not None and final:
            self._on_done(len(final))

    def flush_cancelled(self, *, record: bool) -> None:
        """Record attempts that have ended, and with `record` all open sessions as failed."""
        self.flush()
        self._ended = [(RecordedSession(key=key, cause=CANCELLED), True) for key in self.open.values() if record]
        self.flush()


class _Attempt(AgentRun):
    """An agent under way, and what it runs on; its key is a copy, because an agent may do anything to its session."""

    def __init__(self, loop: GuardedLoop, timeout: float, task: Task, key: SessionKey, last_attempt: int) -> None:
        super().__init__(loop, timeout)
        self.task, self.key, self.last_attempt = task, key, last_attempt
        self.session: Session
        self.running: AgentTask
        self.timer: asyncio.TimerHandle

    def end(self, why: str) -> None:
        """Close the session and cancel the tasks that the agent still has."""
        if not self.ended:
            self.session.end(why)
            self.ended = True
            self.cancel_tasks()


class _Rollout:
    """One run of a round's sessions: its event loop, the agents under way, and how all of it ends.

    An attempt is one task, the agent's. Its end, or the end of its time, is recorded and starts what comes next, so
    that up to `concurrency` sessions run at once. When the run has to end, nothing more is recorded or started.
    """

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        settings: RolloutSettings,
        recorder: SessionRecorder,
        new_session: Callable[..., Session],
    ) -> None:
        self._agent, self._engine, self._settings = agent, engine, settings
        self._recorder, self._new_session = recorder, new_session
        self._grace = min(MAX_GRACE_SECONDS, settings.timeout)
        self._timeout_cause = f"timed out after {settings.timeout:g} s"
        self._active: list[_Attempt] = []  # including those in their grace period
        self._waiting: Iterator[_Start] = iter(())
        self._num_open = 0  # sessions that are not final
        self._flush_timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        self._records_cancelled = True
        self._loop = GuardedLoop()
        self._loop.set_exception_handler(lambda _loop, context: _log.debug("in an agent's task: %s", context))
        self._all_final = self._loop.create_future()
        self._main: asyncio.Task[None] | None = None
        self._thread = get_ident()

    def run(self, sessions: Sequence[_Start]) -> None:
        """Run them all; afterwards none of their code runs."""
        with Watchdog(self._loop, self._settings.timeout).watching(), _torch_settings_restored():
            try:
                self._main = self._loop.create_task(self._run_all(sessions))
                self._drive(self._main)
            except asyncio.CancelledError:
                if self._error is not None:
                    with suppress(RaggedRightError):  # the first error says more
                        self._recorder.flush()
                    raise self._error from None
                if not self._loop.stopped:
                    raise RaggedRightError(
                        "an agent cancelled tasks that it did not start (asyncio.all_tasks returns all tasks); "
                        "cancel only its own tasks"
                    ) from None
                self._recorder.flush_cancelled(record=self._records_cancelled)
            except KeyboardInterrupt:
                self._end_all()
                with suppress(RaggedRightError):  # it may have come in the middle of a write to the store
                    self._recorder.flush_cancelled(record=True)
                raise
            finally:
                self._close()

    def cancel(self, *, record: bool) -> None:
        """End the run, from any thread or signal handler."""
        self._records_cancelled = record
        self._loop.stopped = True
        with suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._end_all()
        assert self._main is not None
        with no_agent():
            self._main.cancel()

    async def _run_all(self, sessions: Sequence[_Start]) -> None:
        self._waiting, self._num_open = iter(sessions), len(sessions)
        for _ in range(min(self._settings.concurrency, len(sessions))):
            self._start_next()
        if sessions:
            await self._all_final
        self._recorder.flush()

    def _start_next(self) -> None:
        """Start a session that waits, if there is one."""
        if (waiting := next(self._waiting, None)) is not None:
            self._start(*waiting)

    def _start(self, task: Task, key: SessionKey, last_attempt: int) -> None:
        """Start the agent on a task; `_on_done` or `_check_time` notices its end."""
        attempt = _Attempt(self._loop, self._settings.timeout, task, key, last_attempt)
        attempt.session = self._new_session(task, key, generate=self._generate)
        attempt.running = self._loop.start(self._run_attempt(attempt), attempt)
        attempt.running.add_done_callback(partial(self._on_done, attempt))
        attempt.timer = self._loop.call_later(self._settings.timeout, self._check_time, attempt)
        self._active.append(attempt)

    async def _run_attempt(self, attempt: _Attempt) -> RecordedSession:
        """Call the agent, and record its session.

        An agent's own objects are evaluated here, in its task, where the watchdog can interrupt them: the reward's
        `__float__` or the text of an exception may do anything.
        """
        failed = partial(RecordedSession, key=attempt.key)
        try:
            value = await self._await_agent(attempt.session)
        except (KeyboardInterrupt, GeneratorExit):  # Ctrl-C; or the task is freed
            raise
        except BaseException as error:
            if attempt.blocked_for and isinstance(error, asyncio.CancelledError):
                return failed(cause=attempt.blocked_cause)
            return failed(cause=cause_of(error, __file__))
        try:
            recorded = _record(attempt, value)
        except SessionError as invalid:
            return failed(cause=one_line(f"SessionError: {invalid}"))
        except BaseException as error:
            return failed(cause=cause_of(error, __file__))
        return failed(cause=attempt.blocked_cause) if attempt.blocked_for else recorded

    async def _await_agent(self, session: Session) -> object:
        # A copy, because the sessions of a prompt share a task, and an agent may change it.
        session.task = Task(uid=session.task.uid, data=deepcopy(session.task.data))
        awaitable = self._agent(session.task, session)
        if not isawaitable(awaitable):
            raise SessionError(f"the agent returned a {type(awaitable).__name__} at once; make it `async def`")
        try:
            return await awaitable
        finally:
            session.end("its agent has returned")

    def _on_done(self, attempt: _Attempt, _task: AgentTask) -> None:
        is_late = attempt.ended
        if attempt in self._active:
            attempt.end("its agent has returned")
            self._finish(attempt, is_late=is_late)

    def _check_time(self, attempt: _Attempt) -> None:
        """End an attempt whose time is over; check again later if other agents blocked the loop for some of it."""
        if attempt.ended or attempt.running.done():
            return
        if (seconds := attempt.seconds_left) > 0:
            attempt.timer = self._loop.call_later(seconds, self._check_time, attempt)
        else:
            attempt.end(self._timeout_cause)
            attempt.timer = self._loop.call_later(self._grace, partial(self._finish, attempt, is_late=True))

    def _finish(self, attempt: _Attempt, *, is_late: bool) -> None:
        """Record an attempt that is over, once, and start what comes next; a late agent may be left behind."""
        if attempt not in self._active or self._all_final.done():
            return
        self._active.remove(attempt)
        attempt.timer.cancel()
        key = attempt.key
        try:
            running = attempt.running
            if is_late and not attempt.blocked_for:
                result = RecordedSession(
                    key=key, cause=f"{self._timeout_cause}; make it faster, or raise rollout.timeout"
                )
            elif running.done() and not running.cancelled() and running.exception() is None:
                result = running.result()
            else:
                cause = attempt.blocked_cause if attempt.blocked_for else "the agent's task ended without a result"
                result = RecordedSession(key=key, cause=cause)
            attempt.session.release(self._engine.forget)
            is_final = not result.cause or key.attempt == attempt.last_attempt
            self._recorder.add(result, is_last=is_final)
            if self._flush_timer is None:
                self._flush_timer = self._loop.call_later(FLUSH_SECONDS, self._flush)
            if not is_final:
                self._start(attempt.task, key._replace(attempt=key.attempt + 1), attempt.last_attempt)
                return
            self._start_next()
            self._num_open -= 1
            if not self._num_open:
                self._all_final.set_result(None)
        except BaseException as error:  # the loop would only log it, and the run would never end
            self._fail(error)
            raise

    def _flush(self) -> None:
        self._flush_timer = None
        try:
            self._recorder.flush()
        except Exception as error:
            self._fail(error)

    async def _generate(self, request: Request) -> Generation:
        """Ask the engine, whose code and tasks belong to no agent; its errors end the run."""
        if get_ident() != self._thread:
            raise SessionError("generate was called in another thread than the agent's; await it in the agent itself")
        try:
            with no_agent():
                generation = await self._engine.generate(request)
            if len(generation.ids) != len(generation.log_probs):
                counts = f"{len(generation.ids)} ids and {len(generation.log_probs)} log-probs"
                raise EngineError(f"the engine answered with {counts}; each id has one")
        except Exception as error:
            self._fail(error)
            raise
        return generation

    def _fail(self, error: BaseException) -> None:
        """End the run with an error that is not an agent's."""
        self._error = self._error or error
        self._stop()

    def _end_all(self) -> None:
        for attempt in [*self._active]:
            attempt.end(CANCELLED if self._loop.stopped else "the run has ended")

    def _drive(self, future: "asyncio.Task[object] | asyncio.Task[None]") -> None:
        """Run the loop until the future is done, whatever agents do to the loop."""
        while True:
            try:
                self._loop.run_until_complete(future)
            except SystemExit as error:  # asyncio lets it through; in an agent's callback or task it is harmless
                if not is_of_agent(error):
                    raise
            except RuntimeError:
                if future.done():
                    raise
                _log.debug("an agent stopped the event loop; starting it again")
            else:
                return

    def _close(self) -> None:
        self._all_final.cancel()
        try:
            self._end_all()
            if tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._drive(self._loop.create_task(asyncio.wait(tasks, timeout=self._grace)))
        finally:
            for task in asyncio.all_tasks(self._loop):
                # Never free a task that would not end: freeing it runs its code once more, even at the interpreter's
                # exit, and an agent that swallows everything would then run forever, outside of any event loop.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
            self._loop.close()


@contextmanager
def _torch_settings_restored() -> Iterator[None]:
    """Restore torch's settings after the rollout: an agent may change them for a model of its own."""
    grad, dtype, device = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    try:
        with torch.inference_mode(torch.is_inference_mode_enabled()):  # its end also ends what was entered inside
            torch.set_grad_enabled(grad)
            yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)


def _record(attempt: _Attempt, value: object) -> RecordedSession:
    """The session of an agent that returned: it needs a finite reward and one trajectory or more."""
    failed = partial(RecordedSession, key=attempt.key)
    score = as_finite_float(value)
    if score is None:
        shown = str(value) if value is None or type(value) is float else f"a {type(value).__name__}"
        return failed(cause=one_line(f"returned {shown}; end the agent with `return reward`, a finite number"))
    if not attempt.session.num_trajectories:
        return failed(
            cause="returned without a trajectory; open one with session.trajectory(prompt) and generate in it"
        )
    recorded = replace(attempt.session.record(score), key=attempt.key)  # an agent may do anything to its session's key
    check_session(recorded)
    return recorded
