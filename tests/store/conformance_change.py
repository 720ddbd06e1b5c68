"""What every store does: names, updates and deletes. See conformance.py."""

from collections.abc import Callable

import pytest
import torch

from raggedright.store.protocol import Key, Store, StoreError
from store.values import bare, key, row, same, tokens

Open = Callable[[], Store]


def test_what_was_put_stays_as_it_was(store: Store) -> None:
    tensor, media = torch.zeros(3), {"a": [torch.ones(2)]}
    store.put(key(), [bare(x=tensor, media=media)])
    tensor += 1
    media["a"].append(torch.ones(1))
    (first,) = store.get([row(key())], ["x", "media"])
    assert same(first, {"x": torch.zeros(3), "media": {"a": [torch.ones(2)]}})
    first["x"] += 5  # type: ignore[operator]
    assert same(list(store.get([row(key())], ["x"])), [{"x": torch.zeros(3)}])


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_session_that_is_not_finished_has_nothing_to_get(store: Store, state: str) -> None:
    store.put(key(), state=state, cause="x" if state == "failed" else "")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=rf"row p/0/0.*{state}"):
        store.get([row(key())], ["input_ids"])
    with pytest.raises(StoreError, match=rf"row p/0/0.*{state}"):
        store.update({row(key()): {"x": 1}})


@pytest.mark.parametrize(
    "prompt", ["a/b", "a/0/0", "q\"u'o`te", "new\nline", "", " ", "%_*", "naïve 𝄞", "a\0b", "x" * 9000]
)
def test_a_prompt_may_be_any_text(store: Store, prompt: str) -> None:
    session = key(prompt)
    store.put(session, [tokens(2)])
    store.put(key("a"), [tokens(1)])
    assert [e.key for e in store.list(prompt=prompt)] == [session]
    assert len(store.get([row(session)], ["input_ids"])[0]["input_ids"]) == 3  # type: ignore[arg-type]


def test_names_that_join_to_the_same_text_are_not_mixed_up(store: Store) -> None:
    sessions = [key("a/0", 0), key("a", 0), key("a_0", 0), key("a", 0, 1), key("a_0_0", 1), key("a_0", 1)]
    for i, session in enumerate(sessions):
        store.put(session, [bare(x=i)])
    assert [f["x"] for f in store.get([row(s) for s in sessions], ["x"])] == list(range(6))


@pytest.mark.parametrize("name", ["a b", "ü/\"'\n", "0", "value", "__len__", "a.b", "batch_size"])
def test_a_field_may_have_any_name(store: Store, name: str) -> None:
    store.put(key(), [bare(**{name: torch.tensor([1.0])})])
    assert store.list()[0].rows[0].field_names == {name}
    assert same(list(store.get([row(key())], [name])), [{name: torch.tensor([1.0])}])


def test_update_adds_fields_to_rows(store: Store) -> None:
    store.put(key("a"), [tokens(1), tokens(2)])
    store.put(key("b"), [tokens(3)])
    values = {row(key("a"), 1): {"old": torch.ones(2), "n": 1}, row(key("b")): {"old": torch.zeros(3)}}
    store.update(values)
    answer = store.get([row(key("b")), row(key("a"), 1)], ["old"])
    assert same(list(answer), [{"old": torch.zeros(3)}, {"old": torch.ones(2)}])
    names = {r.key: r.field_names for e in store.list() for r in e.rows}
    usual = {"input_ids", "response_mask", "rollout_log_probs"}
    assert names == {row(key("a")): usual, row(key("a"), 1): usual | {"old", "n"}, row(key("b")): usual | {"old"}}
    with pytest.raises(StoreError, match=r"row a/0/0.*field old"):
        store.get([row(key("a"))], ["old"])


