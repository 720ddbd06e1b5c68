"""What every store does: what is put, listed and got. See conformance.py."""

from array import array
from collections.abc import Callable
from typing import get_type_hints

import numpy as np
import pytest
import torch

from raggedright.errors import RaggedRightError
from raggedright.store.listing import listing_of_new
from raggedright.store.protocol import Key, NewRow, NewSession, RowEntry, Store, StoreError
from raggedright.tensors.row_tokens import tensor_of
from store.values import VALUES, bare, key, row, same, tokens

Open = Callable[[], Store]


def test_a_session_comes_back_bit_for_bit(store: Store) -> None:
    rows = [tokens(3), tokens(5, start=2**40), tokens(1)]
    store.put(key(), rows, score=0.25)
    answer = store.get([row(key(), i) for i in range(3)], ["input_ids", "response_mask", "rollout_log_probs"])
    assert [list(fields) for fields in answer] == [["input_ids", "response_mask", "rollout_log_probs"]] * 3
    assert all(same(fields, dict(put.fields)) for fields, put in zip(answer, rows, strict=True))


def test_a_value_of_every_type_comes_back_as_it_was(store: Store) -> None:
    store.put(key(), [bare(**VALUES)])
    (fields,) = store.get([row(key())], list(VALUES))
    assert [name for name in VALUES if not same(fields[name], VALUES[name])] == []


def test_a_listing_has_counts_tags_and_field_names(store: Store) -> None:
    tags = {"text": "a'b\n\"c/ü", "empty": "", "int": -3, "float": 0.1, "true": True, "false": False, "none": None}
    put = tokens(4)._replace(prompt_tokens=7, loss_tokens=2, is_padding=True, tags=tags)
    store.put(key("p", 3), [tokens(2), put], score=-1.5)
    (entry,) = store.list()
    assert (entry.key, entry.state, entry.cause, entry.score) == (key("p", 3), "finished", "", -1.5)
    assert [r.key for r in entry.rows] == [row(key("p", 3), 0), row(key("p", 3), 1)]
    first, second = entry.rows
    assert (second.prompt_tokens, second.response_tokens, second.loss_tokens, second.is_padding) == (7, 4, 2, True)
    assert same(dict(second.tags), tags)
    assert second.field_names == {"input_ids", "response_mask", "rollout_log_probs"}
    assert (dict(first.tags), first.is_padding) == ({}, False)


