"""TransferQueue on a real Ray passes what every store passes, and what it is known to hide is an error here.

One Ray serves this file and test_transfer_queue_processes.py, which runs after it, since it kills parts of it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep

import pytest
import torch

from raggedright.store import ray_link, ray_start
from raggedright.store.protocol import NewRow, StoreError
from raggedright.store.rows import rows_of
from raggedright.store.transfer_queue import TransferQueueStore
from raggedright.tensors.padding import padding_rows
from raggedright.tensors.schema import infer_schema
from store.conformance import *  # noqa: F403
from store.values import bare, key, row, same, tokens

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


def test_too_few_cpus_are_an_error_before_the_start(owner: TransferQueueStore) -> None:
    """TransferQueue 0.1.11 waits for ever where Ray has too few CPUs for its actors."""
    import ray

    with pytest.raises(StoreError, match="needs 101 CPUs as Ray counts them"):
        ray_start._check_cpus(ray, 100)
    with pytest.raises(StoreError, match=r"did not start in 0\.1 s"):
        ray_start._in_time(lambda: sleep(1), 0.1)


def test_others_find_tensors_under_the_origins_keys_and_tags(store: TransferQueueStore, run: str) -> None:
    import transfer_queue

    store.put(key("a_b", 3, round=7), [tokens(2), tokens(1, text="x")._replace(is_padding=True, tags={"turn": 4})])
    listed = transfer_queue.kv_list(f"{run}/7")[f"{run}/7"]
    first, second = sorted(listed)
    assert first.startswith("a%5Fb_3_0@7.0.")
    assert second.startswith("a%5Fb_3_1@7.0.")
    assert [listed[name]["is_padding"] for name in (first, second)] == [False, True]
    counts = {"prompt_tokens": 1, "response_tokens": 1, "loss_tokens": 1}
    assert json.loads(listed[second]["row"]) == {**counts, "rows": 2, "tags": {"turn": 4}}
    assert json.loads(listed[second]["columns"])["text"] == "text"
    answer = transfer_queue.kv_batch_get([first, second], f"{run}/7", ["input_ids"])
    assert same([*answer["input_ids"].unbind()], [torch.arange(3), torch.arange(2)])


def test_a_key_in_transfer_queue_is_of_one_round_and_attempt(store: TransferQueueStore, run: str) -> None:
    """The origin's `{uid}_{session}_{trajectory}` comes again in every round, and in every attempt."""
    import transfer_queue

    for round, attempt in ((0, 0), (0, 1), (1, 0), (1, 1)):
        store.put(key("uid", 2, attempt, round=round), [bare(x=10 * round + attempt)])
    listed = {name for round in (0, 1) for name in transfer_queue.kv_list(f"{run}/{round}")[f"{run}/{round}"]}
    starts = {name.rpartition(".")[0] for name in listed}
    assert starts == {"uid_2_0@0.0", "uid_2_0@0.1", "uid_2_0@1.0", "uid_2_0@1.1"}
    keys = [row(key("uid", 2, attempt, round=round)) for round in (0, 1) for attempt in (0, 1)]
    assert [fields["x"] for fields in store.get(keys, ["x"])] == [0, 1, 10, 11]


def test_padding_rows_are_put_and_got_like_any_other(store: TransferQueueStore, run: str) -> None:
    import transfer_queue

    store.put(key("real"), [tokens(4), tokens(2)])
    real = rows_of(store.list(round=0))
    names = ["input_ids", "response_mask", "rollout_log_probs"]
    schema = infer_schema(real, list(store.get([row(key("real"), i) for i in range(2)], names)))
    made = padding_rows(schema, 3, token_id=0)
    padding = [
        NewRow(prompt_tokens=1, response_tokens=1, loss_tokens=0, fields=each.fields, is_padding=True) for each in made
    ]
    store.put(key("padding"), padding)
    (_, real_entry) = store.list(round=0)
    (entry,) = store.list(prompt="padding")
    assert [each.is_padding for each in (*real_entry.rows, *entry.rows)] == [False] * 2 + [True] * 3
    answer = store.get([each.key for each in entry.rows], names)
    assert same(list(answer), [{name: each.fields[name] for name in names} for each in made])
    listed = transfer_queue.kv_list(f"{run}/0")[f"{run}/0"]
    assert {name.split("_")[0]: tag["is_padding"] for name, tag in listed.items()} == {"real": False, "padding": True}


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
    call, todo = ray_link.Link.queue, [do]

    def queue(*args):
        if todo:
            try:
                todo.pop()()
            except StoreError:
                args[2].close()
                raise
        return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ray_link.Link, "queue", queue)
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
