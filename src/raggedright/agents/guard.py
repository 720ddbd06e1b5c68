"""What keeps one agent from holding up or breaking the others, which share its event loop, and why an agent failed.

An agent in `time.sleep` or an endless loop holds up the loop, and no timer of the loop can end it. A SIGALRM that ticks
can: its handler runs inside whatever code is running, and a context variable says which agent's code that is. If the
time of that agent is over, the handler raises AgentBlocked right there. Engine and runner run without the variable, so
they are never interrupted. The same ticks sample how long the code of agents held the loop. That time counts for the
agent that took it and for no other one, so that a blocked agent does not make the others time out.

The limits: signals reach the main thread only, so in other threads nothing ends a blocked agent, and its time counts
for all. Nothing can interrupt a call into C that does not return, or an agent that swallows every BaseException.
"""

import asyncio
import signal
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
LONGEST_TICK = 1.0
SHORTEST_TICK = 0.01
MAX_CAUSE_CHARACTERS = 300
_ASYNCIO = str(Path(asyncio.__file__).parent)


class AgentBlocked(BaseException):
    """Raised inside an agent's own code; not an Exception, so that `except Exception` does not swallow it."""


class GuardedLoop(asyncio.SelectorEventLoop):
    """An event loop that knows which tasks are those of agents, and how long agents' code has blocked it.

    `stopped` is set when the run is cancelled: then the time of all agents is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocked_seconds = 0.0
        self.stopped = False
        self.agent_tasks: set[AgentTask] = set()  # of all agents, while they run; the loop does not keep them alive
        self.set_task_factory(_new_task)  # type: ignore[arg-type]
        super().set_default_executor(_DaemonThreads())

    def set_default_executor(self, executor: ThreadPoolExecutor) -> None:
        """Does nothing when an agent calls it: all agents share the executor."""
        if _RUNNING.get() is None:
            super().set_default_executor(executor)

    async def shutdown_default_executor(self, *timeout: float | None) -> None:
        """Does nothing when an agent calls it: all agents share the executor."""
        if _RUNNING.get() is None:
            await super().shutdown_default_executor(*timeout)

    async def shutdown_asyncgens(self) -> None:
        """Does nothing when an agent calls it: the loop has the generators of all agents."""
        if _RUNNING.get() is None:
            await super().shutdown_asyncgens()

    def start(self, agent: Coroutine[object, object, object], owner: "AgentRun") -> "AgentTask":
        """Start the first task of an agent, whatever another agent has done to the task factory."""
        context = copy_context()
        context.run(_RUNNING.set, owner)
        return self.register(AgentTask(agent, loop=self, context=context), owner)

    def register(self, task: "AgentTask", owner: "AgentRun") -> "AgentTask":
        """Record that a task belongs to an agent."""
        task.owner = owner
        for tasks in (owner.tasks, self.agent_tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task


class AgentRun:
    """One run of an agent, as the guard sees it: when its time is over, and whether it was interrupted."""

    def __init__(self, loop: GuardedLoop, timeout: float) -> None:
        self.blocked_for = 0.0  # seconds of the block that was interrupted
        self.ended = False
        self.tasks: set[AgentTask] = set()
        self._loop, self._timeout = loop, timeout
        self._started, self._blocked_before, self._own_blocked = monotonic(), loop.blocked_seconds, 0.0

    @property
    def seconds_left(self) -> float:
        """The rest of its time; what other agents' code blocked does not count."""
        blocked_by_others = self._loop.blocked_seconds - self._blocked_before - self._own_blocked
        return self._timeout - (monotonic() - self._started - blocked_by_others)

    @property
    def is_over(self) -> bool:
        """Whether its code may be interrupted."""
        return self.ended or self._loop.stopped or self.seconds_left <= 0

    @property
    def blocked_cause(self) -> str:
        """Why it failed, if it was interrupted."""
        return f"blocked the event loop for {self.blocked_for:.3g} s; use await"

    def add_blocked(self, seconds: float) -> None:
        """Its code held the loop."""
        self._loop.blocked_seconds += seconds
        self._own_blocked += seconds

    def cancel_tasks(self) -> None:
        """Cancel all tasks that it started."""
        with no_agent():
            for task in [*self.tasks]:
                task.cancel()


_RUNNING: ContextVar[AgentRun | None] = ContextVar("running agent", default=None)


@contextmanager
def no_agent() -> Iterator[None]:
    """A block whose code, and the tasks that it starts, belong to no agent."""
    token = _RUNNING.set(None)
    try:
        yield
    finally:
        with suppress(ValueError):  # an agent that was left behind is freed elsewhere, in another context
            _RUNNING.reset(token)