def test_every_number_of_a_row_is_listed_as_it_was_put(store: Store) -> None:
    """Whatever numbers a row has: a store that leaves one out, or swaps two, is found."""
    types = {name: of for name, of in get_type_hints(NewRow).items() if name in RowEntry._fields and name != "tags"}
    assert {"prompt_tokens", "response_tokens", "loss_tokens", "is_padding"} <= types.keys()
    put = {}
    for i in range(4):  # falling from name to name: no row has more loss tokens than response tokens
        falling = {name: 100 * (len(types) - n) + i for n, name in enumerate(types)}
        numbers = {name: bool(i % 2) if types[name] is bool else falling[name] for name in types}
        put[row(key("p", i // 2), i % 2)] = bare()._replace(**numbers)  # type: ignore[arg-type]
    for session in range(2):
        store.put(key("p", session), [put[row(key("p", session), i)] for i in range(2)])
    listed = {each.key: each for entry in store.list() for each in entry.rows}
    assert listed.keys() == put.keys()
    for each, new in put.items():
        assert same([getattr(listed[each], name) for name in types], [getattr(new, name) for name in types])


def test_a_listing_is_in_the_order_of_keys_whatever_the_order_of_puts(store: Store) -> None:
    keys = [key(p, s, a, round=r) for r in (0, 2) for p in ("10", "9", "é", "𝄞") for s in (0, 11) for a in (0, 1)]
    for session in reversed(keys):
        store.put(session, [tokens(1)])
    assert [entry.key for entry in store.list()] == sorted(keys)


def test_a_listing_can_be_filtered(store: Store) -> None:
    store.put(key("a", 0), [tokens(1)])
    store.put(key("a", 1), state="failed", cause="timed out")
    store.put(key("b", 0), state="running")
    store.put(key("a", 0, round=1), [tokens(1)])
    assert [e.key for e in store.list(round=0)] == [key("a", 0), key("a", 1), key("b", 0)]
    assert [e.key for e in store.list(prompt="a")] == [key("a", 0), key("a", 1), key("a", 0, round=1)]
    assert [e.key for e in store.list(session=1)] == [key("a", 1)]
    assert [e.key for e in store.list(state="finished")] == [key("a", 0), key("a", 0, round=1)]
    assert [e.key for e in store.list(round=0, prompt="b", session=0, state="running")] == [key("b", 0)]
    assert list(store.list(round=5)) == []
    assert list(store.list(prompt="c")) == []


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert list(store.list()) == []
    assert list(store.get([], ["input_ids"])) == []


def test_an_answer_has_the_keys_asked_for_in_their_order_and_twice_if_asked_twice(store: Store) -> None:
    store.put(key("a"), [tokens(1), tokens(2)])
    store.put(key("b", round=7), [tokens(3)])
    keys = [row(key("b", round=7)), row(key("a"), 1), row(key("b", round=7)), row(key("a"), 0)]
    answer = store.get(keys, ["response_mask"])
    assert [len(fields["response_mask"]) for fields in answer] == [3, 2, 3, 1]  # type: ignore[arg-type]
    assert [list(fields) for fields in answer] == [["response_mask"]] * 4


def test_no_fields_may_be_asked_for_but_the_keys_have_to_be_there(store: Store) -> None:
    store.put(key(), [tokens(1)])
    assert list(store.get([row(key())], [])) == [{}]
    with pytest.raises(StoreError, match="row p/0/1"):
        store.get([row(key()), row(key(), 1)], [])


def test_fields_come_in_the_order_asked_for(store: Store) -> None:
    store.put(key(), [bare(a=1, b=2, c=3)])
    assert [list(f.items()) for f in store.get([row(key())], ["c", "a"])] == [[("c", 3), ("a", 1)]]


@pytest.mark.parametrize(
    "missing",
    [row(key("q")), row(key("p", 1)), row(key("p", 0, 1)), row(key(), 2), row(key(round=1)), Key(0, "p", 0, 0, -1)],
)
def test_a_missing_row_is_named(store: Store, missing: Key) -> None:
    store.put(key(), [tokens(1), tokens(1)])
    with pytest.raises(StoreError) as error:
        store.get([row(key()), missing], ["input_ids"])
    assert str(missing) in str(error.value)


def test_a_missing_field_is_named_with_its_row(store: Store) -> None:
    store.put(key(), [bare(a=1, b=1), bare(a=1)])
    with pytest.raises(StoreError, match=r"row p/0/1.*field b"):
        store.get([row(key(), 0), row(key(), 1)], ["a", "b"])


def test_rows_of_a_session_may_differ_in_their_fields_and_have_none(store: Store) -> None:
    store.put(key(), [bare(), bare(a=None), bare(b=1)])
    assert [r.field_names for r in store.list()[0].rows] == [set(), {"a"}, {"b"}]
    assert list(store.get([row(key(), 1)], ["a"])) == [{"a": None}]


@pytest.mark.parametrize("state", ["finished", "failed", "running"])
def test_nothing_is_put_twice(store: Store, state: str) -> None:
    how = {"finished": {"rows": [tokens(2)]}, "failed": {"state": "failed", "cause": "x"}, "running": {}}
    store.put(key(), **{"state": state, **how[state]})
    again = "running" if state == "running" else "finished"
    with pytest.raises(StoreError, match="session p/0, attempt 0") as error:
        store.put(key(), state=again)
    assert state in str(error.value)
    assert [(e.state, len(e.rows)) for e in store.list()] == [(state, len(how[state].get("rows", ())))]


@pytest.mark.parametrize("first", ["finished", "failed"])
def test_a_final_session_does_not_become_another(store: Store, first: str) -> None:
    store.put(key(), state=first, cause="x" if first == "failed" else "")  # type: ignore[arg-type]
    for state in ("running", "finished", "failed"):
        with pytest.raises(StoreError, match="next attempt"):
            store.put(key(), state=state, cause="y" if state == "failed" else "")
    assert [e.state for e in store.list()] == [first]


def test_a_session_runs_and_then_is_finished_or_failed(store: Store) -> None:
    store.put(key("a"), state="running")
    store.put(key("b"), state="running")
    assert [(e.state, e.rows) for e in store.list()] == [("running", ())] * 2
    store.put(key("a"), [tokens(2)], score=1.0)
    store.put(key("b"), state="failed", cause="ValueError: no answer")
    a, b = store.list()
    assert (a.state, len(a.rows), a.score) == ("finished", 1, 1.0)
    assert (b.state, b.cause, b.rows) == ("failed", "ValueError: no answer", ())


def test_a_finished_session_may_have_no_rows(store: Store) -> None:
    store.put(key(), [], score=0.0)
    (entry,) = store.list()
    assert (entry.state, entry.rows, entry.score) == ("finished", (), 0.0)


def test_the_next_attempt_stands_beside_the_one_before(store: Store) -> None:
    store.put(key(), state="failed", cause="x")
    store.put(key(attempt=1), [tokens(2)])
    store.put(key(attempt=2), [tokens(3)])
    answer = store.get([row(key(attempt=1)), row(key(attempt=2))], ["response_mask"])
    assert [len(f["response_mask"]) for f in answer] == [2, 3]  # type: ignore[arg-type]
    assert [e.state for e in store.list()] == ["failed", "finished", "finished"]


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"state": "failed"}, "cause"),
        ({"state": "failed", "cause": "x", "rows": [tokens(1)]}, "1 row"),
        ({"state": "running", "rows": [tokens(1)]}, "1 row"),
        ({"state": "finished", "cause": "x"}, "cause"),
        ({"state": "done"}, "done"),
        ({"score": float("nan")}, "nan"),
        ({"rows": [tokens(1)._replace(loss_tokens=2)]}, "row p/0/0"),
        ({"rows": [tokens(1), tokens(1)._replace(prompt_tokens=-1)]}, "row p/0/1"),
        ({"rows": [tokens(1)._replace(tags={"t": [1]})]}, "tag t"),
        ({"rows": [tokens(1)._replace(tags={"t": float("inf")})]}, "tag t"),
        ({"rows": [tokens(1), bare(odd=object())]}, "row p/0/1.*field odd"),
        ({"rows": [bare(odd={"a": [object()]})]}, "row p/0/0.*field odd"),
    ],
)
def test_a_wrong_put_is_refused_and_changes_nothing(store: Store, how: dict, named: str) -> None:
    with pytest.raises(StoreError, match=named):
        store.put(key(), **how)
    assert list(store.list()) == []
    store.put(key(), [tokens(1)])


