"""Rows of a store's sessions for the planner, and when they are deleted."""

import pickle

import pytest

from raggedright.store.listing import join_listings, listing_of, listing_of_new
from raggedright.store.memory import MemoryStore
from raggedright.store.protocol import NewSession, StoreError
from raggedright.store.rows import prune, rows_of
from store.conformance_put import sessions_of_arrays
from store.values import key, tokens


def test_a_listing_comes_back_from_its_columns() -> None:
    store = MemoryStore()
    store.put(key("ü", 1), [tokens(3)._replace(tags={"role": "ö", "reward": None, "x": 0.1}), tokens(1, more=None)])
    store.put(key("a", 0), state="failed", cause="timed out")
    store.put(key("a", 1), [], score=0.25)
    store.put(key("b", 0), state="running")
    entries = [*store.list()]
    listing = listing_of(reversed(entries))
    assert listing.entries == entries
    assert "entries" not in vars(pickle.loads(pickle.dumps(listing)))
    assert [*pickle.loads(pickle.dumps(listing))] == entries
    assert listing_of(listing) is listing
    assert [*listing_of(listing[::-1])] == entries
    assert [*listing_of([])] == []


def test_what_was_put_is_listed_without_the_store_and_listings_are_joined() -> None:
    """A round is sealed from such lists, one of each rank."""
    rows = [tokens(3)._replace(tags={"role": "ö", "x": 0.1}), tokens(1, more=None)]
    put = [
        NewSession(key("b", 1), rows, score=0.5),
        NewSession(key("a", 0), state="failed", cause="timed out"),
        NewSession(key("a", 1), [], score=0.25),
        NewSession(key("a", 2), rows[1:], score=0.0),
    ]
    store = MemoryStore()
    store.put_all(put)
    entries = [*store.list()]
    assert [*listing_of_new(put)] == entries
    for cut in range(5):
        assert [*join_listings([listing_of_new(put[cut:]), listing_of_new(put[:cut])])] == entries
    joined = join_listings([listing_of_new(put[:1]), listing_of(entries[:3])])
    assert joined.first_tags == [({}, 1), ({"role": "ö", "x": 0.1}, 1)]
    assert [*join_listings([])] == []


def test_vectors_travel_with_a_list_and_are_joined_in_its_order() -> None:
    """So that ranks need not read what was just put; a list without them, or too many bytes, does without."""
    put = sessions_of_arrays()
    whole = listing_of_new(put)
    expected = [each.fields["input_ids"].tolist() for new in sorted(put) for each in new.rows]  # type: ignore[attr-defined]
    for cut in range(len(put) + 1):
        parts = [pickle.loads(pickle.dumps(listing_of_new(part))) for part in (put[cut:], put[:cut])]
        joined = join_listings(parts)
        assert joined.vectors is not None
        assert [vector.tolist() for vector in joined.vectors["input_ids"].split()] == expected
        assert [*joined] == [*whole]
    store = MemoryStore()
    store.put_listing(whole)
    assert join_listings([listing_of_new(put[:1]), listing_of(store.list(round=1))]).vectors is None
    num_bytes = sum(ragged.flat.nbytes for ragged in whole.vectors.values()) if whole.vectors else 0
    assert whole.without_vectors(above=num_bytes).vectors is not None
    assert whole.without_vectors(above=num_bytes - 1).vectors is None
    assert [*whole.without_vectors(above=0)] == [*whole]


def test_rows_are_those_of_finished_sessions_in_the_order_of_keys() -> None:
    store = MemoryStore()
    store.put(key("b", 1), [tokens(3)._replace(prompt_tokens=4, loss_tokens=2), tokens(1)._replace(is_padding=True)])
    store.put(key("a", 0), state="failed", cause="x")
    store.put(key("a", 0, 1), [tokens(5)])
    store.put(key("a", 1), [])
    rows = rows_of(reversed(store.list(round=0)))
    assert rows.key.tolist() == ["a/0/0", "b/1/0", "b/1/1"]
    assert rows.prompt_tokens.tolist() == [1, 4, 1]
    assert rows.response_tokens.tolist() == [5, 3, 1]
    assert rows.loss_tokens.tolist() == [5, 2, 1]
    assert rows.is_padding.tolist() == [False, False, True]


def test_no_rows_are_rows() -> None:
    assert len(rows_of([])) == 0


def test_two_attempts_or_two_rounds_are_not_mixed() -> None:
    store = MemoryStore()
    for session in (key(), key(attempt=1), key(round=1)):
        store.put(session, [tokens(1)])
    with pytest.raises(StoreError, match="attempt 1"):
        rows_of(store.list(round=0))
    with pytest.raises(StoreError, match="round 0"):
        rows_of([store.list()[0], store.list()[2]])


@pytest.mark.parametrize(
    ("durable", "keep", "left"), [(2, 0, [3]), (2, 2, [1, 2, 3]), (0, 1, [0, 1, 2, 3]), (9, 0, [])]
)
def test_prune_keeps_what_no_durable_checkpoint_has_and_what_is_asked_for(durable: int, keep: int, left: list) -> None:
    store = MemoryStore()
    for round in range(4):
        store.put(key(round=round), [tokens(1)])
    prune(store, durable_round=durable, keep_rounds=keep)
    assert [entry.key.round for entry in store.list()] == left
