"""TransferQueue alone and through our store, on the same rows: the cost of the checks.

`bench_store.py` imports `BACKENDS` from here. Bare TransferQueue is used as its documentation says: batches of nested
tensors with one tag per row are put, a TensorDict is returned. What our store returns is split into rows and checked.

    .venv/bin/python benchmarks/bench_store_ray.py                     # 360 and 4,000 rows, the two take turns
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Self, cast

import numpy as np
import torch

from raggedright.sessions import RowKey, Session, SessionKey, SessionTable, Trajectory
from raggedright.store.session_store import Store
from raggedright.store.transfer_queue import TransferQueueStore
from store_rows import ROWS_PER_SESSION, session_of, session_rows

_runs = count()


class BareTransferQueue:
    """TransferQueue's batched calls without any check; only the methods of a store that are measured."""

    def __init__(self, rows_per_put: int = ROWS_PER_SESSION) -> None:
        self._started = TransferQueueStore(run="bare")  # for a bounded start on loopback
        self._name = f"bare {next(_runs)}"
        self._rows_per_put = rows_per_put
        self._waiting: list[tuple[RowKey, Trajectory]] = []

    def append(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self._waiting += [(RowKey(*session.key, i), row) for i, row in enumerate(session.trajectories)]
            if len(self._waiting) >= self._rows_per_put:
                self.flush()

    def flush(self) -> None:
        import transfer_queue
        from tensordict import TensorDict

        if not self._waiting:
            return
        columns: dict[str, Any] = {}
        for name in self._waiting[0][1].fields:
            values = [torch.from_numpy(np.ascontiguousarray(row.fields[name])) for _, row in self._waiting]
            columns[name] = torch.nested.as_nested_tensor([each.flatten() for each in values], layout=torch.jagged)
        tags = [{"is_padding": False, "score": 0.5} for _ in self._waiting]
        partition = f"{self._name}/{self._waiting[0][0].round}"
        names = [_name(key) for key, _ in self._waiting]
        transfer_queue.kv_batch_put(names, partition, TensorDict(columns, len(names)), tags)
        self._waiting = []

    def read(self, keys: Sequence[RowKey]) -> object:
        import transfer_queue

        names = [*session_rows(0)[0].fields]
        return transfer_queue.kv_batch_get([_name(key) for key in keys], f"{self._name}/{keys[0].round}", names)

    def sessions(self, round: int) -> SessionTable:
        """Its listing, as a table that has only the names of rows."""
        import transfer_queue

        self.flush()
        listed = transfer_queue.kv_list(f"{self._name}/{round}")[f"{self._name}/{round}"]
        counts: dict[tuple[str, int], int] = {}
        for name in listed:
            prompt, session, _ = name.rsplit("_", 2)
            counts[prompt, int(session)] = counts.get((prompt, int(session)), 0) + 1
        one = session_rows(0)[0]
        return SessionTable.of(
            round,
            [
                Session(key=SessionKey(round, *pair), score=0.5, trajectories=[one] * count)
                for pair, count in counts.items()
            ],
        )

    def drop(self, round: int) -> None:
        import transfer_queue

        transfer_queue.get_client().clear_partition(f"{self._name}/{round}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._started.close()


def _name(key: RowKey) -> str:
    return f"{key.prompt}_{key.session}_{key.trajectory}"


def open_adapter(folder: Path | None = None) -> AbstractContextManager[Store]:
    """A store with a new run id; the first store of a process starts Ray and TransferQueue, which are in memory."""
    return TransferQueueStore(run=f"bench {next(_runs)}")


def open_bare(folder: Path | None = None) -> AbstractContextManager[Store]:
    return cast(AbstractContextManager[Store], BareTransferQueue())


def open_bare_in_large_batches(folder: Path) -> AbstractContextManager[Store]:
    return cast(AbstractContextManager[Store], BareTransferQueue(rows_per_put=360))


BACKENDS: dict[str, Callable[[Path], AbstractContextManager[Store]]] = {
    "transfer_queue": open_adapter,
    "bare": open_bare,
    "bare-360": open_bare_in_large_batches,
}


def measure(store: Store, sessions: Sequence[list[Trajectory]], num_sessions: int) -> tuple[float, float]:
    """Seconds to append all sessions, one by one, and to read all rows, 360 at a time."""
    began = perf_counter()
    for i in range(num_sessions):
        store.append([session_of(sessions[i % len(sessions)], i, 0)])
    put = perf_counter()
    keys = [RowKey(*session_of([], i, 0).key, t) for i in range(num_sessions) for t in range(ROWS_PER_SESSION)]
    for i in range(0, len(keys), 360):
        store.read(keys[i : i + 360])
    got = perf_counter()
    store.drop(0)
    return put - began, got - put


def compare_side_by_side() -> Iterator[tuple[int, float, float]]:
    """The ratio of our seconds to those of bare TransferQueue, by number of rows; medians of alternating runs."""
    sessions = [session_rows(i) for i in range(16)]
    with TransferQueueStore(run="owner"):
        for num_rows, repeats in ((64, 2), (360, 15), (4_000, 5)):  # the first is a warm-up
            taken: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
            for _ in range(repeats):
                for name, opened in (("ours", open_adapter), ("bare", open_bare)):
                    with opened() as store:
                        taken[name].append(measure(store, sessions, num_rows // ROWS_PER_SESSION))
            ours, bare = ([median(each) for each in zip(*taken[name], strict=True)] for name in ("ours", "bare"))
            if num_rows > 64:
                yield num_rows, ours[0] / bare[0], ours[1] / bare[1]


if __name__ == "__main__":
    for num_rows, put, got in compare_side_by_side():
        print(f"{num_rows:,} rows, ours to bare: put {put:.2f} x, get {got:.2f} x the seconds", flush=True)