@pytest.mark.parametrize("wrong", [key(round=-1), key(session=-1), key(attempt=-1), key("\ud800"), key(session=2**63)])
def test_a_wrong_key_is_refused(store: Store, wrong) -> None:
    with pytest.raises(StoreError):
        store.put(wrong, [tokens(1)])
    assert list(store.list()) == []


def test_a_field_has_one_dtype_in_a_round(store: Store) -> None:
    """TransferQueue 0.1.11 acknowledges such a put as failed and its client goes on."""
    store.put(key("a"), [bare(x=torch.zeros(2))])
    with pytest.raises(StoreError, match=r"row b/0/1.*field x") as error:
        store.put(key("b"), [bare(x=torch.zeros(1)), bare(x=torch.zeros(2, dtype=torch.float64))])
    assert "torch.float64" in str(error.value)
    assert "torch.float32" in str(error.value)
    with pytest.raises(StoreError, match=r"row b/0/0.*field x"):
        store.put(key("b"), [bare(x=[0.0])])
    assert [e.key for e in store.list()] == [key("a")]
    store.put(key("b"), [bare(x=torch.ones(5))])
    store.put(key("a", round=1), [bare(x=torch.zeros(2, dtype=torch.float64))])


def test_the_rows_of_one_put_agree_in_dtype_too(store: Store) -> None:
    with pytest.raises(StoreError, match=r"row p/0/1.*field x"):
        store.put(key(), [bare(x=torch.zeros(2)), bare(x=torch.zeros(2, dtype=torch.int64))])
    store.put(key(), [bare(x=torch.zeros(2, dtype=torch.int64))])


def test_none_agrees_with_every_dtype_and_plain_numbers_with_each_other(store: Store) -> None:
    store.put(key("a"), [bare(x=None, y=1), bare(x=torch.zeros(2), y=0.5), bare(x=None, y=True)])
    keys = [row(key("a"), i) for i in range(3)]
    assert same([f["y"] for f in store.get(keys, ["x", "y"])], [1, 0.5, True])


