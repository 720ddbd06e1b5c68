# pyright: reportMissingImports=false
"""TransferQueue on a real Ray passes what every store passes, and what it is known to hide is an error here.

One Ray serves the whole file. The last test kills its parts, one after the other, so it stays last.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from raggedright.store import ray_start
from raggedright.store.protocol import StoreError
from raggedright.store.transfer_queue import TransferQueueStore
from store.conformance import *  # noqa: F403
from store.values import bare, key, row, same, tokens

missing = [name for name in ("ray", "transfer_queue") if find_spec(name) is None]
if missing:  # neither is imported here: every worker collects this file
    pytest.skip(f"not installed: {', '.join(missing)}; make test-ray installs and runs", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("ray")
_runs = count()


@pytest.fixture(scope="session")
def started() -> Iterator[list[TransferQueueStore]]:
    owners: list[TransferQueueStore] = []
    yield owners
    for owner in owners:
        owner.close()


@pytest.fixture
def owner(started: list[TransferQueueStore]) -> TransferQueueStore:
    if not started:
        started.append(TransferQueueStore(run="owner"))
    return started[0]


@pytest.fixture
def run(owner: TransferQueueStore) -> str:
    return f"run {next(_runs)}"


@pytest.fixture
def store(run: str) -> TransferQueueStore:
    return TransferQueueStore(run=run)


@pytest.fixture
def open_another(run: str) -> Callable[[], TransferQueueStore]:
    return lambda: TransferQueueStore(run=run)


def test_everything_listens_on_loopback_only(owner: TransferQueueStore) -> None:
    psutil = pytest.importorskip("psutil")
    me = psutil.Process()
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_too_few_cpus_are_an_error_before_the_start(owner: TransferQueueStore) -> None:
    """TransferQueue 0.1.11 waits for ever where Ray has too few CPUs for its actors."""
    import ray

    with pytest.raises(StoreError, match="needs 101 CPUs as Ray counts them"):
        ray_start._check_cpus(ray, 100)
    with pytest.raises(StoreError, match=r"did not start in 0\.1 s"):
        ray_start._in_time(lambda: sleep(1), 0.1)


def test_others_find_tensors_under_the_origins_keys_and_tags(store: TransferQueueStore, run: str) -> None:
    import transfer_queue

    store.put(key("a_b", 3, round=7), [tokens(2), replace(tokens(1, text="x"), is_padding=True, tags={"turn": 4})])
    listed = transfer_queue.kv_list(f"{run}/7")[f"{run}/7"]
    first, second = sorted(listed)
    assert first.startswith("a%5Fb_3_0@7.0.")
    assert second.startswith("a%5Fb_3_1@7.0.")
    assert [listed[name]["is_padding"] for name in (first, second)] == [False, True]
    assert [listed[name]["rows"] for name in (first, second)] == [2, 2]
    assert listed[second]["tags"] == {"turn": 4}
    assert listed[second]["columns"]["text"] == "text"
    answer = transfer_queue.kv_batch_get([first, second], f"{run}/7", ["input_ids"])
    assert same([*answer["input_ids"].unbind()], [torch.arange(3), torch.arange(2)])


def test_a_field_may_have_several_ranks_and_none_beside_tensors(store: TransferQueueStore) -> None:
    """TransferQueue 0.1.11 casts mixed dtypes to the first, loses columns of another one, and mixes ranks to lists."""
    values = [torch.zeros(2), None, torch.ones(2, 3), torch.tensor(4.0), torch.ones(3, 2), torch.ones(1, 2, 3)]
    for i, value in enumerate(values):
        store.put(key("p", i), [bare(x=value), bare(x=torch.full((i,), 1.0))])
    answer = store.get([row(key("p", i), t) for i in range(6) for t in (0, 1)], ["x"])
    assert same([f["x"] for f in answer[::2]], values)
    assert same([f["x"] for f in answer[1::2]], [torch.full((i,), 1.0) for i in range(6)])


def test_a_field_called_like_anothers_column_is_not_mixed_up_with_it(store: TransferQueueStore) -> None:
    fields = {"x@float32.2": torch.tensor([1]), "x": torch.zeros(3), "x@": "a"}
    store.put(key("a"), [bare(**fields)])
    store.put(key("b"), [bare(x=torch.ones(1, 2))])
    store.update({row(key("a")): {"x": torch.full((3,), 5.0)}})
    (a,) = store.get([row(key("a"))], [*fields])
    assert same(a, {**fields, "x": torch.full((3,), 5.0)})
    assert same(list(store.get([row(key("b"))], ["x"])), [{"x": torch.ones(1, 2)}])


def test_rows_that_somebody_cleared_are_an_error(store: TransferQueueStore, run: str) -> None:
    """TransferQueue 0.1.11 returns fewer rows."""
    import transfer_queue

    store.put(key(), [tokens(1), tokens(2), tokens(3)])
    names = [*transfer_queue.kv_list(f"{run}/0")[f"{run}/0"]]
    transfer_queue.kv_clear(names[1], f"{run}/0")
    with pytest.raises(StoreError, match=r"row p/0/0.*3 rows.*and 2 with"):
        store.get([row(key(), i) for i in range(3)], ["input_ids"])


@contextmanager
def meanwhile(do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do this once, between a store's question to the sessions' actor and its call to TransferQueue."""
    call, todo = ray_start.Link.queue, [do]

    def queue(*args):
        if todo:
            try:
                todo.pop()()
            except StoreError:
                args[2].close()
                raise
        return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ray_start.Link, "queue", queue)
        yield


