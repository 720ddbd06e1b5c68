"""The conformance suite: what every backend promises, as tests.

The test module of a backend defines two fixtures, `store` (empty) and `open_another` (a function that opens the same
store again; for a store of one process it may return the same object), and imports everything from here.
"""

from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from time import monotonic, sleep

import numpy as np
import pytest
import torch

from raggedright.errors import RaggedRightError
from raggedright.sessions import ROW_COLUMNS, RowKey, Session, SessionError, SessionKey
from raggedright.store.session_store import Store, StoreError
from store.values import VALUES, failed, finished, key, keys_in, row, same, tokens

Open = Callable[[], Store]


def test_a_session_is_read_back_bit_for_bit(store: Store) -> None:
    session = finished(key(), tokens(3), tokens(5, start=2**40, extra=VALUES), tokens(1))
    store.append([session])
    rows = store.read([row(key(), i) for i in range(3)])
    assert all(same(row, trajectory.fields) for row, trajectory in zip(rows, session.trajectories, strict=True))


def test_a_table_has_every_number_of_a_session_and_its_rows(store: Store) -> None:
    columns = {"role": "planner", "reward": -0.25, "finish_reason": "length", "weight_version": 7}
    columns |= {"generations": 3, "cut_generations": 1}
    put = tokens(
        4,
        input_ids=np.arange(11),
        response_mask=np.array([1, 0, 0, 1]),
        extra={"b": np.ones(4), "a": np.ones(4)},
        **columns,
    )
    store.append([finished(key("p", 3), tokens(2), put, score=-1.5, exact_match=1.0), failed(key("p", 4), "boom: ü")])
    table = store.sessions(0)
    assert [table.session_key(i) for i in range(2)] == [key("p", 3), key("p", 4)]
    assert (table.score[0], table.failed.tolist()) == (-1.5, [False, True])
    assert table.causes == {("p", 4): "boom: ü"}
    assert (table.metrics["exact_match"][0], np.isnan(table.metrics["exact_match"][1])) == (1.0, True)
    assert table.num_rows.tolist() == [2, 0]
    second = {name: column[1] for name, column in table.row_columns.items()}
    assert second == {"prompt_tokens": 7, "response_tokens": 4, "loss_tokens": 2, "extra_names": "a\nb", **columns}
    assert table.row_columns.keys() == ROW_COLUMNS.keys()
    assert table.row_keys(np.array([1, 0])) == [row(key("p", 3), 1), row(key("p", 3), 0)]


def test_a_table_is_in_the_order_of_keys_for_any_order_of_appends(store: Store) -> None:
    keys = [key(p, s) for p in ("10", "9", "a\0", "a", "é", "𝄞") for s in (0, 11)]
    for session in reversed(keys):
        store.append([finished(session, tokens(1))])
    assert keys_in(store) == sorted(keys)


def test_a_table_has_the_last_attempt_of_each_session(store: Store) -> None:
    store.append([failed(key()), finished(key("q"), tokens(1))])
    store.append([finished(key(attempt=1), tokens(2))])
    store.append([failed(key(attempt=2))])
    assert keys_in(store) == [key(attempt=2), key("q")]
    (fields,) = store.read([row(key(attempt=1))], ["response_mask"])
    assert len(fields["response_mask"]) == 2


def test_rounds_are_separate_and_their_finished_sessions_are_counted(store: Store) -> None:
    store.append([finished(key(round=1), tokens(1)), finished(key("q", round=1)), failed(key(round=3))])
    store.append([finished(key(round=2), tokens(1))])
    assert store.rounds() == {1: 2, 2: 1}
    assert keys_in(store, 1) == [key(round=1), key("q", round=1)]
    assert len(store.sessions(9)) == 0
    assert len(store.sessions(9).rows) == 0


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert len(store.sessions(0)) == 0
    assert store.read([]) == []
    assert store.rounds() == {}
    store.append([])


def test_rows_are_returned_in_the_order_of_the_keys_and_twice_if_a_key_is_repeated(store: Store) -> None:
    store.append([finished(key("a"), tokens(1), tokens(2)), finished(key("b", round=7), tokens(3))])
    keys = [row(key("b", round=7)), row(key("a"), 1), row(key("b", round=7)), row(key("a"))]
    answer = store.read(keys, ["response_mask"])
    assert [len(fields["response_mask"]) for fields in answer] == [3, 2, 3, 1]
    assert [list(fields) for fields in answer] == [["response_mask"]] * 4
    answer[0]["response_mask"][:] = 9
    assert answer[2]["response_mask"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "missing",
    [row(key("q")), row(key("p", 1)), row(key("p", 0, 1)), row(key(), 2), row(key(round=1)), RowKey(0, "p", 0, 0, -1)],
)
def test_a_missing_row_is_named(store: Store, missing: RowKey) -> None:
    store.append([finished(key(), tokens(1), tokens(1)), finished(key("z"), tokens(1))])
    with pytest.raises(StoreError) as error:
        store.read([row(key()), missing])
    assert str(missing) in str(error.value)


