"""Processes that use one TransferQueue: killed clients, two that start at once, an owner that ends, dead actors.

These tests end parts of the Ray that all others use, so they run last, in the order they stand in.
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

from raggedright.store import ray_link
from raggedright.store.protocol import StoreError
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
import raggedright.store.ray_link as ray_link
from raggedright.store.transfer_queue import TransferQueueStore
from store.values import finished, key, tokens

address, run = sys.argv[1:]
store = TransferQueueStore(address, run=run)
store.append([finished(key("whole"), tokens(3), tokens(4))])
ask = ray_link.Link.ask

def killed(self, run, method, *args):
    if method == "commit":
        os.kill(os.getpid(), signal.SIGKILL)
    return ask(self, run, method, *args)

ray_link.Link.ask = killed
store.append([finished(key("half"), tokens(5), tokens(6))])
"""


def test_a_client_that_is_killed_in_a_put_leaves_nothing_to_see(store: TransferQueueStore, run: str) -> None:
    """TransferQueue 0.1.11 lists its keys for ever."""
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
    assert f"{run}/0" in transfer_queue.kv_list(), "a late put may still come, so nothing is cleared yet"
    store.give_up_writes()
    assert f"{run}/0" not in transfer_queue.kv_list()


@pytest.mark.parametrize(
    ("turns", "whats"),
    [(1, ["write", "write", "read"]), pytest.param(5, ["write"] * 3, marks=pytest.mark.slow)],
    ids=["once", "often"],
)
def test_clients_that_are_killed_at_any_moment_lose_nothing_that_was_reported(
    store: TransferQueueStore, run: str, tmp_path: Path, turns: int, whats: list[str]
) -> None:
    """TransferQueue 0.1.11 lists the keys of a client that was killed in a put for ever."""
    import transfer_queue

    chance = random.Random(turns)
    for turn in range(turns):
        crashes.run_and_kill(f"queue {store.address} {run}", tmp_path, 10 * turn, whats, chance)
        crashes.compare(store, tmp_path)
    for log in tmp_path.glob("log *"):
        stopped_at = key(f"writer {log.name.removeprefix('log ')}", len(log.read_text().split()) + 1, 1, round=7)
        store.append([finished(stopped_at, tokens(2))])
        assert same(store.read([row(stopped_at)])[0], tokens(2).fields)
    store.drop(7)
    assert len(store.sessions(7)) == 0
    store.give_up_writes()
    assert f"{run}/7" not in transfer_queue.kv_list()


def test_what_is_dead_is_reported_in_seconds(store: TransferQueueStore, started: list[TransferQueueStore]) -> None:
    """TransferQueue 0.1.11 waits ten minutes for a storage unit and for ever for its controller."""
    actors, many = store._link.actors, range(64)  # on both units, whatever indexes they get
    store.append([finished(key(), *[tokens(1) for _ in many])])

    end(actors[f"{ray_link.STORAGE_UNIT}0"])
    lost = f"{ray_link.STORAGE_UNIT}0 is dead and its rows are lost"
    says(lost, lambda: store.read([row(key(), i) for i in many]))
    says(lost, lambda: store.append([finished(key("q"), *[tokens(1) for _ in many])]))

    end(actors[ray_link.CONTROLLER])
    says(
        f"{ray_link.CONTROLLER}.* is dead and nothing can be put", lambda: store.append([finished(key("r"), tokens(1))])
    )
    assert keys_in(store) == [key()]

    end(store._link.sessions)
    uses = (
        lambda: store.sessions(0),
        lambda: store.append([failed(key())]),
        lambda: store.wait(0, [("p", 0)], timeout=60),
    )
    for use in uses:
        says("RaggedRightSessions is dead", use)
    end(actors[f"{ray_link.STORAGE_UNIT}1"])
    started.pop()  # whichever test comes next starts anew, on the same Ray


@contextmanager
def ending(actor: Any) -> Iterator[None]:
    """Wait until an actor's process is gone: ray.kill returns before, and what still lives still answers."""
    import ray

    process = psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))
    yield
    process.wait(30)


