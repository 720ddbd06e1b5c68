"""One Ray with TransferQueue for the whole test run; started only by tests that use it, in one group for xdist."""

import sys
from collections.abc import Iterator
from itertools import count

import pytest

from raggedright.store.transfer_queue import TransferQueueStore

_runs = count()


@pytest.fixture(scope="session")
def started() -> Iterator[list[TransferQueueStore]]:
    """The owner of TransferQueue, once started; a test that ends it removes it, and the next one starts another."""
    owners: list[TransferQueueStore] = []
    yield owners
    for owner in owners:
        owner.close()
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture
def owner(started: list[TransferQueueStore]) -> TransferQueueStore:
    if not started:
        started.append(TransferQueueStore(run="owner"))
    return started[0]


@pytest.fixture
def run(owner: TransferQueueStore) -> str:
    return f"run {next(_runs)}"