def test_a_missing_field_is_named_with_its_row(store: Store) -> None:
    store.append([finished(key(), tokens(1, extra={"b": np.ones(1)}), tokens(1))])
    with pytest.raises(StoreError, match=r"row p/0/1.*field b"):
        store.read([row(key(), 0), row(key(), 1)], ["input_ids", "b"])


@pytest.mark.parametrize("again", [finished(key(), tokens(1)), failed(key())])
def test_a_key_is_written_once(store: Store, again: Session) -> None:
    store.append([finished(key(), tokens(2)), failed(key("q"))])
    with pytest.raises(StoreError, match=r"session p/0, attempt 0.*next attempt"):
        store.append([finished(key("new"), tokens(1)), again])
    with pytest.raises(StoreError, match="attempt 5"):
        store.append([failed(key("twice", attempt=5)), failed(key("twice", attempt=5))])
    assert keys_in(store) == [key(), key("q")]
    assert store.sessions(0).num_rows.tolist() == [1, 0]


NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
INVALID_SESSIONS = {
    "score": finished(key(), score=float("nan")),
    "score is 1000": finished(key(), score=10**400),
    "score is None": Session(key=key()),
    "cause": Session(key=key(), cause="\ud800"),
    "with a score": replace(failed(key()), score=1.0),
    "trajectories": replace(failed(key()), trajectories=(tokens(1),)),
    "metric": finished(key(), accuracy=float("inf")),
    "row p/0/0.*reward": finished(key(), tokens(1, reward=float("nan"))),
    "row p/0/1.*role": finished(key(), tokens(1), tokens(1, role=["a"])),
    "row p/0/0.*shapes": finished(key(), tokens(1, response_mask=np.ones(3))),
    "row p/0/0.*input_ids": finished(key(), tokens(1, input_ids=[1, 2])),
    "row p/0/0.*odd": finished(key(), tokens(1, extra={"odd": np.array([object()])})),
    "row p/0/0.*'meta' is a Tensor": finished(key(), tokens(1, extra={"meta": torch.empty(3, device="meta")})),
    "row p/0/1.*'nested' is a NestedTensor": finished(key(), tokens(1), tokens(1, extra={"nested": NESTED})),
    "row p/0/0.*'tensor' is a Tensor": finished(key(), tokens(1, extra={"tensor": torch.ones(3)})),
    "row p/0/0.*'list' is a list": finished(key(), tokens(1, extra={"list": [0.5, 1.0]})),
    "row p/0/0.*'none' is a NoneType": finished(key(), tokens(1, extra={"none": None})),
    "row p/0/0.*'text' is an array of <U1": finished(key(), tokens(1, extra={"text": np.array(["a"])})),
    "round": finished(key(round=-1)),
    "session": finished(key(session=2**63)),
    "attempt": finished(key(attempt=-1)),
    "prompt": finished(key("\ud800")),
}


@pytest.mark.parametrize("match", INVALID_SESSIONS)
def test_an_invalid_session_is_refused_and_nothing_changes(store: Store, match: str) -> None:
    with pytest.raises(SessionError, match=match):
        store.append([finished(key("before"), tokens(1)), INVALID_SESSIONS[match]])
    assert len(store.sessions(0)) == 0
    store.append([finished(key(), tokens(1))])


def test_callers_cannot_change_what_was_appended(store: Store) -> None:
    array = np.zeros(3)
    store.append([finished(key(), tokens(1, extra={"x": array}))])
    array += 1
    (first,) = store.read([row(key())], ["x"])
    assert first["x"].tolist() == [0, 0, 0]
    first["x"] += 5
    assert store.read([row(key())], ["x"])[0]["x"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "prompt", ["a/b", "a/0/0", "q\"u'o`te", "new\nline", "", " ", "%_*", "naïve 𝄞", "a\0b", "x" * 9000]
)
def test_a_prompt_can_be_any_text(store: Store, prompt: str) -> None:
    store.append([finished(key(prompt), tokens(2)), finished(key("other"), tokens(1))])
    assert key(prompt) in keys_in(store)
    assert len(store.read([row(key(prompt))])[0]["input_ids"]) == 3


def test_keys_that_join_to_the_same_text_are_distinct(store: Store) -> None:
    sessions = [key("a/0", 0), key("a", 0), key("a_0", 0), key("a", 0, 1), key("a_0_0", 1), key("a_0", 1)]
    store.append([finished(session, tokens(1, start=i)) for i, session in enumerate(sessions)])
    assert [int(fields["input_ids"][0]) for fields in store.read([row(s) for s in sessions])] == [*range(6)]


def test_drop_deletes_a_round_and_those_before_it(store: Store) -> None:
    store.append([finished(key(round=r), tokens(2)) for r in range(4)])
    store.drop(2)
    assert store.rounds() == {3: 1}
    assert len(store.sessions(1)) == 0
    assert len(store.read([row(key(round=3))])) == 1
    for r in (0, 2):
        with pytest.raises(StoreError, match=rf"round {r}.*dropped"):
            store.read([row(key(round=3)), row(key(round=r))])
        with pytest.raises(StoreError, match=rf"round {r}.*dropped"):
            store.append([finished(key("late", 0, 3, round=r), tokens(1))])
    store.append([finished(key("late", round=3), tokens(1))])


