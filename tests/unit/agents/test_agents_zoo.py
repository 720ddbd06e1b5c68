"""Agents that misbehave, each beside healthy ones: the run goes on, these record the same bits, those are named."""

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from raggedright.agents.agent_session import Session, Task
from raggedright.agents.digits import compact
from unit.agents.scripted import causes, recorded, run, tasks_of

HEALTHY = ("a", "b", "c")


class Odd(BaseException):
    pass


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


async def one_reply(session: Session) -> None:
    await session.trajectory("1=").generate()


async def raises(task, session):
    await one_reply(session)
    raise ValueError("no\nsuch  city")


async def raises_long(task, session):
    raise ValueError("x" * 100_000)


async def raises_unprintable(task, session):
    raise UnprintableError


async def raises_group(task, session):
    async with asyncio.TaskGroup() as group:
        group.create_task(raises(task, session))


async def raises_base(task, session):
    raise Odd("very")


async def exits(task, session):
    await one_reply(session)
    sys.exit(3)


async def exits_in_a_task(task, session):
    async def leave() -> None:
        sys.exit(4)

    await asyncio.gather(one_reply(session), leave())


async def cancels_itself(task, session):
    raise asyncio.CancelledError


async def stops_the_loop(task, session):
    asyncio.get_running_loop().stop()
    raise ValueError("stopped")


async def hangs(task, session):
    await one_reply(session)
    await asyncio.Event().wait()


async def hangs_on(task, session):
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)


async def hangs_on_whatever_comes(task, session):
    while True:
        with suppress(BaseException):
            await asyncio.sleep(0.01)


async def sleeps(task, session):
    time.sleep(1e6)


async def spins(task, session):
    await one_reply(session)
    while True:
        pass


async def spins_in_a_task(task, session):
    await asyncio.gather(one_reply(session), spins(task, session))


async def spins_and_swallows(task, session):
    try:
        while True:
            pass
    except BaseException:
        pass
    await one_reply(session)
    return 1.0


async def never_yields(task, session):
    async def nothing() -> None:
        pass

    while True:
        await nothing()


async def returns_none(task, session):
    await one_reply(session)


async def returns_text(task, session):
    await one_reply(session)
    return "0.5"


async def returns_nan(task, session):
    await one_reply(session)
    return math.nan


async def returns_inf(task, session):
    await one_reply(session)
    return np.float32(math.inf)


async def returns_a_vector(task, session):
    await one_reply(session)
    return torch.ones(2)


def is_not_async(task, session):
    return 1.0


async def opens_nothing(task, session):
    return 1.0


async def rewards_nan(task, session):
    session.trajectory("1=").reward = math.nan
    return 1.0


async def reports_nan(task, session):
    session.trajectory("1=")
    session.report(exact_match=math.nan)
    return 1.0


async def observes_a_million(task, session):
    session.trajectory("1=").observe("1" * 1_000_000)


async def observes_a_billion_ids(task, session):
    session.trajectory("1=").observe(range(1_000_000_000))


async def generates_on_and_on(task, session):
    trajectory = session.trajectory("1=")
    while True:
        await trajectory.generate(max_tokens=1_000_000_000)


async def has_an_empty_prompt(task, session):
    session.trajectory("")


async def has_an_unknown_id(task, session):
    session.trajectory([1, 99])


async def opens_thousands(task, session):
    for _ in range(1_000_000):
        session.trajectory("1=")


async def generates_twice_at_once(task, session):
    trajectory = session.trajectory("1=")
    await asyncio.gather(trajectory.generate(), trajectory.generate())


async def observes_while_generating(task, session):
    trajectory = session.trajectory("1=")
    reply = asyncio.create_task(trajectory.generate())
    await asyncio.sleep(0)
    trajectory.observe("1")
    await reply


async def misspells(task, session):
    session.trajectory("1=").rewrd = 1.0


async def reports_broken_text(task, session):
    session.trajectory("1=", role="\ud800")


class NoNumber:
    def __float__(self) -> float:
        raise LookupError("no such number")

    def __repr__(self) -> str:
        return "NoNumber()"