def test_a_write_that_is_overtaken_by_a_delete_touches_nothing(
    store: TransferQueueStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TransferQueue 0.1.11 gives a cleared row's index to the next key, which a late put then overwrites."""
    import transfer_queue

    store.put(key("old"), [tokens(4)])
    store.put(key("next", round=1), [tokens(2)])
    with meanwhile(lambda: store.delete(0), monkeypatch), pytest.raises(StoreError, match=r"round 0.*deleted"):
        store.put(key("late"), [tokens(3)])
    assert f"{run}/0" not in transfer_queue.kv_list()
    store.put(key("more", round=1), [tokens(5)])
    with meanwhile(lambda: store.delete(1), monkeypatch), pytest.raises(StoreError, match=r"round 1.*deleted"):
        store.update({row(key("next", round=1)): {"x": torch.ones(2)}})
    assert [*transfer_queue.kv_list()] == [name for name in transfer_queue.kv_list() if not name.startswith(f"{run}/")]


def test_a_read_that_is_overtaken_by_a_delete_is_an_error(
    store: TransferQueueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(), [tokens(4)])

    def replace_it() -> None:
        store.delete(0)
        store.put(key(round=1), [tokens(4, start=100)])

    with meanwhile(replace_it, monkeypatch), pytest.raises(StoreError):
        store.get([row(key())], ["input_ids"])


def test_a_failed_write_changes_nothing_and_can_be_tried_again(
    store: TransferQueueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StoreError("cut off")

    store.put(key(), [bare(x=1)])
    with meanwhile(fail, monkeypatch), pytest.raises(StoreError, match="cut off"):
        store.put(key("q"), [bare(y=torch.zeros(1))])
    with meanwhile(fail, monkeypatch), pytest.raises(StoreError, match="cut off"):
        store.update({row(key()): {"x": 2, "z": torch.zeros(1)}})
    assert [(e.key, e.rows[0].field_names) for e in store.list()] == [(key(), {"x"})]
    store.put(key("q"), [bare(y=torch.zeros(1, dtype=torch.int64))])
    store.update({row(key()): {"x": 3, "z": torch.ones(1, dtype=torch.int8)}})
    assert same(list(store.get([row(key())], ["x", "z"])), [{"x": 3, "z": torch.ones(1, dtype=torch.int8)}])


KILLED = """
import os, signal, sys
import raggedright.store.ray_start as ray_start
from raggedright.store.transfer_queue import TransferQueueStore
from store.values import key, tokens

address, run = sys.argv[1:]
store = TransferQueueStore(address, run=run)
store.put(key("whole"), [tokens(3), tokens(4)])
ask = ray_start.Link.ask

def killed(self, run, method, *args):
    if method == "commit":
        os.kill(os.getpid(), signal.SIGKILL)
    return ask(self, run, method, *args)

ray_start.Link.ask = killed
store.put(key("half"), [tokens(5), tokens(6)])
"""


def test_a_client_that_is_killed_in_a_put_leaves_nothing_to_see(store: TransferQueueStore, run: str) -> None:
    """TransferQueue 0.1.11 lists its keys for ever."""
    import transfer_queue

    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", KILLED, store.address, run], env=env, capture_output=True, timeout=90)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert len(transfer_queue.kv_list(f"{run}/0")[f"{run}/0"]) == 4
    assert [(e.key, len(e.rows)) for e in store.list()] == [(key("whole"), 2)]
    (whole,) = store.get([row(key("whole"), 1)], ["input_ids"])
    assert same(whole, {"input_ids": torch.arange(5)})
    with pytest.raises(StoreError, match=r"session half/0, attempt 0.*next attempt"):
        store.put(key("half"), [tokens(1)])
    with pytest.raises(StoreError, match=r"half/0 \(not put\)"):
        store.wait(0, [("half", 0)], timeout=0)
    store.put(key("half", attempt=1), [tokens(1)])
    store.delete(0)
    assert list(store.list()) == []


def test_what_is_dead_is_reported_in_seconds(store: TransferQueueStore, started: list[TransferQueueStore]) -> None:
    """TransferQueue 0.1.11 waits ten minutes for a storage unit and for ever for its controller."""
    import ray

    actors, many = store._link.actors, range(64)  # on both units, whatever indexes they get
    store.put(key(), [tokens(1) for _ in many])
    store.put(key("run"), state="running")

    ray.kill(actors[f"{ray_start.STORAGE_UNIT}0"])
    lost = f"{ray_start.STORAGE_UNIT}0 is dead and its rows are lost"
    says(lost, lambda: store.get([row(key(), i) for i in many], ["input_ids"]))
    says(lost, lambda: store.put(key("q"), [tokens(1) for _ in many]))
    says(lost, lambda: store.update({row(key(), i): {"x": torch.ones(1)} for i in many}))

    ray.kill(actors[ray_start.CONTROLLER])
    says(f"{ray_start.CONTROLLER}.* is dead and nothing can be put", lambda: store.put(key("run"), [tokens(1)]))
    assert [(e.key, e.state) for e in store.list()] == [(key(), "finished"), (key("run"), "running")]

    ray.kill(store._link.sessions)
    for use in (store.list, lambda: store.put(key()), lambda: store.wait(0, [("p", 0)], timeout=60)):
        says("RaggedRightSessions is dead", use)
    started.pop().close()  # whichever test comes next starts anew


def says(what: str, use: Callable[[], object]) -> None:
    began = monotonic()
    with pytest.raises(StoreError, match=what):
        use()
    assert monotonic() - began < 8