def test_sessions_put_together_are_all_there(store: Store) -> None:
    sessions = [NewSession(key("p", i), [tokens(i + 1)], score=float(i)) for i in range(3)]
    store.put_all([*sessions, NewSession(key("p", 3), state="failed", cause="timed out")])
    assert [len(entry.rows) for entry in store.list()] == [1, 1, 1, 0]
    assert [entry.score for entry in store.list()] == [0.0, 1.0, 2.0, None]
    store.put(key("p", 4), [tokens(1)])
    store.put_all([])
    assert len(store.list()) == 5


def test_one_that_is_refused_among_several_is_named_and_no_later_one_is_put(store: Store) -> None:
    store.put(key("p", 1), [tokens(3)])
    with pytest.raises(StoreError, match="p/1"):
        store.put_all([NewSession(key("p", i), [tokens(2)]) for i in range(3)])
    assert [[row.response_tokens for row in entry.rows] for entry in store.list() if entry.key.session] == [[3]]


def test_a_session_twice_among_several_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="p/0"):
        store.put_all([NewSession(key("p", 0), [tokens(2)]), NewSession(key("p", 0), [tokens(3)])])


def test_a_running_session_may_end_among_several(store: Store) -> None:
    store.put(key("p", 0), state="running")
    store.put_all([NewSession(key("p", i), [tokens(2)]) for i in range(2)])
    assert [(entry.state, len(entry.rows)) for entry in store.list()] == [("finished", 1)] * 2


def test_a_trajectory_number_that_no_session_has_is_no_other_sessions_row(store: Store) -> None:
    for i in range(3):
        store.put(key("p", i), [tokens(2)])
    for trajectory in (-1, 1, 2**16, -(2**16)):
        with pytest.raises(StoreError, match="row p/1"):
            store.get([row(key("p", 1), trajectory)], ["input_ids"])


def test_vectors_come_joined_in_the_order_asked_for(store: Store) -> None:
    """Short rows and long ones, of sessions that were put together or not."""
    store.put_all([NewSession(key("p", i), [tokens(2 + i, start=10 * i), tokens(3)]) for i in range(3)])
    store.put(key("long"), [tokens(9_000, start=5)])
    asked = [row(key("p", 2), 1), row(key("long")), row(key("p", 0)), row(key("p", 2)), row(key("p", 2), 1)]
    for keys in (asked, [each for each in asked if each.prompt == "p"], asked[:1]):
        whole = store.get(keys, ["rollout_log_probs", "input_ids"])
        joined = store.get_joined(keys, ["input_ids", "rollout_log_probs"])
        for name, (flat, sizes, starts) in joined.items():
            values = [tensor_of(each, name) for each in whole]
            assert same(flat, torch.cat(values))
            assert sizes.tolist() == [len(value) for value in values]
            assert starts.tolist() == [0, *np.cumsum(sizes)[:-1].tolist()]
    assert [*store.get_joined(asked, ["input_ids", "rollout_log_probs"])] == ["input_ids", "rollout_log_probs"]


def test_what_cannot_be_joined_is_named(store: Store) -> None:
    store.put(key("p"), [tokens(2), tokens(2, more=torch.ones(2, 2))])
    store.put(key("q"), [tokens(2)])
    with pytest.raises(RaggedRightError, match=r"p/0/1.*more is torch.float32 of shape \(2, 2\)"):
        store.get_joined([row(key("p"), 1)], ["input_ids", "more"])
    for missing, name in ((row(key("q")), "more"), (row(key("q"), 1), "input_ids"), (row(key("r")), "input_ids")):
        with pytest.raises(StoreError, match=f"{missing.prompt}/0/{missing.trajectory}"):
            store.get_joined([row(key("q")), missing], [name])


