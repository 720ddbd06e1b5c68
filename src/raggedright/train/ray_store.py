"""The store of a run on Ray: the driver starts TransferQueue and keeps it, ranks attach to it.

Whoever starts TransferQueue takes it along when it dies, so it is the driver and never a rank: a rank that is started
again finds what the others had put. Where an actor of it has died, the driver starts a new and empty one; ranks wait
for that, go back to the last checkpoint and run the sessions again.
"""

import time
from contextlib import suppress

import ray

from raggedright.config.schema import Config
from raggedright.store.protocol import StoreError
from raggedright.store.transfer_queue import TransferQueueStore
from raggedright.train.world import TrainError, World

ATTEMPT_SECONDS = 60.0  # to start a store anew, before another place is tried


def attach_store(config: Config, world: World) -> TransferQueueStore:
    """A rank's store. The first rank gives up what ranks of an earlier start were writing when they died."""
    job = ray.get_runtime_context().get_job_id()  # of the driver, so that no other start's rows are mistaken for ours
    store = _open(config, run=f"{config.out} {job}", attach=True, within=config.parallel.start_timeout)
    if world.is_first:
        store.give_up_writes()
    return store


class Keeper:
    """The driver's hold on TransferQueue."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = self._start(config.parallel.start_timeout)

    def mend(self) -> str:
        """Start it anew where a part of it is dead; what there is to say of that."""
        dead = self._store.dead()
        if not dead:
            return ""
        with suppress(StoreError):
            self._store.close()
        until = time.monotonic() + self._config.parallel.start_timeout
        while True:
            try:
                self._store = self._start(ATTEMPT_SECONDS)
            except StoreError as error:  # Ray may not know yet that a node is gone, or not have a new one yet
                if time.monotonic() < until:
                    continue
                words = f"the store's {' and '.join(dead)} died, and a new store cannot start: {error}"
                raise TrainError(words) from None
            return f"the store's {' and '.join(dead)} died, and with it the rows of the store; started a new one"

    def close(self) -> None:
        """End TransferQueue."""
        with suppress(StoreError):
            self._store.close()

    def _start(self, within: float) -> TransferQueueStore:
        store = _open(self._config, run="driver", attach=False, within=within)
        if not store.owns_queue:
            raise TrainError(
                "another program's TransferQueue is on this Ray, which can have one; wait for its end, or give "
                "parallel.address another Ray"
            )
        return store


def _open(config: Config, *, run: str, attach: bool, within: float) -> TransferQueueStore:
    return TransferQueueStore(
        run=run,
        storage_units=config.store.storage_units,
        timeout=config.store.timeout,
        start_timeout=within,
        attach=attach,
    )
