"""The agent of the runs that are disturbed. The environment says which session misbehaves, and how.

`FAULT` names a function of this module, and session 1 of the first prompt of round `FAULT_ROUND` runs it. `PACE` is
the time in seconds that every session takes longer, so that there is something to interrupt; it changes no number.
"""

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from raggedright.agents import Session, Task
from raggedright.agents.digits import digits_of

BATCH_SIZE, SESSIONS = 4, 4
REWARD_WITH_ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202ekcab\x00"


async def wander(task: Task, session: Session) -> float:
    """One to three trajectories of two turns, with rewards that an untrained model gets."""
    fault, key = os.environ.get("FAULT"), session.key
    await asyncio.sleep(float(os.environ.get("PACE", "0")))
    if fault == "waits" and key.round == int(os.environ["FAULT_ROUND"]) and key.session % 2:
        Path(os.environ["FAULT_FILE"]).touch()
        await asyncio.sleep(10_000)
    if fault == "shuts_the_threads_down" and key.session != 1:
        await asyncio.sleep(0.5)
        await asyncio.to_thread(int)
    is_chosen = key.session == 1 and int(task.uid) % BATCH_SIZE == 0
    if fault in MISBEHAVING and is_chosen and key.round == int(os.environ["FAULT_ROUND"]):
        return await MISBEHAVING[fault](task, session)
    return await _healthy(task, session)


async def _healthy(task: Task, session: Session) -> float:
    good = 0
    for i in range(session.random.randint(1, 3)):
        trajectory = session.trajectory("m" * (i + 1) + "".join(map(str, digits_of(task))) + "=")
        first = await trajectory.generate(max_tokens=session.random.randint(1, 4))
        trajectory.observe("|7:")
        second = await trajectory.generate(max_tokens=2)
        good += sum(token % 3 == 0 for token in (*first.ids, *second.ids))
    return good / 4


class NoNumber:
    """A reward that cannot be made a number."""

    def __float__(self) -> float:
        raise LookupError("no such number")


class BadNumber:
    """A reward that does something else where it is made a number."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __float__(self) -> float:
        self._act()
        return 1.0


class BadTextError(Exception):
    """An error that does something else where its text is read."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __str__(self) -> str:
        self._act()
        return "done"


def _interrupt() -> None:
    raise KeyboardInterrupt


def _sleep() -> None:
    time.sleep(1e6)


async def raises(task: Task, session: Session) -> float:
    """The plainest failure: what all others are compared with."""
    raise ValueError("no such city")


async def raises_escapes(task: Task, session: Session) -> float:
    """Escape sequences for the user's terminal in the cause."""
    raise ValueError(REWARD_WITH_ESCAPES)


async def returns_nan(task: Task, session: Session) -> float:
    return math.nan


async def returns_nothing(task: Task, session: Session) -> float:
    await session.trajectory("m37=").generate()
    return None  # pyright: ignore[reportReturnType]


async def returns_no_number(task: Task, session: Session) -> float:
    await session.trajectory("m37=").generate()
    return NoNumber()  # pyright: ignore[reportReturnType]


async def returns_a_number_that_exits(task: Task, session: Session) -> float:
    await session.trajectory("m37=").generate()
    return BadNumber(sys.exit)  # pyright: ignore[reportReturnType]


async def returns_a_number_that_interrupts(task: Task, session: Session) -> float:
    await session.trajectory("m37=").generate()
    return BadNumber(_interrupt)  # pyright: ignore[reportReturnType]


async def returns_a_number_that_sleeps(task: Task, session: Session) -> float:
    await session.trajectory("m37=").generate()
    return BadNumber(_sleep)  # pyright: ignore[reportReturnType]


async def raises_text_that_exits(task: Task, session: Session) -> float:
    raise BadTextError(sys.exit)


async def raises_text_that_interrupts(task: Task, session: Session) -> float:
    raise BadTextError(_interrupt)


async def raises_text_that_sleeps(task: Task, session: Session) -> float:
    raise BadTextError(_sleep)


async def attaches_a_reserved_name(task: Task, session: Session) -> float:
    """Fields of this name are the row's own."""
    trajectory = session.trajectory("m37=")
    reply = await trajectory.generate()
    trajectory.attach(rollout_log_probs=[1.0] * len(reply.ids), response_mask=[0.0] * len(reply.ids))
    return 1.0


