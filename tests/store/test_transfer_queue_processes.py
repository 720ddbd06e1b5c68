"""Several processes with one TransferQueue: killed clients, simultaneous starts, an owner that ends, dead actors.

These tests end parts of the Ray that the other tests use, so they run last, in the order of this file.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from raggedright.store import ray_queue
from raggedright.store.session_store import StoreError
from raggedright.store.transfer_queue import TransferQueueStore
from store import crashes
from store.values import failed, finished, key, keys_in, row, same, tokens

pytestmark = pytest.mark.xdist_group("ray")
TESTS = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def store(run: str) -> TransferQueueStore:
    return TransferQueueStore(run=run)


KILLED = """
import os, signal, sys
from raggedright.store.ray_queue import QueueLink
from raggedright.store.transfer_queue import TransferQueueStore
from store.values import finished, key, tokens

address, run = sys.argv[1:]
store = TransferQueueStore(address, run=run)
store.append([finished(key("whole"), tokens(3), tokens(4))])
call_actor = QueueLink.call_actor

def killed(self, run, method, *args, timeout):
    if method == "commit":
        os.kill(os.getpid(), signal.SIGKILL)
    return call_actor(self, run, method, *args, timeout=timeout)

QueueLink.call_actor = killed
store.append([finished(key("half"), tokens(5), tokens(6))])
"""


def test_a_client_that_is_killed_during_an_append_leaves_nothing_visible(store: TransferQueueStore, run: str) -> None:
    """TransferQueue 0.1.11 lists its keys forever."""
    import transfer_queue

    env = {**os.environ, "PYTHONPATH": TESTS}
    done = subprocess.run([sys.executable, "-c", KILLED, store.address, run], env=env, capture_output=True, timeout=90)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert len(transfer_queue.kv_list(f"{run}/0")[f"{run}/0"]) == 4
    assert keys_in(store) == [key("whole")]
    assert same(store.read([row(key("whole"), 1)])[0], tokens(4).fields)
    with pytest.raises(StoreError, match="half/0"):
        store.wait(0, [("half", 0)], timeout=0)
    store.append([finished(key("half"), tokens(1))])
    store.drop(0)
    assert f"{run}/0" in transfer_queue.kv_list(), "a late put may still arrive, so nothing is cleared yet"
    store.give_up_writes()
    assert f"{run}/0" not in transfer_queue.kv_list()


@pytest.mark.parametrize(
    ("turns", "modes"),
    [(1, ["write", "write", "read"]), pytest.param(5, ["write"] * 3, marks=pytest.mark.slow)],
    ids=["once", "five times"],
)
def test_clients_that_are_killed_at_any_moment_lose_no_logged_session(
    store: TransferQueueStore, run: str, tmp_path: Path, turns: int, modes: list[str]
) -> None:
    """TransferQueue 0.1.11 lists the keys of a client that was killed during a put forever."""
    import transfer_queue

    rng = random.Random(turns)
    for turn in range(turns):
        crashes.run_and_kill(f"queue {store.address} {run}", tmp_path, 10 * turn, modes, rng)
        crashes.compare(store, tmp_path)
    for log in tmp_path.glob("log *"):
        stopped_at = key(f"writer {log.name.removeprefix('log ')}", len(log.read_text().split()) + 1, 1, round=7)
        store.append([finished(stopped_at, tokens(2))])
        assert same(store.read([row(stopped_at)])[0], tokens(2).fields)
    store.drop(7)
    assert len(store.sessions(7)) == 0
    store.give_up_writes()
    assert f"{run}/7" not in transfer_queue.kv_list()


def test_a_dead_actor_is_reported_within_seconds(store: TransferQueueStore, started: list[TransferQueueStore]) -> None:
    """TransferQueue 0.1.11 waits ten minutes for a storage unit, and forever for its controller."""
    actors, many = ray_queue.queue_actors(), range(64)  # enough rows for both units
    store.append([finished(key(), *[tokens(1) for _ in many])])

    end(actors[f"{ray_queue.STORAGE_UNIT}0"])
    lost = f"{ray_queue.STORAGE_UNIT}0 is dead and its rows are lost"
    expect_error(lost, lambda: store.read([row(key(), i) for i in many]))
    expect_error(lost, lambda: store.append([finished(key("q"), *[tokens(1) for _ in many])]))

    end(actors[ray_queue.CONTROLLER])
    expect_error(
        f"{ray_queue.CONTROLLER}.* is dead and nothing can be written",
        lambda: store.append([finished(key("r"), tokens(1))]),
    )
    assert keys_in(store) == [key()]

    end(store._link.sessions)
    uses = (
        lambda: store.sessions(0),
        lambda: store.append([failed(key())]),
        lambda: store.wait(0, [("p", 0)], timeout=60),
    )
    for use in uses:
        expect_error("RaggedRightSessions is dead", use)
    end(actors[f"{ray_queue.STORAGE_UNIT}1"])
    started.pop()  # the next test starts a new store, on the same Ray


@contextmanager
def ending(actor: Any) -> Iterator[None]:
    """Wait until an actor's process has ended: ray.kill returns earlier, and a live process still answers."""
    import ray

    process = psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))
    yield
    process.wait(30)


