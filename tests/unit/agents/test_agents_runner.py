"""The runner: limits, clocks, retries, and the three errors that are not an agent's."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from raggedright.agents.agent_session import SessionError, Trajectory
from raggedright.agents.digits import compact, delegate
from raggedright.agents.runner import Runner
from raggedright.errors import ConfigError, RaggedRightError
from raggedright.rollout.engine import EngineError, Generation
from raggedright.store.memory import MemoryStore
from raggedright.store.session_store import StoreError
from raggedright.store.sqlite import SqliteStore
from recorded import recorded_sessions
from unit.agents.scripted import TOKENIZER, NoiseEngine, causes, recorded, run, settings, tasks_of


def sessions(kinds: Iterable[str] = "ab", n: int = 1):
    return [(task, i) for task in tasks_of(kinds) for i in range(n)]


def make_runner(agent, engine=None, **changes) -> Runner:
    return Runner(agent=agent, engine=engine or NoiseEngine(), tokenizer=TOKENIZER, settings=settings(**changes))


async def reply(task, session):
    await session.trajectory("1=").generate()
    return 1.0


@pytest.mark.parametrize("agent", [compact, delegate])
def test_what_is_recorded_does_not_depend_on_order_or_concurrency(agent):
    given = sessions("abcdefg", n=5)
    expected = recorded(run(agent, given))
    assert recorded(run(agent, given[::-1], concurrency=1)) == expected
    assert recorded(run(agent, given[3:] + given[:3], concurrency=4)) == expected


def test_attempts_rounds_and_seeds_draw_other_tokens():
    def ids(**changes):
        return [entry[1:] for entry in recorded(run(compact, sessions("abc", n=4), **changes))]

    assert ids(seed=1) != ids(seed=2)
    assert ids(seed=1) == ids(seed=1)


def test_no_more_sessions_run_at_once_than_concurrency_says():
    running, most = 0, 0

    async def count(task, session):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await reply(task, session)
        running -= 1
        return 1.0

    run(count, sessions("abcdefgh"), concurrency=3)
    assert most == 3


def test_retries_are_put_under_the_next_attempt():
    async def third_time(task, session):
        if session.key.attempt < 2:
            raise ValueError(f"attempt {session.key.attempt}")
        return await reply(task, session)

    done, store = [], MemoryStore()
    make_runner(third_time, attempts=3).run(store, round=1, sessions=sessions("a"), on_done=done.append)
    assert [(each.key.attempt, each.state) for each in recorded_sessions(store)] == [
        (0, "failed"),
        (1, "failed"),
        (2, "finished"),
    ]
    assert done == [1]
    store = run(third_time, sessions("a"), attempts=2)
    assert [each.state for each in recorded_sessions(store)] == ["failed", "failed"]


def test_a_round_that_is_run_again_goes_on_with_the_next_attempt():
    store = run(reply, sessions("a"))
    run(reply, sessions("ab"), store=store)
    assert [each.key[1:] for each in recorded_sessions(store)] == [("a", 0, 0), ("a", 0, 1), ("b", 0, 0)]


def test_attempts_of_an_interrupted_round_count_when_it_is_resumed():
    async def fails(task, session):
        raise ValueError(f"attempt {session.key.attempt}")

    store = run(fails, sessions("a"))
    make_runner(fails, attempts=3).run(store, round=1, sessions=sessions("ab"), resume=True)
    assert [each.key[1:] for each in recorded_sessions(store)] == [
        *(("a", 0, attempt) for attempt in range(3)),
        *(("b", 0, attempt) for attempt in range(3)),
    ]


def test_a_blocked_agent_does_not_use_up_its_neighbours_time():
    async def agent(task, session):
        if task.uid == "blocks":
            await asyncio.sleep(0.05)
            time.sleep(1e6)
        for _ in range(20):
            await asyncio.sleep(0.01)
        return await reply(task, session)

    store = run(agent, sessions(["blocks", *"abc"]), timeout=0.5)
    assert [*causes(store)] == [("blocks", 0, 0)]


def test_a_slow_engine_is_never_interrupted_and_its_time_counts():
    class Slow(NoiseEngine):
        async def generate(self, request):
            time.sleep(0.25)
            return await super().generate(request)

    async def asks(task, session):
        for _ in range(4 if task.uid == "long" else 1):
            await session.trajectory("1=").generate(max_tokens=1)
        return 1.0

    store = run(asks, sessions(["long"]), engine=Slow(), timeout=0.5)
    assert causes(store)["long", 0, 0].startswith("timed out after 0.5 s")
    assert not causes(run(asks, sessions("a"), engine=Slow(), timeout=0.1))  # the answer was there when time was over


def test_the_alarm_that_was_set_before_is_set_again():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 100.0, 7.0)
        run(reply, sessions())
        left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
        assert (90 < left <= 100, interval) == (True, 7.0)
        signal.raise_signal(signal.SIGALRM)
        assert rang == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_another_thread_runs_sessions_and_times_them_out():
    async def hangs(task, session):
        await (asyncio.Event().wait() if task.uid == "b" else reply(task, session))
        return 1.0

    found = []
    thread = threading.Thread(target=lambda: found.append(run(hangs, sessions())))
    thread.start()
    thread.join(30)
    assert [*causes(found[0])] == [("b", 0, 0)]


def test_cancel_from_another_thread_ends_all_that_has_not_ended():
    async def agent(task, session):
        if task.uid == "b":
            threading.Timer(0.05, runner.cancel).start()
            await asyncio.Event().wait()
        return await reply(task, session)

    done = []
    store, runner = MemoryStore(), make_runner(agent, concurrency=2, timeout=60.0)
    runner.run(store, round=1, sessions=sessions("abcd"), on_done=done.append)
    assert causes(store) == {("b", 0, 0): "cancelled"}
    store, done[:] = MemoryStore(), []
    one_at_a_time = runner = make_runner(agent, concurrency=1, timeout=60.0)
    one_at_a_time.run(store, round=2, sessions=sessions("abcd"), on_done=done.append)
    assert causes(store, 2) == {(uid, 0, 0): "cancelled" for uid in "bcd"}
    assert sum(done) == 4
    runner.cancel()  # nothing is under way
    runner.run(store, round=3, sessions=sessions("a"))
    assert [each.state for each in recorded_sessions(store, 3)] == ["finished"]


def test_cancel_from_a_signal_handler_reaches_an_agent_that_blocks():
    async def blocks(task, session):
        os.kill(os.getpid(), signal.SIGUSR1)
        while True:
            pass

    runner, store = make_runner(blocks, timeout=20.0), MemoryStore()
    before = signal.signal(signal.SIGUSR1, lambda *_: runner.cancel())
    try:
        runner.run(store, round=1, sessions=sessions("a"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert causes(store) == {("a", 0, 0): "cancelled"}


def test_ctrl_c_ends_the_run_and_says_so_in_the_store():
    async def agent(task, session):
        if task.uid == "b":
            raise KeyboardInterrupt
        await asyncio.Event().wait()

    store = MemoryStore()
    with pytest.raises(KeyboardInterrupt):
        make_runner(agent).run(store, round=1, sessions=sessions("abc"))
    assert causes(store) == {(uid, 0, 0): "cancelled" for uid in "abc"}


def test_a_system_exit_of_somebody_else_is_not_an_agents_failure():
    class Exits(NoiseEngine):
        async def generate(self, request):
            asyncio.get_running_loop().call_soon(exit, 5)
            return await super().generate(request)

    with pytest.raises(SystemExit):
        run(reply, sessions(), engine=Exits())


def test_an_error_of_the_store_ends_the_run(tmp_path: Path):
    store = MemoryStore()
    store.drop(1)
    with pytest.raises(StoreError, match="rounds up to 1 were dropped"):
        run(reply, sessions(), store=store)
    with SqliteStore(tmp_path / "rows.db") as kept:
        run(compact, sessions("abc", n=3), store=kept)
        assert recorded(kept) == recorded(run(compact, sessions("abc", n=3)))


def test_an_error_of_the_engine_ends_the_run_whatever_agents_make_of_it():
    class Fails(NoiseEngine):
        async def generate(self, request):
            await asyncio.sleep(0)
            raise EngineError("no memory left")

    async def swallows(task, session):
        try:
            await reply(task, session)
        except EngineError:
            await asyncio.sleep(1e6)
        return 1.0

    with pytest.raises(EngineError, match="no memory left"):
        run(swallows, sessions(), engine=Fails())

    class Forgets(NoiseEngine):
        async def generate(self, request):
            return Generation([1, 2], [-1.0], "stop", 0)

    with pytest.raises(EngineError, match="2 ids and 1 log-probs; each id has one"):
        run(reply, sessions(), engine=Forgets())


def test_a_task_that_goes_on_after_the_return_adds_nothing():
    errors = []

    async def lingers(trajectory: Trajectory, session):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            for use in (lambda: session.trajectory("1="), lambda: trajectory.observe("1"), lambda: session.report(x=1)):
                try:
                    use()
                except SessionError as error:
                    errors.append(str(error))
            try:
                await trajectory.generate()
            except SessionError as error:
                errors.append(str(error))

    async def agent(task, session):
        trajectory = session.trajectory("1=")
        first = await trajectory.generate()
        asyncio.create_task(lingers(trajectory, session))  # noqa: RUF006
        await asyncio.sleep(0)
        return float(len(first.ids))

    store = run(agent, sessions("a"))
    assert len({*errors}) == 1
    assert errors[0].startswith("session a/0 has ended (its agent has returned)")
    assert len(errors) == 4
    (session,) = recorded_sessions(store)
    assert session.trajectories[0].loss_tokens == session.score


def test_a_generation_under_way_at_the_return_is_not_recorded():
    async def agent(task, session):
        trajectory = session.trajectory("1=")
        asyncio.create_task(trajectory.generate())  # noqa: RUF006
        await asyncio.sleep(0)
        return 1.0

    (entry,) = recorded_sessions(run(agent, sessions("a")))
    assert (entry.state, entry.trajectories[0].response_tokens) == ("finished", 0)


def test_what_a_session_does_to_its_task_does_not_reach_the_others():
    async def eats(task, session):
        assert task.data["digits"] == [*"31415"]
        task.data["digits"].clear()
        return await reply(task, session)

    assert not causes(run(eats, sessions("a", n=3)))


def test_greedy_asks_for_temperature_zero():
    engine = NoiseEngine()
    make_runner(reply, engine).run(MemoryStore(), round=1, sessions=sessions("a"), greedy=True)
    assert [request.sampling.temperature for request in engine.requests] == [0.0]


def test_no_sessions_are_no_work():
    assert recorded_sessions(run(reply, [])) == []


def test_wrong_uses_are_told():
    with pytest.raises(RaggedRightError, match="session a/0 is listed twice"):
        run(reply, sessions("aa"))
    with pytest.raises(ConfigError, match=r"rollout\.max_row_tokens is 1"):
        settings(max_row_tokens=1)

    async def inside():
        run(reply, sessions())

    with pytest.raises(RaggedRightError, match="an event loop of its own"):
        asyncio.run(inside())


def test_an_agent_that_changes_the_task_factory_does_not_hold_up_the_next_session():
    async def changes(task, session):
        asyncio.get_running_loop().set_task_factory(None)
        await session.trajectory("1=").generate()
        return 1.0

    assert not causes(run(changes, sessions("abc"), concurrency=1, timeout=5.0))


def test_a_reward_that_raises_what_no_number_does_fails_its_session():
    class Odd:
        def __float__(self) -> float:
            raise BaseException("odd")

    async def returns(task, session) -> Any:
        await session.trajectory("1=").generate()
        return Odd()

    assert [cause.partition(" (")[0] for cause in causes(run(returns, sessions("ab"))).values()] == [
        "BaseException: odd",
        "BaseException: odd",
    ]