async def returns_what_is_no_number(task, session):
    await one_reply(session)
    return NoNumber()


async def rewards_what_is_no_number(task, session):
    session.trajectory("1=").reward = NoNumber()
    return 1.0


class Acts:
    """Does something when it is asked for its number or its text."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __float__(self) -> float:
        self.act()
        return 1.0


class ActsError(Exception):
    def __str__(self) -> str:
        self.args[0]()
        return "acted"


def interrupt() -> None:
    raise KeyboardInterrupt


def spin() -> None:
    while True:
        pass


async def returns_a_number_that_exits(task, session):
    await one_reply(session)
    return Acts(partial(sys.exit, 3))


async def returns_a_number_that_interrupts(task, session):
    await one_reply(session)
    return Acts(interrupt)


async def returns_a_number_that_sleeps(task, session):
    await one_reply(session)
    return Acts(partial(time.sleep, 1e6))


async def returns_a_number_that_spins(task, session):
    await one_reply(session)
    return Acts(spin)


async def rewards_a_number_that_interrupts(task, session):
    session.trajectory("1=").reward = Acts(interrupt)
    return 1.0


async def raises_a_text_that_exits(task, session):
    raise ActsError(partial(sys.exit, 3))


async def raises_a_text_that_interrupts(task, session):
    raise ActsError(interrupt)


async def raises_a_text_that_spins(task, session):
    raise ActsError(spin)


async def exits_in_a_callback(task, session):
    for code in (3, 4):
        asyncio.get_running_loop().call_soon(sys.exit, code)
    await one_reply(session)


async def records_nan(task, session):
    trajectory = session.trajectory("1=")
    await trajectory.generate()
    trajectory._log_probs[0] = math.nan
    return 1.0


async def sets_a_role_that_is_a_list(task, session):
    session.trajectory("1=").role = ["judge"]
    return 1.0


async def sets_a_role_of_broken_text(task, session):
    session.trajectory("1=").role = "\ud800"
    return 1.0


async def stops_at_broken_text(task, session):
    await session.trajectory("1=").generate(stop=["\ud800"])


async def cancels_everybody(task, session):
    for each in asyncio.all_tasks():
        each.cancel()
    await one_reply(session)


async def generates_in_a_thread(task, session):
    trajectory = session.trajectory("1=")
    await asyncio.to_thread(lambda: asyncio.run(trajectory.generate()))


ZOO = {
    raises: "ValueError: no such city (test_agents_zoo.py:",
    raises_long: "ValueError: xxx",
    raises_unprintable: "UnprintableError: its text raised ValueError (test_agents_zoo.py:",
    raises_group: "ValueError: no such city (test_agents_zoo.py:",
    raises_base: "Odd: very (test_agents_zoo.py:",
    exits: "SystemExit: 3 (test_agents_zoo.py:",
    exits_in_a_task: "SystemExit: 4 (test_agents_zoo.py:",
    cancels_itself: "CancelledError: the agent cancelled its own task",
    stops_the_loop: "ValueError: stopped",
    hangs: "timed out after 0.3 s; make it faster, or raise rollout.timeout",
    hangs_on: "timed out after 0.3 s",
    hangs_on_whatever_comes: "timed out after 0.3 s",
    sleeps: "blocked the event loop for 0.3",
    spins: "blocked the event loop for 0.",
    spins_in_a_task: "blocked the event loop for 0.",
    spins_and_swallows: "blocked the event loop for 0.",
    never_yields: "blocked the event loop for 0.",
    returns_none: "returned None; end the agent with `return reward`, a finite number",
    returns_text: "returned a str; end the agent with",
    returns_nan: "returned nan; end the agent with",
    returns_inf: "returned a float32; end",
    returns_a_vector: "returned a Tensor; end",
    is_not_async: "SessionError: the agent returned a float at once; make it `async def`",
    opens_nothing: "returned without a trajectory; open one with session.trajectory(prompt)",
    rewards_nan: "SessionError: row rewards_nan/0/0: reward is nan; it takes a finite number or None",
    reports_nan: "SessionError: session reports_nan/0: report('exact_match') has nan; give finite numbers",
    observes_a_million: "SessionError: row observes_a_million/0/0 gets at least 2,018 tokens, "
    "and rollout.max_row_tokens (by default train.micro_batch_tokens) is 64; raise it, "
    "or open a fresh trajectory (test_agents_zoo.py:",
    observes_a_billion_ids: "SessionError: row observes_a_billion_ids/0/0 gets at least 1,000,000,002 tokens",
    generates_on_and_on: "SessionError: row generates_on_and_on/0/0 has 64 tokens and no room to generate, "
    "and rollout.max_row_tokens (by default train.micro_batch_tokens) is 64; raise it",
    has_an_empty_prompt: "SessionError: row has_an_empty_prompt/0/0 has an empty prompt",
    has_an_unknown_id: "SessionError: row has_an_unknown_id/0/0: token 1 is 99; the tokenizer's 18 ids are 0 to 17",
    opens_thousands: "SessionError: session opens_thousands/0 opens trajectory 1,024 and may have 1,024; "
    "open fewer, or raise rollout.max_trajectories",
    generates_twice_at_once: "SessionError: row generates_twice_at_once/0/0 is generating; await it first",
    observes_while_generating: "SessionError: row observes_while_generating/0/0 is generating; await it first",
    misspells: "AttributeError: 'Trajectory' object has no attribute 'rewrd'",
    returns_what_is_no_number: "returned a NoNumber; end",
    rewards_what_is_no_number: "SessionError: row rewards_what_is_no_number/0/0: reward is NoNumber(); it",
    returns_a_number_that_exits: "SystemExit: 3 (",
    returns_a_number_that_interrupts: "KeyboardInterrupt (",
    returns_a_number_that_sleeps: "blocked the event loop for 0.3",
    returns_a_number_that_spins: "blocked the event loop for 0.",
    rewards_a_number_that_interrupts: "KeyboardInterrupt (",
    raises_a_text_that_exits: "ActsError: its text raised SystemExit (test_agents_zoo.py:",
    raises_a_text_that_interrupts: "ActsError: its text raised KeyboardInterrupt (test_agents_zoo.py:",
    raises_a_text_that_spins: "blocked the event loop for 0.",
    exits_in_a_callback: "returned None; end the agent with",
    records_nan: "SessionError: round 1, row records_nan/0/0, attempt 0: rollout_log_probs",
    sets_a_role_that_is_a_list: "SessionError: round 1, row sets_a_role_that_is_a_list/0/0, attempt 0: role",
    sets_a_role_of_broken_text: "SessionError: round 1, row sets_a_role_of_broken_text/0/0, attempt 0: role",
    stops_at_broken_text: "SessionError: row stops_at_broken_text/0/0: stop is ['\\ud800']; it takes texts",
    cancels_everybody: "CancelledError: the agent cancelled its own task",
    generates_in_a_thread: "SessionError: generate was called in another thread than the agent's; await it",
    reports_broken_text: "SessionError: row reports_broken_text/0/0: role is '\\ud800'; it takes text",
}
BY_NAME = {agent.__name__: agent for agent in ZOO}


async def keeper(task: Task, session: Session):
    kind = str(task.data["kind"])
    bad = BY_NAME.get(kind)
    return await compact(task, session) if bad is None else await _maybe(bad(task, session))


async def _maybe(result):
    return result if isinstance(result, float) else await result


@pytest.fixture(scope="module")
def alone():
    return recorded(run(compact, [(task, i) for task in tasks_of(HEALTHY) for i in range(4)]))


SLOW = {agent for agent, cause in ZOO.items() if cause.startswith("blocked")}  # each such session costs its time-out


@pytest.mark.parametrize("agent", [a for a in ZOO if a is not is_not_async], ids=lambda agent: agent.__name__)
def test_a_bad_agent_fails_alone_and_is_named(agent, alone):
    name = agent.__name__
    healthy = [(task, i) for task in tasks_of(HEALTHY) for i in range(4)]
    bad = [(task, i) for task in tasks_of([name]) for i in range(1 if agent in SLOW else 3)]
    timeout = 0.3 if ZOO[agent].startswith(("timed out", "blocked")) else 30.0
    store = run(keeper, [*healthy[:3], *bad, *healthy[3:]], timeout=timeout)
    assert recorded(store, HEALTHY) == alone
    found = causes(store)
    assert [*found] == [(name, i, 0) for _, i in bad]
    cause = found[name, 0, 0]
    assert cause.startswith(ZOO[agent])
    assert len(cause) <= 300
    assert "\n" not in cause


class SpinsWhenFreed:
    def __del__(self):
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            pass


def test_an_agent_is_not_interrupted_in_a_finalizer_which_python_would_report_and_go_on():
    async def frees(task, session):
        made = SpinsWhenFreed()
        del made
        session.trajectory("1=")
        until = time.monotonic() + 5
        while time.monotonic() < until:
            pass
        return 1.0

    store = run(frees, [(task, 0) for task in tasks_of("a")])
    assert causes(store)["a", 0, 0].startswith("blocked the event loop for 0.")


@pytest.mark.parametrize("grad", [True, False])
def test_what_an_agent_sets_in_torch_is_put_back_before_training(grad: bool):
    async def sets(task, session):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float16)
        torch.set_default_device("meta")
        kept.append(torch.inference_mode())
        kept[-1].__enter__()
        await one_reply(session)
        return 1.0

    kept = []
    with torch.set_grad_enabled(grad):
        assert not causes(run(sets, [(task, 0) for task in tasks_of("ab")]))
        assert torch.is_grad_enabled() is grad
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_inference_mode_enabled()
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    kept.clear()  # a guard that is freed restores what was set when it was entered: no gradients
    torch.set_grad_enabled(True)


def test_an_agent_cannot_close_the_threads_and_generators_that_all_share():
    async def numbers():
        for i in range(3):
            await asyncio.sleep(0.02)
            yield i

    async def agent(task, session):
        loop = asyncio.get_running_loop()
        if task.uid == "closes":
            pool = ThreadPoolExecutor(1)
            pool.shutdown()
            loop.set_default_executor(pool)
            await loop.shutdown_default_executor()
            await loop.shutdown_asyncgens()
        assert [i async for i in numbers()] == [0, 1, 2]
        await asyncio.to_thread(time.sleep, 0.01)
        await one_reply(session)
        return 1.0

    assert not causes(run(agent, [(task, i) for task in tasks_of(("a", "closes", "b")) for i in range(2)], timeout=5.0))


def test_threads_that_hang_take_no_room_from_others_and_do_not_hold_up_the_interpreters_exit():
    """A pool of threads has some ten of them, and Python waits for each at its exit."""
    script = """
