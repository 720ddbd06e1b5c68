"""The store in a SQLite file passes what every store passes, and keeps its file's promises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

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
