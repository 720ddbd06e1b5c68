"""The store in a SQLite file passes the conformance suite."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raggedright.store.session_store import StoreError
from raggedright.store.sqlite import SqliteStore
from store.conformance import *  # noqa: F403
from store.values import finished, key, tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(path, run="a run") as store:
        yield store


@pytest.fixture
def open_another(path: Path) -> Iterator[Callable[[], SqliteStore]]:
    opened: list[SqliteStore] = []

    def open_store() -> SqliteStore:
        opened.append(SqliteStore(path, run="a run"))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def test_an_append_that_fails_half_way_records_nothing(store: SqliteStore) -> None:
    refuse = "CREATE TEMP TRIGGER t BEFORE INSERT ON log WHEN NEW.session = 1 BEGIN {} END"
    store._database.connection().execute(refuse.format("SELECT raise(FAIL, 'no such session here');"))
    with pytest.raises(StoreError):
        store.append([finished(key("p", i), tokens(2), tokens(9)) for i in range(3)])
    assert len(store.sessions(0)) == 0
    store.append([finished(key("p", 0), tokens(2))])
    assert len(store.sessions(0)) == 1