import asyncio, time
from unit.agents.scripted import causes, run, tasks_of

async def agent(task, session):
    await asyncio.to_thread(time.sleep, 600 if task.uid == "hangs" else 0)
    await session.trajectory("1=").generate()
    return 1.0

pairs = [(task, i) for task in tasks_of(("hangs", "a")) for i in range(50)]
found = causes(run(agent, pairs, timeout=1.0))
print(sorted({key[0] for key in found}), len(found), flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert ended.stdout == "['hangs'] 50\n", ended.stderr
    assert ended.returncode == 0


def test_an_agent_that_is_not_async_is_told_so():
    store = run(is_not_async, [(task, 0) for task in tasks_of("a")])  # type: ignore[arg-type]
    assert causes(store) == {("a", 0, 0): ZOO[is_not_async]}


def test_the_whole_zoo_at_once_leaves_the_healthy_alone(alone):
    quick = [agent.__name__ for agent in ZOO if agent not in SLOW]
    store = run(keeper, [(task, i) for task in tasks_of((*HEALTHY, *quick)) for i in range(4)], timeout=3.0)
    assert recorded(store, HEALTHY) == alone
    assert {key[0] for key in causes(store)} == {*quick}


def test_an_agent_that_will_not_end_does_not_hold_up_the_interpreters_exit():
    code = (
        "from unit.agents.test_agents_zoo import *\n"
        "print(causes(run(keeper, [(task, 0) for task in tasks_of(['hangs_on', 'hangs_on_whatever_comes'])])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("timed out") == 2
