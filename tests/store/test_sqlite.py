"""The store in a SQLite file passes what every store passes, and keeps its file's promises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raggedright.store.sqlite import SqliteStore
from store.conformance import *  # noqa: F403


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