async def records_log_probs_of_nan(task: Task, session: Session) -> float:
    trajectory = session.trajectory("m37=")
    reply = await trajectory.generate()
    trajectory._log_probs[:] = [math.nan] * len(reply.ids)
    return 1.0


async def opens_no_trajectory(task: Task, session: Session) -> float:
    return 1.0


async def sets_a_list_as_role(task: Task, session: Session) -> float:
    session.trajectory("m37=").role = ["judge"]  # pyright: ignore[reportAttributeAccessIssue]
    return 1.0


async def stops_at_broken_text(task: Task, session: Session) -> float:
    await session.trajectory("m37=").generate(stop=["\ud800"])
    return 1.0


async def observes_a_million_tokens(task: Task, session: Session) -> float:
    session.trajectory("m37=").observe("7" * 1_000_000)
    return 1.0


async def opens_a_million_trajectories(task: Task, session: Session) -> float:
    for _ in range(1_000_000):
        session.trajectory("m3=")
    return 1.0


async def generates_in_a_thread(task: Task, session: Session) -> float:
    trajectory = session.trajectory("m37=")
    await asyncio.to_thread(lambda: asyncio.run(_generate(trajectory)))
    return 1.0


async def _generate(trajectory: object) -> None:
    await trajectory.generate()  # pyright: ignore[reportAttributeAccessIssue]


async def cancels_all_tasks(task: Task, session: Session) -> float:
    for each in asyncio.all_tasks():
        each.cancel()
    await asyncio.sleep(0)
    return 1.0


async def switches_gradients_off(task: Task, session: Session) -> float:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float16)
    raise ValueError("and leaves it so")


async def enters_inference_mode(task: Task, session: Session) -> float:
    torch.inference_mode().__enter__()
    raise ValueError("and does not leave it")


async def sets_the_default_device(task: Task, session: Session) -> float:
    torch.set_default_device("meta")
    raise ValueError("and leaves it so")


async def shuts_the_threads_down(task: Task, session: Session) -> float:
    """The other sessions use threads afterwards."""
    await asyncio.get_running_loop().shutdown_default_executor()
    raise ValueError("and leaves none to the others")


async def exits_in_a_callback(task: Task, session: Session) -> float:
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0.1)
    raise ValueError("after the loop ran it")


async def changes_the_folder(task: Task, session: Session) -> float:
    os.chdir("/")
    raise ValueError("and stays there")


async def exits(task: Task, session: Session) -> float:
    raise SystemExit(3)


async def hangs(task: Task, session: Session) -> float:
    await asyncio.Event().wait()
    return 1.0


async def hangs_in_a_thread(task: Task, session: Session) -> float:
    await asyncio.to_thread(time.sleep, 600)
    return 1.0


async def swallows_its_cancellation(task: Task, session: Session) -> float:
    while True:
        with suppress(BaseException):
            await asyncio.sleep(0.01)


async def loops_without_end(task: Task, session: Session) -> float:
    while True:
        pass


async def sleeps_in_the_loop(task: Task, session: Session) -> float:
    time.sleep(1e6)
    return 1.0


async def ends_the_process(task: Task, session: Session) -> float:
    os._exit(7)


MISBEHAVING = {
    each.__name__: each
    for each in (
        raises, raises_escapes, raises_text_that_exits, raises_text_that_interrupts, raises_text_that_sleeps,
        returns_nan, returns_nothing, returns_no_number, returns_a_number_that_exits, returns_a_number_that_interrupts,
        returns_a_number_that_sleeps, opens_no_trajectory, attaches_a_reserved_name, records_log_probs_of_nan,
        sets_a_list_as_role, stops_at_broken_text, observes_a_million_tokens, opens_a_million_trajectories,
        generates_in_a_thread, cancels_all_tasks, switches_gradients_off, enters_inference_mode,
        sets_the_default_device, shuts_the_threads_down, changes_the_folder, exits, exits_in_a_callback, hangs,
        hangs_in_a_thread, swallows_its_cancellation, loops_without_end, sleeps_in_the_loop, ends_the_process,
    )
}  # fmt: skip
