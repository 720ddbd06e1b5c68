"""The store in a SQLite file passes what every store passes, and keeps its file's promises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from raggedright.store.encoding import encode
from raggedright.store.protocol import NewSession, StoreError
from raggedright.store.sqlite import SqliteStore
from store.conformance import *  # noqa: F403
from store.values import key, row, same, tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(path) as store:
        yield store


@pytest.fixture
def open_another(path: Path) -> Iterator[Callable[[], SqliteStore]]:
    opened: list[SqliteStore] = []

    def open_it() -> SqliteStore:
        opened.append(SqliteStore(path))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def test_a_put_that_breaks_off_half_way_undoes_all_that_came_with_it(path: Path) -> None:
    with SqliteStore(path) as store:
        refuse = "CREATE TEMP TRIGGER t BEFORE INSERT ON sessions WHEN NEW.session = 1 BEGIN {} END"
        store._database.connection().execute(refuse.format("SELECT raise(ABORT, 'no such session here');"))
        with pytest.raises(StoreError, match="no such session here"):
            store.put_all([NewSession(key("p", i), [tokens(2), tokens(9)]) for i in range(3)])
        assert list(store.list()) == []
        store.put(key("p", 0), [tokens(2)])
        assert len(store.list()) == 1


def test_of_several_sessions_all_are_put_or_none(path: Path) -> None:
    with SqliteStore(path) as store:
        store.put(key("p", 1), [tokens(3)])
        with pytest.raises(StoreError, match="p/1"):
            store.put_all([NewSession(key("p", i), [tokens(2)]) for i in range(3)])
        assert [entry.key.session for entry in store.list()] == [1]


def test_large_fields_stand_apart_and_come_back(path: Path) -> None:
    """So that a pass which needs no pixels does not read them."""
    large = {"pixels": torch.rand(300, 100), "long": torch.arange(20_000), "text": "x" * 70_000}
    with SqliteStore(path) as store:
        store.put(key(), [tokens(3, **large), tokens(2)])
        names = ["input_ids", *large]
        (found,) = store.get([row(key())], names)
        assert same(found, {"input_ids": torch.arange(4), **large})
        assert store.list()[0].rows[0].field_names >= set(names)
        with pytest.raises(StoreError, match=r"p/0/1.*pixels"):
            store.get([row(key(), 1)], names)
        ask = store._database.connection().execute
        assert ask("SELECT name FROM fields ORDER BY name").fetchall() == [(name,) for name in sorted(large)]
        assert ask("SELECT max(length(value)) < 300 FROM row_values").fetchone() == (1,)


def test_short_sessions_that_are_put_together_share_a_block_a_round(path: Path) -> None:
    """If all their rows are alike. And each row stays a row: it is read, updated, listed and deleted like any other."""
    with SqliteStore(path) as store:
        short = [NewSession(key("p", i), [tokens(3, start=i), tokens(1)]) for i in range(4)]
        later = NewSession(key("p", 0, round=1), [tokens(3)])
        store.put_all([*short, later, NewSession(key("s"), state="failed", cause="x")])
        store.put_all([NewSession(key("q", i), [tokens(3, text="x") if i else tokens(3)]) for i in range(2)])
        ask = store._database.connection().execute
        blocks = "SELECT group_concat(prompt || session), b.round FROM blocks b JOIN sessions s ON s.block = b.id"
        assert ask(f"{blocks} GROUP BY b.id").fetchall() == [("p0,p1,p2,p3", 0), ("p0", 1)]
        assert ask("SELECT count(*) FROM row_values").fetchone() == (2,)
        store.update({row(key("p", 2)): {"input_ids": torch.zeros(9, dtype=torch.int64), "new": torch.ones(1)}})
        keys = [row(key("p", i), t) for i in range(4) for t in range(2)]
        found = [each["input_ids"] for each in store.get(keys, ["input_ids"])]
        expected = [ids for i in range(4) for ids in (torch.arange(i, i + 4), torch.arange(2))]
        expected[4] = torch.zeros(9, dtype=torch.int64)
        assert same(found, expected)
        assert same(store.get_joined(keys, ["input_ids"])["input_ids"].flat, torch.cat(expected))
        with pytest.raises(StoreError, match="p/1/2"):  # which would be the next session's first
            store.get_joined([row(key("p", 1), 2)], ["input_ids"])
        store.delete(0)
        assert ask("SELECT round FROM blocks").fetchall() == [(1,)]


def test_a_block_has_a_bound_and_a_long_session_none(path: Path) -> None:
    with SqliteStore(path) as store:
        store.put_all([NewSession(key("p", i), [tokens(300)]) for i in range(100)])
        store.put(key("long"), [tokens(1_000)])
        ask = store._database.connection().execute
        assert ask("SELECT count(*), max(length(value)) < 140000 FROM blocks").fetchone() == (4, 1)
        assert ask("SELECT block FROM sessions WHERE prompt = 'long'").fetchone() == (None,)


@pytest.mark.parametrize(
    "value",
    [
        encode({"input_ids": torch.arange(4)}),
        encode((np.ones((1, 2), dtype=np.int64), {"input_ids": torch.arange(3)})),
        encode((np.array([[-1, 4]]), {"input_ids": torch.arange(3)})),
        encode((np.array([[3]]), {"input_ids": torch.arange(3)})),
        b"nonsense",
    ],
    ids=["no block", "sizes", "negative", "too few rows", "no value"],
)
def test_an_altered_block_is_an_error(path: Path, value: bytes) -> None:
    with SqliteStore(path) as store:
        store.put(key(), [tokens(2), tokens(3)])
        store._database.connection().execute("UPDATE blocks SET value = ?", (value,))
        for read in (store.get, store.get_joined):
            with pytest.raises(StoreError, match="altered"):
                read([row(key(), 1)], ["input_ids"])
