"""The store in memory passes the conformance suite."""

from collections.abc import Callable

import pytest

from raggedright.store.memory import MemoryStore
from store.conformance import *  # noqa: F403


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def open_another(store: MemoryStore) -> Callable[[], MemoryStore]:
    return lambda: store