def end(actor: Any) -> None:
    import ray

    with ending(actor):
        ray.kill(actor)


def says(what: str, use: Callable[[], object]) -> None:
    began = monotonic()
    with pytest.raises(StoreError, match=what):
        use()
    assert monotonic() - began < 8


CLIENT = """
import json, sys
from raggedright.store.protocol import StoreError
from raggedright.store.transfer_queue import TransferQueueStore
from store.values import finished, key, tokens

address, run = sys.argv[1:]
print("null", flush=True)
for line in sys.stdin:
    do, answer = line.strip(), None
    try:
        if do == "open":
            store = TransferQueueStore(address, run=run)
            answer = store._owns
        elif do == "start":
            store = TransferQueueStore(run=run)
            answer = store._owns
        elif do == "close":
            store.close()
        elif do == "list":
            answer = store.sessions(0).prompt.tolist()
        else:
            store.append([finished(key(do), tokens(2))])
    except StoreError as error:
        answer = str(error)
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A process that does with a store what it is told."""

    def __init__(self, address: str, run: str) -> None:
        command = [sys.executable, "-c", CLIENT, address, run]
        env = {**os.environ, "PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def tell(self, do: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{do}\n")
        self.process.stdin.flush()

    def hear(self) -> object:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, do: str) -> object:
        self.tell(do)
        return self.hear()


@pytest.mark.slow
def test_when_the_owner_ends_its_ray_the_others_say_so_and_can_start_one_of_their_own(
    started: list[TransferQueueStore],
) -> None:
    """Ray 2.60 waits a minute for one that ended, and then ends the process."""
    import ray

    if started:
        started.pop().close()
    ray.shutdown()
    owner = TransferQueueStore(run="run of two")
    address, other = owner.address, Client(owner.address, "run of two")
    assert [other.hear(), other.ask("open"), other.ask("a")] == [None, False, None]
    with ending(owner._link.sessions):
        owner.close()
    began = monotonic()
    assert "RaggedRightSessions is dead" in str(other.ask("list"))
    assert f"nobody listens at {address}" in str(other.ask("open"))
    assert monotonic() - began < 20
    assert [other.ask("start"), other.ask("list")] == [True, []]
    other.process.communicate(timeout=60)


@pytest.fixture
def clients(started: list[TransferQueueStore]) -> Iterator[list[Client]]:
    """Two processes on a Ray that has no TransferQueue, ready to open a store."""
    import ray

    if not started and not ray.is_initialized():
        started.append(TransferQueueStore(run="for its Ray"))
    if started:
        started[0]._link.started_ray = False  # it goes on
        started.pop().close()
    address = ray.get_runtime_context().gcs_address
    both = [Client(address, "run of two") for _ in range(2)]
    assert [client.hear() for client in both] == [None, None]
    yield both
    for client in both:
        client.process.communicate(timeout=60)


@pytest.mark.slow
def test_of_two_that_start_at_once_one_owns_it_and_when_it_ends_the_others_say_so_and_start_anew(
    clients: list[Client],
) -> None:
    """TransferQueue 0.1.11 leaves the others hanging."""
    import ray

    for client in clients:
        client.tell("open")
    owns = [client.hear() for client in clients]
    assert sorted(owns) == [False, True]  # type: ignore[type-var]
    owner, other = clients if owns[0] else reversed(clients)
    assert [owner.ask("a"), other.ask("b")] == [None, None]
    mine = TransferQueueStore(ray.get_runtime_context().gcs_address, run="run of two")
    assert [owner.ask("list"), other.ask("list"), mine.sessions(0).prompt.tolist()] == [["a", "b"]] * 3

    with ending(mine._link.sessions):
        assert owner.ask("close") is None
    says("RaggedRightSessions is dead", lambda: mine.sessions(0))
    assert "RaggedRightSessions is dead" in str(other.ask("list"))

    assert other.ask("open") is True
    assert [other.ask("c"), other.ask("list"), owner.ask("open"), owner.ask("list")] == [None, ["c"], False, ["c"]]
    assert keys_in(TransferQueueStore(run="run of two")) == [key("c")]
    assert other.ask("close") is None