def test_update_replaces_a_field_by_one_of_the_same_dtype_whatever_its_length(store: Store) -> None:
    store.put(key(), [bare(x=torch.zeros(2), n=1), bare(x=torch.zeros(2), n=1)])
    store.update({row(key()): {"x": torch.ones(9), "n": 2}})
    answer = store.get([row(key()), row(key(), 1)], ["x", "n"])
    assert same(list(answer), [{"x": torch.ones(9), "n": 2}, {"x": torch.zeros(2), "n": 1}])
    store.update({row(key()): {"x": torch.ones(9), "n": 2}})
    for value in (torch.zeros(2, dtype=torch.float64), [0.0], 1.0):
        with pytest.raises(StoreError, match=r"row p/0/0.*field x"):
            store.update({row(key()): {"x": value}})
    with pytest.raises(StoreError, match=r"row p/0/0.*field n.*str"):
        store.update({row(key()): {"n": "two"}})


@pytest.mark.parametrize(
    ("bad", "value", "named"),
    [
        (row(key("p", 9)), 1.0, "row p/9/0"),
        (row(key(), 2), 1.0, "row p/0/2"),
        (row(key(), 1), object(), "row p/0/1.*field new"),
        (row(key(), 1), torch.zeros(1), "row p/0/1.*field new"),
        (row(key("gone", round=0)), 1.0, "row gone/0/0"),
    ],
)
def test_an_update_is_done_whole_or_not_at_all(store: Store, bad: Key, value: object, named: str) -> None:
    store.put(key(), [bare(x=1), bare(x=1)])
    with pytest.raises(StoreError, match=named):
        store.update({row(key()): {"new": torch.zeros(1, dtype=torch.int64), "x": 2}, bad: {"new": value}})
    assert [r.field_names for r in store.list()[0].rows] == [{"x"}, {"x"}]
    assert list(store.get([row(key())], ["x"])) == [{"x": 1}]
    store.update({row(key()): {"new": torch.zeros(1)}})


def test_an_update_of_nothing_is_one(store: Store) -> None:
    store.put(key(), [bare(x=1)])
    store.update({})
    store.update({row(key()): {}})
    assert store.list()[0].rows[0].field_names == {"x"}


def test_delete_forgets_a_round_and_those_before_it(store: Store) -> None:
    for r in (0, 1, 2, 3):
        store.put(key(round=r), [tokens(2)])
    store.put(key("q", round=1), state="running")
    store.delete(2)
    assert [e.key for e in store.list()] == [key(round=3)]
    assert len(store.get([row(key(round=3))], ["input_ids"])) == 1
    for r in (0, 2):
        with pytest.raises(StoreError, match=rf"round {r}.*deleted"):
            store.get([row(key(round=3)), row(key(round=r))], ["input_ids"])
        with pytest.raises(StoreError, match=rf"round {r}.*deleted"):
            store.update({row(key(round=r)): {"x": 1}})


def test_nothing_is_put_into_a_deleted_round(store: Store) -> None:
    store.put(key("late", round=1), state="running")
    store.delete(1)
    for session in (key("late", round=1), key(round=0), key("p", 0, 3, round=1)):
        with pytest.raises(StoreError, match=r"round \d.*deleted"):
            store.put(session, [tokens(1)])
    assert list(store.list()) == []
    store.put(key(round=2), [tokens(1)])


def test_delete_can_be_repeated_and_does_not_bring_rounds_back(store: Store) -> None:
    store.put(key(round=4), [tokens(1)])
    store.delete(3)
    store.delete(3)
    store.delete(0)
    with pytest.raises(StoreError, match="deleted"):
        store.put(key(round=3), [tokens(1)])
    assert [e.key for e in store.list()] == [key(round=4)]


def test_a_deleted_round_does_not_bind_the_dtypes_of_the_next(store: Store) -> None:
    store.put(key(round=0), [bare(x=torch.zeros(1))])
    store.delete(0)
    store.put(key(round=1), [bare(x=torch.zeros(1, dtype=torch.int64))])