def test_drop_can_be_repeated_and_does_not_bring_rounds_back(store: Store) -> None:
    store.append([finished(key(round=4), tokens(1))])
    store.drop(3)
    store.drop(3)
    store.drop(0)
    with pytest.raises(StoreError, match="dropped"):
        store.append([finished(key(round=3), tokens(1))])
    assert store.rounds() == {4: 1}


def test_wait_returns_the_requested_sessions_once_all_have_ended(store: Store, open_another: Open) -> None:
    other = open_another()
    store.append([finished(key("x"), tokens(1))])

    def finish() -> None:
        sleep(0.2)
        other.append([failed(key("b"))])
        other.append([finished(key("a"), tokens(1), tokens(1))])

    thread = Thread(target=finish)
    thread.start()
    start = monotonic()
    table = store.wait(0, {("a", 0), ("b", 0)}, timeout=30)
    seconds = monotonic() - start
    thread.join()
    assert [table.session_key(i) for i in range(2)] == [key("a"), key("b")]
    assert len(table.rows) == 2
    assert 0.15 < seconds < 10


def test_wait_names_the_sessions_that_have_not_ended(store: Store) -> None:
    store.append([finished(key("a"), tokens(1))])
    start = monotonic()
    with pytest.raises(StoreError, match=r"round 0: 2 of 3.*b/0, c/7"):
        store.wait(0, [("a", 0), ("b", 0), ("c", 7)], timeout=0.3)
    assert 0.25 < monotonic() - start < 10


def test_two_handles_see_each_others_sessions(store: Store, open_another: Open) -> None:
    other = open_another()
    store.append([finished(key("a"), tokens(2))])
    other.append([finished(key("b"), tokens(1))])
    assert keys_in(store) == keys_in(other) == [key("a"), key("b")]
    assert same(store.read([row(key("b"))])[0], tokens(1).fields)
    with pytest.raises(StoreError, match="session b/0"):
        store.append([finished(key("b"), tokens(1))])
    store.drop(0)
    assert len(other.sessions(0)) == 0
    with pytest.raises(StoreError, match="dropped"):
        other.append([finished(key("d"), tokens(1))])


def test_threads_append_and_read_at_once_and_see_whole_sessions(store: Store, open_another: Open) -> None:
    stores, faults = [store, open_another()], []

    def write(writer: int) -> None:
        for i in range(10):
            stores[writer].append([finished(key(f"p{writer}", i), *[tokens(50, start=i) for _ in range(4)])])

    def read(reader: int) -> None:
        seen = 0
        while seen < 20 and not faults:
            table = stores[reader].sessions(0)
            seen = len(table)
            if (table.num_rows != 4).any():
                faults.append(table)
            rows = stores[reader].read(table.row_keys(np.arange(len(table.rows))))
            expected = table.session[table.session_of_row].tolist()
            if [int(fields["input_ids"][0]) for fields in rows] != expected:
                faults.append(rows)

    threads = [Thread(target=f, args=(i,), daemon=True) for f in (write, read) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not faults


def test_of_several_writers_of_the_same_attempt_one_wins(store: Store, open_another: Open) -> None:
    stores, winners = [store, open_another()], []

    def write(writer: int) -> None:
        for i in range(10):
            try:
                stores[writer % 2].append([finished(key("p", i), *[tokens(50, start=writer) for _ in range(3)])])
            except RaggedRightError:
                continue
            winners.append((i, writer))

    threads = [Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(i for i, _ in winners) == [*range(10)]
    for i, writer in winners:
        rows = store.read([row(key("p", i), t) for t in range(3)])
        assert [int(fields["input_ids"][0]) for fields in rows] == [writer] * 3


def test_a_row_can_have_50_megabytes(store: Store) -> None:
    big = np.random.default_rng(0).integers(0, 255, 50_000_000, dtype=np.uint8)
    store.append([finished(key(), tokens(1, extra={"big": big}))])
    assert np.array_equal(store.read([row(key())], ["big"])[0]["big"], big)


def test_each_of_many_rows_is_returned_for_its_key(store: Store) -> None:
    store.append([finished(key("p", s), *[tokens(1, start=100 * s + t) for t in range(60)]) for s in range(40)])
    keys = [row(key("p", s), t) for t in range(60) for s in reversed(range(40))]
    assert [int(f["input_ids"][0]) for f in store.read(keys)] == [100 * k.session + k.trajectory for k in keys]


def test_using_a_closed_store_is_an_error_and_closing_it_again_is_not(store: Store) -> None:
    with store as same_store:
        assert same_store is store
        store.append([finished(key(), tokens(1))])
    store.close()
    uses = (lambda: store.sessions(0), lambda: store.append([failed(key("b"))]), lambda: store.read([row(key())]))
    for use in uses:
        with pytest.raises(StoreError, match="closed"):
            use()


def test_keys_can_be_made_from_plain_tuples(store: Store) -> None:
    store.append([finished(SessionKey(0, "p", 0), tokens(1))])
    assert len(store.read([RowKey(*key(), 0)])) == 1
