"""Time-outs that hold for an agent that never awaits, and clocks that stand still for the others meanwhile.

All sessions share one event loop, so an agent in `time.sleep` or an endless loop holds up everybody, and no timer of
the loop can end it. A SIGALRM that ticks does: its handler runs inside whatever code is running, and a context variable
says whose that is. If it is a session whose time is over, the handler raises AgentBlocked right there. Engine and
runner run without the variable, so they are never interrupted, however long they take.

The same ticks measure how long agents' own code held the loop. That time counts for the session that took it and for
no other one, so that one blocked agent does not make its neighbours time out.

The surprise: signals reach the main thread alone. In any other thread nothing ends a blocked agent, and its time counts
for all. Nor can a call into C that does not return be interrupted, or an agent that swallows every BaseException.
"""

import selectors
import signal
import threading
from asyncio import AbstractEventLoop, SelectorEventLoop, Task
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from time import monotonic
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
LONGEST_TICK = 1.0
SHORTEST_TICK = 0.01


class AgentBlocked(BaseException):
    """Raised inside an agent's own code; no Exception, so that `except Exception` does not swallow it."""


class LoopTime:
    """How long agents' code has held the loop, in all; `stopped` when the run is cancelled, and all time is over.

    `tasks` are those that the sessions have under way, all together.
    """

    def __init__(self) -> None:
        self.blocked = 0.0
        self.stopped = False
        self.tasks: set[Task[object]] = set()


class Guarded:
    """One attempt of a session as the watchdog sees it: its time, and the tasks that it started."""

    __slots__ = (
        "_blocked_before", "_on_done", "_own_blocked", "_started", "_time", "_timeout", "blocked_for", "ended", "tasks",
    )  # fmt: skip

    def __init__(self, time: LoopTime, timeout: float, on_done: "Callable[[Guarded, Task[object]], None]") -> None:
        self.blocked_for = 0.0  # seconds of the block that was interrupted
        self.ended = False
        self.tasks: set[Task[object]] = set()
        self._time, self._timeout, self._on_done = time, timeout, on_done
        self._started, self._blocked_before, self._own_blocked = monotonic(), time.blocked, 0.0

    @property
    def seconds_left(self) -> float:
        """Of its time-out; what other sessions' code blocked does not count."""
        others = self._time.blocked - self._blocked_before - self._own_blocked
        return 0.0 if self.ended else self._timeout - (monotonic() - self._started - others)

    @property
    def is_over(self) -> bool:
        """Whether its code may be interrupted."""
        return self.seconds_left <= 0 or self._time.stopped

    def add_blocked(self, seconds: float) -> None:
        """Its own code held the loop."""
        self._time.blocked += seconds
        self._own_blocked += seconds

    def hold(self, task: "OwnTask") -> Task[object]:
        """Keep one of its tasks while it runs, which the loop itself does not."""
        task.owner = self
        self.tasks.add(task)
        self._time.tasks.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: Task[object]) -> None:
        self.tasks.discard(task)
        self._time.tasks.discard(task)
        self._on_done(self, task)

    def context(self) -> Context:
        """A context in which code runs in its name."""
        context = copy_context()
        context.run(_RUNNING.set, self)
        return context


_RUNNING: ContextVar[Guarded | None] = ContextVar("running session", default=None)


class Unguarded:
    """A block whose code, and tasks that it starts, run in no session's name. A class, as every generation has one."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _RUNNING.set(None)

    def __exit__(self, *error: object) -> None:
        try:
            _RUNNING.reset(self._token)
        except ValueError:  # an agent that was left behind is freed elsewhere, in another context
            return


class GuardedLoop(SelectorEventLoop):
    """An event loop that knows when its turn began, and in whose name a task is started."""

    def __init__(self) -> None:
        self.turns = _Turns()
        super().__init__(self.turns)
        self.set_task_factory(_new_task)  # type: ignore[arg-type]
        self.set_default_executor(_Threads())

    def start(self, agent: Coroutine[object, object, object], session: Guarded) -> Task[object]:
        """Run an agent as the first task of its session, whatever another one has done to the task factory."""
        return session.hold(OwnTask(agent, loop=self, context=session.context()))


class OwnTask(Task):
    """A task that code of other sessions cannot cancel, as `asyncio.all_tasks` gives everybody's to everybody."""

    owner: "Guarded | None" = None

    def cancel(self, msg: object = None) -> bool:
        """Ask it to end, if it is the caller's own, or the caller is no session."""
        caller = _RUNNING.get()
        if caller is not None and caller is not self.owner:
            return False
        return super().cancel(msg)


class _Threads(ThreadPoolExecutor):
    """Where `asyncio.to_thread` runs: a thread for each call, which the end of the process does not wait for.

    A pool's threads are waited for, and a few calls that hang would use it up for all sessions.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in a new thread."""
        future = Future[T]()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=run, name="agent", daemon=True).start()
        return future


class _Turns(selectors.DefaultSelector):
    """The loop asks its selector once a turn: that is where a turn begins."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.began = 0, monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What the loop waits for."""
        events = super().select(timeout)
        self.number, self.began = self.number + 1, monotonic()
        return events


def _new_task(loop: AbstractEventLoop, coro: Coroutine, **options: Context) -> Task:
    task = OwnTask(coro, loop=loop, **options)  # type: ignore[call-overload]
    context = options.get("context")
    session = _RUNNING.get() if context is None else context.get(_RUNNING)
    if session is not None:
        session.hold(task)
    return task


def _swallows(frame: FrameType | None) -> bool:
    """Whether Python would report what is raised there and go on: in finalizers, which may run at any place."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in ("weakref", "_weakrefset"):
            return True
        frame = frame.f_back
    return False


class Watchdog:
    """Ticks while sessions run, if this is the main thread."""

    def __init__(self, loop: GuardedLoop, timeout: float) -> None:
        self._turns = loop.turns
        self._tick = min(max(timeout / 10, SHORTEST_TICK), LONGEST_TICK)
        self._seen: tuple[Guarded, int] | None = None  # what ran at the last tick, and in which turn
        self._block_began = self._last_tick = monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tick in this block; the handler and the timer that were there before are put back."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            yield
            return
        handler = signal.signal(signal.SIGALRM, self._on_tick)
        began, (left, interval) = monotonic(), signal.setitimer(signal.ITIMER_REAL, self._tick, self._tick)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (monotonic() - began), 1e-3), interval)

    def _on_tick(self, _signal: int, frame: FrameType | None) -> None:
        now, session, turn = monotonic(), _RUNNING.get(), self._turns.number
        since, self._last_tick = max(self._last_tick, self._turns.began), now
        if session is None:
            self._seen = None
            return
        session.add_blocked(now - since)
        if self._seen != (session, turn):
            self._seen, self._block_began = (session, turn), since
        blocked_for = now - self._block_began
        if blocked_for > 1.5 * self._tick and session.is_over and not _swallows(frame):
            session.blocked_for = blocked_for
            raise AgentBlocked(f"blocked the event loop for {blocked_for:.3g} s; use await")
