"""What every store does: waiting, many handles and threads, big rows, closing. See conformance.py."""

from collections.abc import Callable
from threading import Thread
from time import monotonic, sleep

import pytest
import torch

from raggedright.store.protocol import NewRow, Store, StoreError
from store.values import bare, key, row, same, tokens

Open = Callable[[], Store]


def test_wait_gives_the_last_attempts_in_the_order_of_keys(store: Store) -> None:
    store.put(key("b", 1), [tokens(1)])
    store.put(key("a", 0), state="failed", cause="x")
    store.put(key("a", 0, 1), [tokens(1)])
    store.put(key("a", 1), state="failed", cause="y")
    store.put(key("c", 0), state="running")
    store.put(key("b", 1, round=1), state="running")
    entries = store.wait(0, [("b", 1), ("a", 1), ("a", 0)], timeout=0)
    assert [e.key for e in entries] == [key("a", 0, 1), key("a", 1), key("b", 1)]
    assert [e.state for e in entries] == ["finished", "failed", "finished"]
    assert [len(e.rows) for e in entries] == [1, 0, 1]
    assert list(store.wait(5, [], timeout=0)) == []


def test_wait_names_those_that_are_not_final(store: Store) -> None:
    store.put(key("a"), [tokens(1)])
    store.put(key("b"), state="failed", cause="x")
    store.put(key("b", 0, 1), state="running")
    began = monotonic()
    with pytest.raises(StoreError, match=r"round 0.*2 of 3") as error:
        store.wait(0, [("a", 0), ("b", 0), ("c", 7)], timeout=0.3)
    assert 0.25 < monotonic() - began < 5
    assert "b/0" in str(error.value)
    assert "c/7" in str(error.value)
    assert "a/0" not in str(error.value)


def test_wait_on_a_deleted_round_does_not_wait(store: Store) -> None:
    store.delete(3)
    began = monotonic()
    with pytest.raises(StoreError, match=r"round 3.*deleted"):
        store.wait(3, [("a", 0)], timeout=30)
    assert monotonic() - began < 5


def test_wait_returns_as_soon_as_all_are_final(store: Store, open_another: Open) -> None:
    other = open_another()
    store.put(key("a"), state="running")

    def finish() -> None:
        sleep(0.2)
        other.put(key("b"), state="failed", cause="x")
        other.put(key("a"), [tokens(1)])

    thread = Thread(target=finish)
    thread.start()
    began = monotonic()
    entries = store.wait(0, {("a", 0), ("b", 0)}, timeout=30)
    took = monotonic() - began
    thread.join()
    assert [e.state for e in entries] == ["finished", "failed"]
    assert 0.15 < took < 5


def test_two_handles_see_each_others_puts(store: Store, open_another: Open) -> None:
    other = open_another()
    store.put(key("a"), state="running")
    other.put(key("a"), [tokens(2)], score=0.5)
    other.put(key("b"), [tokens(1)])
    store.update({row(key("b")): {"x": torch.ones(1)}})
    assert store.list() == other.list()
    assert same(list(other.get([row(key("b"))], ["x"])), [{"x": torch.ones(1)}])
    with pytest.raises(StoreError, match="field x"):
        other.put(key("c"), [bare(x=torch.ones(1, dtype=torch.int8))])
    with pytest.raises(StoreError, match="session b/0"):
        store.put(key("b"), [tokens(1)])
    store.delete(0)
    assert list(other.list()) == []
    with pytest.raises(StoreError, match="deleted"):
        other.put(key("d"), [tokens(1)])


def test_threads_put_and_read_at_once_and_see_whole_sessions(store: Store, open_another: Open) -> None:
    stores, faults = [store, open_another()], []

    def write(me: int) -> None:
        for i in range(10):
            stores[me].put(key(f"p{me}", i), [bare(x=torch.full((50,), i)) for _ in range(4)])

    def read(me: int) -> None:
        seen = 0
        while seen < 20 and not faults:
            entries = stores[me].list(round=0)
            seen = len(entries)
            if any(len(e.rows) != 4 for e in entries):
                faults.append(entries)
            answer = stores[me].get([r.key for e in entries for r in e.rows], ["x"])
            expected = [torch.full((50,), e.key.session) for e in entries for _ in e.rows]
            if not same([f["x"] for f in answer], expected):
                faults.append(answer)

    threads = [Thread(target=f, args=(i,), daemon=True) for f in (write, read) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not faults


def test_of_many_that_put_the_same_attempt_one_wins(store: Store, open_another: Open) -> None:
    stores, won = [store, open_another()], []

    def put(me: int) -> None:
        for i in range(10):
            try:
                stores[me % 2].put(key("p", i), [bare(x=torch.full((50,), me)) for _ in range(3)])
            except StoreError:
                continue
            won.append((i, me))

    threads = [Thread(target=put, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(i for i, _ in won) == list(range(10))
    for i, me in won:
        answer = store.get([row(key("p", i), t) for t in range(3)], ["x"])
        assert same([f["x"] for f in answer], [torch.full((50,), me)] * 3)


def test_a_row_of_50_megabytes_is_a_row(store: Store) -> None:
    big = torch.randint(0, 255, (50_000_000,), dtype=torch.uint8)
    store.put(key(), [bare(big=big, x=1)])
    (fields,) = store.get([row(key())], ["big"])
    assert torch.equal(fields["big"], big)  # type: ignore[arg-type]


def test_many_rows_come_back_each_with_its_own(store: Store) -> None:
    for s in range(40):
        store.put(key("p", s), [bare(x=torch.tensor([s, t])) for t in range(25)])
    keys = [row(key("p", s), t) for t in range(25) for s in reversed(range(40))]
    assert [f["x"].tolist() for f in store.get(keys, ["x"])] == [[k.session, k.trajectory] for k in keys]  # type: ignore[attr-defined]


def test_a_closed_store_says_so_and_can_be_closed_again(store: Store) -> None:
    store.put(key(), [tokens(1)])
    store.close()
    store.close()
    for use in (lambda: store.list(), lambda: store.put(key("b"), []), lambda: store.get([row(key())], ["input_ids"])):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_a_store_closes_at_the_end_of_its_block(store: Store) -> None:
    with store as same_store:
        assert same_store is store
        store.put(key(), [NewRow(prompt_tokens=0, response_tokens=0, loss_tokens=0, fields={})])
    with pytest.raises(StoreError, match="closed"):
        store.list()