def is_of_agent(error: BaseException) -> bool:
    """Whether an error that came out of the event loop was raised in a callback or a task of an agent."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    handles = (frame.f_locals["self"] for frame in frames if frame.f_code is asyncio.Handle._run.__code__)  # type: ignore[attr-defined]
    return any(handle._context.get(_RUNNING) is not None for handle in handles)


class AgentTask(asyncio.Task):
    """A task that other agents cannot cancel; `asyncio.all_tasks` returns the tasks of all agents to each."""

    owner: AgentRun | None = None

    def cancel(self, msg: object = None) -> bool:
        """Ask it to end, if the caller is its owner, or not an agent."""
        caller = _RUNNING.get()
        if caller is not None and caller is not self.owner:
            return False
        return super().cancel(msg)


def _new_task(loop: GuardedLoop, coro: Coroutine, **options: Context) -> AgentTask:
    task = AgentTask(coro, loop=loop, **options)  # type: ignore[call-overload]
    context = options.get("context")
    owner = _RUNNING.get() if context is None else context.get(_RUNNING)
    return task if owner is None else loop.register(task, owner)


class _DaemonThreads(ThreadPoolExecutor):
    """Where `asyncio.to_thread` runs: one thread per call, for which the end of the process does not wait.

    The threads of a pool are waited for, and a few calls that hang would use it up for all sessions.
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


class Watchdog:
    """Ticks while agents run, if this is the main thread."""

    def __init__(self, loop: GuardedLoop, timeout: float) -> None:
        self._loop = loop
        self._tick = min(max(timeout / 10, SHORTEST_TICK), LONGEST_TICK)
        self._last_tick = monotonic()
        self._last_run: AgentRun | None = None  # whose code ran at the last tick; None once the loop has turned
        self._blocked_for = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tick in this block; the handler and the timer that were there before are restored."""
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
        run, now = _RUNNING.get(), monotonic()
        seconds, self._last_tick = now - self._last_tick, now
        is_same_block = run is self._last_run
        self._last_run = run
        if run is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._on_loop_turn)
        run.add_blocked(seconds)
        self._blocked_for = self._blocked_for + seconds if is_same_block else seconds
        if is_same_block and run.is_over and not _in_finalizer(frame):
            run.blocked_for = self._blocked_for
            raise AgentBlocked(run.blocked_cause)

    def _on_loop_turn(self) -> None:
        self._last_run = None


def _in_finalizer(frame: FrameType | None) -> bool:
    """Whether Python would only print what is raised there: in finalizers, which may run at any place."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in ("weakref", "_weakrefset"):
            return True
        frame = frame.f_back
    return False


def one_line(text: str) -> str:
    """Text for the ledger: one line, of bounded length, without broken characters."""
    line = " ".join(text[: 4 * MAX_CAUSE_CHARACTERS].encode("utf-8", "replace").decode().split())
    return line if len(line) <= MAX_CAUSE_CHARACTERS else f"{line[: MAX_CAUSE_CHARACTERS - 3]}..."


def cause_of(error: BaseException, runner_file: str) -> str:
    """Why an agent failed, for the ledger: "ValueError: no such city (agent.py:12)"; it was called in `runner_file`."""
    num_others = 0
    while isinstance(error, BaseExceptionGroup):
        num_others += len(error.exceptions) - 1
        error = error.exceptions[0]
    try:
        text = str(error)
    except AgentBlocked as blocked:
        return str(blocked)
    except BaseException as unprintable:  # an exception may do anything in its __str__
        text = f"its text raised {type(unprintable).__name__}"
    name = type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        text = text or "the agent cancelled its own task; catch it, or let it finish"
    place = _place(error, runner_file)
    tail = f"{f' ({place})' if place else ''}{f' and {num_others} more' if num_others else ''}"
    head = one_line(text if isinstance(error, AgentBlocked) else f"{name}: {text}" if text else name)
    return one_line(f"{head[: MAX_CAUSE_CHARACTERS - len(tail)]}{tail}")


def _place(error: BaseException, runner_file: str) -> str:
    """The deepest frame in the agent's file, as file:line; that file is the first one after the runner and asyncio."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename != runner_file and not frame.f_code.co_filename.startswith(_ASYNCIO)
    ]
    if not frames:
        return ""
    file = frames[0][0]
    return f"{Path(file).name}:{[line for name, line in frames if name == file][-1]}"
