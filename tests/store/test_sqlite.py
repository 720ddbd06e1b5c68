"""The store in a SQLite file passes what every store passes, and keeps its file's promises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raggedright.store.protocol import StoreError
from raggedright.store.sqlite import SqliteStore
from store.conformance import *  # noqa: F403
from store.values import key, tokens


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


def test_a_put_that_breaks_off_half_way_in_a_block_undoes_all_of_it(path: Path) -> None:
    def put_a_broken_one() -> None:
        with store.together():
            store.put(key("p", 0), [tokens(2)])
            with pytest.raises(StoreError, match="no such row here"):
                store.put(key("p", 1), [tokens(2), tokens(9)])
            store.put(key("p", 2), [tokens(2)])

    with SqliteStore(path) as store:
        refuse = "CREATE TEMP TRIGGER t BEFORE INSERT ON rows WHEN NEW.response_tokens = 9 BEGIN {} END"
        store._database.connection().execute(refuse.format("SELECT raise(ABORT, 'no such row here');"))
        with pytest.raises(StoreError, match=r"failed half-way.*all of its block is undone"):
            put_a_broken_one()
        assert list(store.list()) == []
        store.put(key("p", 0), [tokens(2)])
        assert len(store.list()) == 1


def test_a_block_of_puts_that_raises_is_undone_and_unseen_before_its_end(path: Path) -> None:
    def put_and_raise() -> None:
        with store.together():
            store.put(key("p", 0), [tokens(2)])
            assert list(other.list()) == []
            raise KeyError

    with SqliteStore(path) as store, SqliteStore(path) as other:
        with pytest.raises(KeyError):
            put_and_raise()
        assert list(store.list()) == []
        store.put(key("p", 0), [tokens(2)])
        assert len(other.list()) == 1
