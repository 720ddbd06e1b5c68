"""Agents for the trainer's own tests: a healthy one, and a zoo of others that run beside it."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from raggedright.agents import Session, Task


async def healthy(task: Task, session: Session) -> float:
    """One or two trajectories, and a reward that an untrained model gets sometimes."""
    good = 0
    for _ in range(session.random.randint(1, 2)):
        reply = await session.trajectory("m37=").generate(max_tokens=2)
        good += sum(token % 2 for token in reply.ids)
    return good / 4


async def constant(task: Task, session: Session) -> float:
    """Every session has the same score, so that there is nothing to learn."""
    await session.trajectory("m37=").generate(max_tokens=2)
    return 0.0


async def raises(task: Task, session: Session) -> float:
    raise ValueError(f"no idea what to do with {task.uid}")


async def hangs(task: Task, session: Session) -> float:
    await asyncio.sleep(10_000)
    return 1.0


async def returns_nothing(task: Task, session: Session) -> float:
    await session.trajectory("m37=").generate(max_tokens=1)
    return None  # pyright: ignore[reportReturnType]


async def not_a_number(task: Task, session: Session) -> float:
    await session.trajectory("m37=").generate(max_tokens=1)
    return float("nan")


async def giant(task: Task, session: Session) -> float:
    trajectory = session.trajectory("m37=")
    trajectory.observe("7" * 1_000_000)
    return 1.0


async def empty(task: Task, session: Session) -> float:
    return 1.0


async def never_generates(task: Task, session: Session) -> float:
    session.trajectory("m37=").observe("12")
    return 0.5


async def thousands(task: Task, session: Session) -> float:
    for _ in range(5_000):
        session.trajectory("m3=")
    return 1.0


ZOO: list[Callable[[Task, Session], Awaitable[float]]] = [
    raises, hangs, returns_nothing, not_a_number, giant, empty, never_generates, thousands,
]  # fmt: skip


async def zoo(task: Task, session: Session) -> float:
    """The last session of each prompt is one of the zoo's, the others are healthy."""
    if session.key.session == 3:
        return await ZOO[int(task.uid) % len(ZOO)](task, session)
    return await healthy(task, session)


async def waits(task: Task, session: Session) -> float:
    """Says that it runs, and waits; but for the first round, which is quick."""
    if session.key.round > 1:
        Path(str(task.data["folder"]), "waiting").touch()
        await asyncio.sleep(10_000)
    return await healthy(task, session)


async def changes_folder(task: Task, session: Session) -> float:
    """Goes to the task's folder and stays there."""
    os.chdir(str(task.data["folder"]))
    return await healthy(task, session)


async def hangs_in_a_thread(task: Task, session: Session) -> float:
    """Its last session hangs where no cancellation reaches it."""
    score = await healthy(task, session)
    if session.key.round == 3 and session.key.session == 3:
        await asyncio.to_thread(time.sleep, 600)
    return score


async def dies(task: Task, session: Session) -> float:
    """Takes the process with it, on the second rank."""
    if os.environ.get("RANK") == "1" and session.key.round == 2:
        os._exit(7)
    return await healthy(task, session)


async def dies_with_children(task: Task, session: Session) -> float:
    """Starts a process that outlives the rank, which is killed."""
    if os.environ.get("RANK") == "1" and session.key.round == 2:
        child = await asyncio.create_subprocess_exec("sleep", "1000")
        Path(str(task.data["folder"]), "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    return await healthy(task, session)


async def dies_once(task: Task, session: Session) -> float:
    """The same, but only the first time."""
    died = Path(str(task.data["folder"]), "died")
    if os.environ.get("RANK") == "1" and session.key.round == 2 and not died.exists():
        died.touch()
        os._exit(7)
    return await healthy(task, session)


STARTED: Counter[int] = Counter()  # sessions of this process, by round


async def killed_once(task: Task, session: Session) -> float:
    """Half of the prompts have one score; the second rank is killed once, in the second wave of round 2."""
    died = Path(str(task.data["folder"]), "died")
    STARTED[session.key.round] += 1
    if os.environ.get("RANK") == "1" and STARTED[2] > 16 and not died.exists():  # its half of 8 prompts, 4 sessions
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    score = await healthy(task, session)
    return score if int(task.uid) % 2 else 0.5


def tasks(index: int, seed: int) -> dict[str, object]:
    return {"folder": os.environ.get("TASKS_FOLDER", ""), "digits": ["1", "2"]}