def test_an_array_of_python_is_read_as_the_vector_it_stands_for(store: Store) -> None:
    given = {code: array(code, [1, 0, -3]) for code in "hiqfd"} | {"empty": array("q")}
    types = {"h": torch.int16, "i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64}
    store.put(key(), [bare(**given), bare(**given)])
    store.put(key("q"), [bare(**given, text="beside")])
    store.update({row(key()): {"new": array("q", [7])}})
    expected = {code: torch.tensor([1, 0, -3], dtype=types[code]) for code in "hiqfd"}
    expected["empty"] = torch.empty(0, dtype=torch.int64)
    found = store.get([row(key()), row(key(), 1), row(key("q"))], [*given])
    assert all(same(fields, expected) for fields in found)
    assert same(store.get([row(key())], ["new"]), [{"new": torch.tensor([7])}])
    with pytest.raises(StoreError, match=r"p/1/0.*field odd"):
        store.put(key("p", 1), [bare(odd=array("B", [1]))])


def sessions_of_arrays() -> list[NewSession]:
    """Short sessions and, among them, a failed one, one without rows, and of another round."""

    def short(count: int, start: int) -> NewRow:
        ids, log_probs = range(start, start + count + 1), [-0.5 * i for i in range(count)]
        fields = {"input_ids": array("q", ids), "rollout_log_probs": array("f", log_probs)}
        return NewRow(1, count, count, fields, tags={"turn": count, "reward": None if start else 1.0})

    return [
        NewSession(key("b", 1), [short(3, 0), short(1, 9)], score=0.5),
        NewSession(key("a", 0), state="failed", cause="timed out"),
        NewSession(key("a", 0, 1), [short(2, 4), short(5, 0), short(1, 1)], score=0.25),
        NewSession(key("a", 1), [], score=0.0),
        NewSession(key("b", 0, round=1), [short(1, 7)], score=1.0),
    ]


@pytest.mark.parametrize("long", [False, True])
def test_a_listing_with_vectors_is_put_like_its_sessions(store: Store, long: bool) -> None:
    put = sessions_of_arrays()
    if long:
        ids = {"input_ids": array("q", range(2_000)), "rollout_log_probs": array("f", [0.0])}
        put += [NewSession(key("c", i), [NewRow(1_999, 1, 1, ids)] if not i else [], score=0.0) for i in range(9)]
    listing = listing_of_new(put)
    assert listing.vectors is not None
    store.put_listing(listing)
    assert [*store.list()] == [*listing]
    rows = {row(new.key, i): each for new in put for i, each in enumerate(new.rows)}
    names = ["input_ids", "rollout_log_probs"]
    for fields, each in zip(store.get([*rows], names), rows.values(), strict=True):
        assert [tensor_of(fields, name).tolist() for name in names] == [each.fields[name].tolist() for name in names]  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="finished already"):
        store.put_listing(listing_of_new(put[:1]))
    assert [*store.list()] == [*listing]


def test_a_session_that_runs_is_finished_in_one_put_with_new_ones(store: Store) -> None:
    first, *_ = put = [new for new in sessions_of_arrays() if new.rows]
    store.put(first.key, state="running")
    store.put_listing(listing_of_new(put))
    assert [*store.list()] == [*listing_of_new(put)]
    assert store.get([row(first.key, 1)], ["input_ids"])[0]["input_ids"].tolist() == [9, 10]  # type: ignore[attr-defined]


def test_a_listing_whose_counts_cannot_be_is_refused(store: Store) -> None:
    listing = listing_of_new(sessions_of_arrays())
    listing.about.loss_tokens[1] = 6
    with pytest.raises(StoreError, match=r"row a/0/1, attempt 1: .* are 1, 5, 6"):
        store.put_listing(listing)
    assert all(entry.key < key("a", 0, 1) for entry in store.list())


def test_a_listing_that_cannot_be_put_is_refused_with_a_sentence(store: Store) -> None:
    put = sessions_of_arrays()
    listed = listing_of_new(put).without_vectors(above=0)
    with pytest.raises(StoreError, match=r"6 rows has none of their fields"):
        store.put_listing(listed)
    numbers = ({"score": value} for value in ("1", float("nan"), float("inf"), 10**400))
    for odd in ({"state": ["finished"]}, {"cause": ["x"]}, *numbers):
        session, (name,) = put[-1]._replace(**odd), odd
        with pytest.raises(StoreError, match=rf"round 1, session b/0, attempt 0: {name} is"):
            store.put_listing(listing_of_new([session]))
        with pytest.raises(StoreError, match=rf"round 1, session b/0, attempt 0: {name} is"):
            store.put_all([session])
    store.put_listing(listing_of_new([]))
    assert [*store.list()] == []