def end(actor: Any) -> None:
    import ray

    with ending(actor):
        ray.kill(actor)


def expect_error(match: str, use: Callable[[], object]) -> None:
    began = monotonic()
    with pytest.raises(StoreError, match=match):
        use()
    assert monotonic() - began < 8


CLIENT = """
import json, sys
from raggedright.store.session_store import StoreError
from raggedright.store.transfer_queue import TransferQueueStore
from store.values import finished, key, tokens

address, run = sys.argv[1:]
print("null", flush=True)
for line in sys.stdin:
    command, answer = line.strip(), None
    try:
        if command == "open":
            store = TransferQueueStore(address, run=run)
            answer = store._owns
        elif command == "start":
            store = TransferQueueStore(run=run)
            answer = store._owns
        elif command == "close":
            store.close()
        elif command == "list":
            answer = store.sessions(0).prompt.tolist()
        else:
            store.append([finished(key(command), tokens(2))])
    except StoreError as error:
        answer = str(error)
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A process that executes commands on a store."""

    def __init__(self, address: str, run: str) -> None:
        command = [sys.executable, "-c", CLIENT, address, run]
        env = {**os.environ, "PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def receive(self) -> object:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, command: str) -> object:
        self.send(command)
        return self.receive()


@pytest.mark.slow
def test_when_the_owner_ends_its_ray_the_others_report_it_and_can_start_their_own(
    started: list[TransferQueueStore],
) -> None:
    """Ray 2.60 waits a minute for a Ray that ended, and then ends the process."""
    import ray

    if started:
        started.pop().close()
    ray.shutdown()
    owner = TransferQueueStore(run="run of two")
    address, other = owner.address, Client(owner.address, "run of two")
    assert [other.receive(), other.ask("open"), other.ask("a")] == [None, False, None]
    with ending(owner._link.sessions):
        owner.close()
    began = monotonic()
    assert "RaggedRightSessions is dead" in str(other.ask("list"))
    assert f"nothing is listening at {address}" in str(other.ask("open"))
    assert monotonic() - began < 20
    assert [other.ask("start"), other.ask("list")] == [True, []]
    other.process.communicate(timeout=60)


@pytest.fixture
def clients(started: list[TransferQueueStore]) -> Iterator[list[Client]]:
    """Two processes on a Ray that has no TransferQueue, ready to open a store."""
    import ray

    if not started and not ray.is_initialized():
        started.append(TransferQueueStore(run="starts Ray"))
    if started:
        started[0]._link.started_ray = False  # keep Ray running
        started.pop().close()
    address = ray.get_runtime_context().gcs_address
    both = [Client(address, "run of two") for _ in range(2)]
    assert [client.receive() for client in both] == [None, None]
    yield both
    for client in both:
        client.process.communicate(timeout=60)


@pytest.mark.slow
def test_of_two_processes_one_owns_the_queue_and_when_it_ends_the_others_report_it_and_start_a_new_one(
    clients: list[Client],
) -> None:
    """With TransferQueue 0.1.11 the others hang."""
    import ray

    for client in clients:
        client.send("open")
    owns = [client.receive() for client in clients]
    assert sorted(owns) == [False, True]  # type: ignore[type-var]
    owner, other = clients if owns[0] else reversed(clients)
    assert [owner.ask("a"), other.ask("b")] == [None, None]
    mine = TransferQueueStore(ray.get_runtime_context().gcs_address, run="run of two")
    assert [owner.ask("list"), other.ask("list"), mine.sessions(0).prompt.tolist()] == [["a", "b"]] * 3

    with ending(mine._link.sessions):
        assert owner.ask("close") is None
    expect_error("RaggedRightSessions is dead", lambda: mine.sessions(0))
    assert "RaggedRightSessions is dead" in str(other.ask("list"))

    assert other.ask("open") is True
    assert [other.ask("c"), other.ask("list"), owner.ask("open"), owner.ask("list")] == [None, ["c"], False, ["c"]]
    assert keys_in(TransferQueueStore(run="run of two")) == [key("c")]
    assert other.ask("close") is None
