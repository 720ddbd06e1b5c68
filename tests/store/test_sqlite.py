"""The store in a SQLite file passes what every store passes, and keeps its file's promises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
