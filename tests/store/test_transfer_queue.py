"""The TransferQueue store on a real Ray passes the conformance suite; faults that TransferQueue hides are errors.

One Ray serves this file and test_transfer_queue_processes.py, which runs after it because it kills parts of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep

import pytest

from raggedright.store import ray_queue
from raggedright.store.session_store import StoreError
from raggedright.store.transfer_queue import TransferQueueStore
from store.conformance import *  # noqa: F403
from store.values import finished, key, keys_in, row, same, tokens

pytestmark = pytest.mark.xdist_group("ray")


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


def test_too_few_cpus_and_a_slow_start_are_errors(owner: TransferQueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransferQueue 0.1.11 waits forever if Ray has too few CPUs for its actors."""
    import ray

    with pytest.raises(StoreError, match="needs 101 CPUs as Ray counts them"):
        ray_queue._check_cpus(ray, 100)
    monkeypatch.setattr(ray_queue, "_init_queue", lambda storage_units: sleep(1))
    with pytest.raises(StoreError, match=r"did not start in 0\.1 s"):
        ray_queue._start_queue(2, 0.1)


def test_a_key_in_transfer_queue_includes_the_round_and_the_attempt(store: TransferQueueStore, run: str) -> None:
    """verl's `{uid}_{session}_{trajectory}` is the same in every round and attempt."""
    import transfer_queue

    for round, attempt in ((0, 0), (0, 1), (1, 0), (1, 1)):
        store.append([finished(key("u_id", 2, attempt, round=round), tokens(1, start=10 * round + attempt))])
    listed = {name for round in (0, 1) for name in transfer_queue.kv_list(f"{run}/{round}")[f"{run}/{round}"]}
    starts = {name.rpartition(".")[0] for name in listed}
    assert starts == {"u%5Fid_2_0@0.0", "u%5Fid_2_0@0.1", "u%5Fid_2_0@1.0", "u%5Fid_2_0@1.1"}
    keys = [row(key("u_id", 2, attempt, round=round)) for round in (0, 1) for attempt in (0, 1)]
    assert [int(fields["input_ids"][0]) for fields in store.read(keys)] == [0, 1, 10, 11]


def test_rows_missing_from_transfer_queue_are_an_error(store: TransferQueueStore, run: str) -> None:
    """TransferQueue 0.1.11 returns fewer rows."""
    import transfer_queue

    store.append([finished(key(), tokens(1), tokens(2), tokens(3))])
    names = [*transfer_queue.kv_list(f"{run}/0")[f"{run}/0"]]
    transfer_queue.kv_clear(names[1], f"{run}/0")
    with pytest.raises(StoreError, match=r"row p/0/0.*3 rows.*returned 2"):
        store.read([row(key(), i) for i in range(3)])


def test_a_row_that_was_overwritten_in_transfer_queue_is_an_error(store: TransferQueueStore, run: str) -> None:
    """TransferQueue 0.1.11 gives a cleared row's index to the next key, which a late put then overwrites."""
    import torch
    import transfer_queue

    store.append([finished(key(), tokens(4)), finished(key("q"), tokens(3))])
    (name,) = [name for name in transfer_queue.kv_list(f"{run}/0")[f"{run}/0"] if name.startswith("p_")]
    transfer_queue.kv_put(name, f"{run}/0", {"row": torch.zeros(9, dtype=torch.uint8)}, {})
    with pytest.raises(StoreError, match=r"row p/0/0.*checksum"):
        store.read([row(key())])
    assert same(store.read([row(key("q"))])[0], tokens(3).fields)


@contextmanager
def meanwhile(do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do this once, between a store's call to the sessions actor and its call to TransferQueue."""
    call, todo = ray_queue.QueueLink.call_queue, [do]

    def call_queue(*args):
        if todo:
            try:
                todo.pop()()
            except StoreError:
                args[2].close()
                raise
        return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ray_queue.QueueLink, "call_queue", call_queue)
        yield


def test_a_write_to_a_round_that_is_dropped_meanwhile_leaves_nothing(
    store: TransferQueueStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transfer_queue

    store.append([finished(key("old"), tokens(4))])
    store.append([finished(key("next", round=1), tokens(2))])
    with meanwhile(lambda: store.drop(0), monkeypatch), pytest.raises(StoreError, match=r"round 0.*dropped"):
        store.append([finished(key("late"), tokens(3))])
    assert f"{run}/0" not in transfer_queue.kv_list()
    assert same(store.read([row(key("next", round=1))])[0], tokens(2).fields)


def test_a_read_of_a_round_that_is_dropped_meanwhile_is_an_error(
    store: TransferQueueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append([finished(key(), tokens(4))])

    def replace_it() -> None:
        store.drop(0)
        store.append([finished(key(round=1), tokens(4, start=100))])

    with meanwhile(replace_it, monkeypatch), pytest.raises(StoreError):
        store.read([row(key())])


def test_a_failed_write_changes_nothing_and_can_be_repeated(
    store: TransferQueueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StoreError("unreachable")

    store.append([finished(key(), tokens(1))])
    with meanwhile(fail, monkeypatch), pytest.raises(StoreError, match="unreachable"):
        store.append([finished(key("q"), tokens(5))])
    assert keys_in(store) == [key()]
    store.append([finished(key("q"), tokens(2))])
    assert same(store.read([row(key("q"))])[0], tokens(2).fields)
