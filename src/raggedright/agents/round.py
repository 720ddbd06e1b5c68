"""One run of a round's sessions: its event loop, the agents under way, how each attempt ends, and how all end.

An agent's code runs in a context that names its session, and so does every task it starts; the runner's and the
engine's run in one that names none. So the watchdog interrupts agents only, and the end of a session cancels what it
started and nothing else.

An attempt is one task, the agent's. Its end, or the end of its time, is recorded and starts what comes next, so that
`concurrency` sessions run at once while some wait. Once the run is to end, nothing more is recorded or started.
"""

import asyncio
import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from threading import get_ident
from typing import NamedTuple

import torch

from raggedright.agents.causes import cause_of, one_line
from raggedright.agents.recorder import CANCELLED, SessionRecorder
from raggedright.agents.session import Agent, Session, Task
from raggedright.agents.settings import RolloutSettings
from raggedright.agents.values import SessionError, finite
from raggedright.agents.watchdog import Guarded, GuardedLoop, LoopTime, Unguarded, Watchdog
from raggedright.errors import RaggedRightError
from raggedright.rollout.engine import Engine, EngineError, Generation, Request
from raggedright.sessions import Session as RecordedSession
from raggedright.sessions import SessionKey, check_session

MOST_GRACE = 1.0  # seconds between cancelling an agent and leaving it behind
_CANCELLED_OTHERS = "an agent cancelled tasks that are not its own (asyncio.all_tasks has all); cancel what it started"

_SOONEST = 1e-3  # seconds until the clocks are looked at again

_PLAIN = (str, int, float, bool, type(None))

_log = logging.getLogger(__name__)


class _Attempt(NamedTuple):
    """An agent under way, and what it runs on; of its own, because an agent may do anything to its session."""

    task: Task
    key: SessionKey
    last: int  # the number of the session's last attempt
    session: Session
    running: asyncio.Task[object]


class RoundRun:
    """A round's sessions on one rank: their loop, those under way, and how all end."""

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
        self._grace = min(MOST_GRACE, settings.timeout)
        self._late = f"timed out after {settings.timeout:g} s"
        self._time = LoopTime()
        self._active: dict[Guarded, _Attempt] = {}  # those in their grace, too
        self._waiting: Iterator[tuple[Task, SessionKey]] = iter(())
        self._num_open = 0  # sessions that are not final
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        self._records_cancelled = True
        self._loop = GuardedLoop()
        self._loop.set_exception_handler(lambda _loop, context: _log.debug("in an agent's task: %s", context))
        self._all_final = self._loop.create_future()  # cancelled when the run is to end before
        self._main: asyncio.Task[None] | None = None
        self._thread = get_ident()

    def run(self, sessions: Sequence[tuple[Task, SessionKey]]) -> None:
        """Run them all; afterwards nothing of theirs runs any more."""
        with Watchdog(self._loop, self._settings.timeout).watching(), _torch_settings_restored():
            try:
                self._main = self._loop.create_task(self._all(sessions))
                self._drive(self._main)
            except asyncio.CancelledError:
                if self._error is not None:
                    with suppress(RaggedRightError):  # the first error says more
                        self._recorder.flush()
                    raise self._error from None
                if not self._time.stopped:
                    raise RaggedRightError(_CANCELLED_OTHERS) from None
                self._recorder.flush_cancelled(record=self._records_cancelled)
            except KeyboardInterrupt:
                self._end_all()
                with suppress(RaggedRightError):  # it may have come in the middle of a put
                    self._recorder.flush_cancelled(record=True)
                raise
            finally:
                self._close()

    def cancel(self, *, record: bool) -> None:
        """From anywhere: end the run."""
        self._records_cancelled = record
        self._time.stopped = True
        with suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._end_all()
        assert self._main is not None
        with Unguarded():
            self._main.cancel()

    async def _all(self, sessions: Sequence[tuple[Task, SessionKey]]) -> None:
        self._waiting, self._num_open = iter(sessions), len(sessions)
        for _ in range(min(self._settings.concurrency, len(sessions))):
            self._start_next()
        if sessions:
            await self._all_final
        self._recorder.flush()

    def _start_next(self) -> None:
        """Start a session that waits, if there is one."""
        for task, key in self._waiting:
            self._start(task, key, last=key.attempt + self._settings.attempts - 1)
            return

    def _start(self, task: Task, key: SessionKey, *, last: int) -> None:
        """Let the agent run once; `_on_done` or `_look_at_clocks` hears of its end."""
        session = self._new_session(task, key, generate=self._generate)
        guard = Guarded(self._time, self._settings.timeout, self._on_done)
        running = self._loop.start(self._call(session), guard)
        self._active[guard] = _Attempt(task, key, last, session, running)
        if self._timer is None:
            self._timer = self._loop.call_later(self._settings.timeout, self._look_at_clocks)

    def _on_done(self, guard: Guarded, task: asyncio.Task[object]) -> None:
        """A task of a session has ended; if it is its agent, the attempt is over."""
        attempt = self._active.get(guard)
        if attempt is not None and attempt.running is task:
            is_late = guard.ended
            self._end(guard, "its agent has returned")
            self._settle(guard, is_late=is_late)

    def _look_at_clocks(self) -> None:
        """One timer for all sessions: end those whose time is over, and look again when the next one's may be."""
        left = {guard: guard.seconds_left for guard in self._active if not guard.ended}
        for guard, seconds in left.items():
            if seconds <= 0 and not self._active[guard].running.done():
                self._end(guard, self._late)
                self._loop.call_later(self._grace, partial(self._settle, guard, is_late=True))
        later = [seconds for seconds in left.values() if seconds > 0]
        self._timer = self._loop.call_later(max(min(later), _SOONEST), self._look_at_clocks) if later else None

    def _settle(self, guard: Guarded, *, is_late: bool) -> None:
        """Record an attempt that is over, once, and start what comes next; a late agent may be left behind."""
        attempt = self._active.pop(guard, None)
        if attempt is None or self._all_final.done():
            return
        task, key, last, session, running = attempt
        try:
            if is_late and not guard.blocked_for:
                result = RecordedSession(key=key, cause=f"{self._late}; make it faster, or raise rollout.timeout")
            else:
                result = _result_of(key, running, session, guard)
            session.let_go(self._engine.forget)
            is_final = not result.cause or key.attempt == last
            self._recorder.add(self._loop, result, is_last=is_final, on_error=self._fail)
            if not is_final:
                self._start(task, key._replace(attempt=key.attempt + 1), last=last)
                return
            self._start_next()
            self._num_open -= 1
            if not self._num_open:
                self._all_final.set_result(None)
        except BaseException as error:  # the loop would only log it, and the run never end
            self._fail(error)
            raise

    async def _call(self, session: Session) -> object:
        # A copy, because sessions of a prompt share a task, and what one does to it must not reach the others.
        session.task = Task(uid=session.task.uid, data=_copied(session.task.data))
        awaitable = self._agent(session.task, session)
        if not isawaitable(awaitable):
            raise SessionError(f"the agent returned a {type(awaitable).__name__} at once; make it `async def`")
        try:
            return await awaitable
        finally:
            session.end("its agent has returned")

    async def _generate(self, request: Request) -> Generation:
        """Ask the engine, whose code and tasks run in no session's name; its errors end the run."""
        if get_ident() != self._thread:
            raise SessionError("generate was called in another thread than the agent's; await it in the agent itself")
        try:
            with Unguarded():
                generation = await self._engine.generate(request)
            if len(generation.ids) != len(generation.log_probs):
                counts = f"{len(generation.ids)} ids and {len(generation.log_probs)} log-probs"
                raise EngineError(f"the engine answered with {counts}; each id has one")
        except Exception as error:
            self._fail(error)
            raise
        return generation

    def _fail(self, error: BaseException) -> None:
        """End the run with an error that is no agent's."""
        self._error = self._error or error
        self._stop()

    def _end(self, guard: Guarded, why: str) -> None:
        """Close a session; what it still has under way is cancelled."""
        if guard.ended:
            return
        self._active[guard].session.end(why)
        guard.ended = True
        with Unguarded():
            for task in [*guard.tasks]:
                task.cancel()

    def _end_all(self) -> None:
        for guard in [*self._active]:
            self._end(guard, CANCELLED if self._time.stopped else "the run has ended")

    def _drive(self, future: asyncio.Task[object] | asyncio.Task[None]) -> None:
        while True:
            try:
                self._loop.run_until_complete(future)
            except SystemExit as error:  # asyncio lets it through; it is the cause of a failure if a session raised it
                if not any(_raised(task, error) for task in self._time.tasks):
                    raise
            except RuntimeError:
                if future.done():
                    raise
                _log.debug("an agent stopped the event loop; going on")
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
                _leave_behind(task)
            self._loop.close()


@contextmanager
def _torch_settings_restored() -> Iterator[None]:
    """Give training torch's settings of before the rollout, which an agent may change for a model of its own."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)


def _copied(data: Mapping[str, object]) -> Mapping[str, object]:
    """A deep copy; most tasks are a dict of plain values and lists of them, for which deepcopy takes its time."""
    copied: dict[str, object] = {}
    for name, value in data.items() if type(data) is dict else ():
        if type(value) is list and all(type(item) in _PLAIN for item in value):
            copied[name] = value.copy()
        elif type(value) in _PLAIN:
            copied[name] = value
    return copied if type(data) is dict and len(copied) == len(data) else deepcopy(data)


def _result_of(key: SessionKey, running: asyncio.Task[object], session: Session, guard: Guarded) -> RecordedSession:
    """What the agent's end means: a session needs a finite reward and a trajectory or more."""
    failed = partial(RecordedSession, key=key)
    ran = running.done() and not running.cancelled()
    error = running.exception() if ran else asyncio.CancelledError()
    if guard.blocked_for and (error is None or isinstance(error, asyncio.CancelledError)):
        return failed(cause=f"blocked the event loop for {guard.blocked_for:.3g} s; use await")
    if error is not None:
        return failed(cause=cause_of(error, __file__))
    value = running.result()
    score = finite(value)
    if score is None:
        shown = str(value) if value is None or type(value) is float else f"a {type(value).__name__}"
        return failed(cause=one_line(f"returned {shown}; end the agent with `return reward`, a finite number"))
    if not session.num_trajectories:
        return failed(
            cause="returned without a trajectory; open one with session.trajectory(prompt) and generate in it"
        )
    try:
        recorded = replace(session.record(score), key=key)  # an agent may do anything to its session's key
        check_session(recorded)
    except SessionError as invalid:
        return failed(cause=one_line(f"SessionError: {invalid}"))
    except Exception as error:  # an agent may have set anything
        return failed(cause=cause_of(error, __file__))
    return recorded


def _leave_behind(task: asyncio.Task[object]) -> None:
    """Never free a task that would not end: freeing runs its code once more, even at the interpreter's exit.

    An agent that swallows everything would then spin for ever, outside of any event loop.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def _raised(task: asyncio.Task[object], error: BaseException) -> bool:
    return task.done() and not task.cancelled() and task.exception() is error
