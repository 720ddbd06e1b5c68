"""TransferQueue bare and through our adapter, on the same rows: what the guards cost.

`bench_store.py` takes `BACKENDS` from here. Bare TransferQueue is used as it documents: batches of nested tensors with
a tag a row in, a TensorDict out. The adapter's answer is taken apart into rows, and checked.

    .venv/bin/python benchmarks/bench_store_ray.py                     # 360 and 4,000 rows, the two by turns
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Self, cast

import torch

from raggedright.store.protocol import Key, NewRow, NewSession, RowEntry, SessionEntry, SessionKey, Store
from raggedright.store.transfer_queue import TransferQueueStore
from store_rows import FIELDS, ROWS_A_SESSION, session_key, session_rows

_runs = count()


class BareTransferQueue:
    """TransferQueue's own batched calls, with no guard at all; the part of a store that is measured."""

    def __init__(self, rows_a_put: int = ROWS_A_SESSION) -> None:
        self._started = TransferQueueStore(run="bare")  # for a bounded start on loopback
        self._name = f"bare {next(_runs)}"
        self._rows_a_put, self._waiting = rows_a_put, []

    def put(self, session: SessionKey, rows: Sequence[NewRow], *, score: float | None = None) -> None:
        self._waiting += [(session, i, score, row) for i, row in enumerate(rows)]
        if len(self._waiting) >= self._rows_a_put:
            self.flush()

    def put_all(self, sessions: Sequence[NewSession]) -> None:
        for new in sessions:
            self.put(new.key, new.rows, score=new.score)

    def flush(self) -> None:
        import transfer_queue
        from tensordict import NonTensorStack, TensorDict

        if not self._waiting:
            return
        columns: dict[str, Any] = {}
        for name, first in self._waiting[0][3].fields.items():
            values: list[Any] = [row.fields[name] for _, _, _, row in self._waiting]
            if isinstance(first, torch.Tensor):
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                columns[name] = NonTensorStack(*values)
        names = [f"{session.prompt}_{session.session}_{i}" for session, i, _, _ in self._waiting]
        tags = [{"is_padding": row.is_padding, "score": score, **row.tags} for _, _, score, row in self._waiting]
        partition = f"{self._name}/{self._waiting[0][0].round}"
        transfer_queue.kv_batch_put(names, partition, TensorDict(columns, len(names)), tags)
        self._waiting = []

    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> object:
        import transfer_queue

        names = [f"{key.prompt}_{key.session}_{key.trajectory}" for key in keys]
        return transfer_queue.kv_batch_get(names, f"{self._name}/{keys[0].round}", [*fields])

    def list(self, *, round: int) -> Sequence[SessionEntry]:
        import transfer_queue

        self.flush()
        listed = transfer_queue.kv_list(f"{self._name}/{round}")[f"{self._name}/{round}"]
        counts = {"prompt_tokens": 0, "response_tokens": 0, "loss_tokens": 0, "is_padding": False}
        entries = []
        for name, tags in listed.items():
            prompt, session, trajectory = name.rsplit("_", 2)
            key = Key(round, prompt, int(session), 0, int(trajectory))
            row = RowEntry(key=key, tags=tags, field_names=frozenset(FIELDS), **counts)
            entries.append(SessionEntry(key=key.of_session, state="finished", rows=(row,)))
        return entries

    def delete(self, round: int) -> None:
        import transfer_queue

        transfer_queue.get_client().clear_partition(f"{self._name}/{round}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._started.close()


def open_adapter(folder: Path | None = None) -> AbstractContextManager[Store]:
    """A run of its own; the first store of a process starts Ray and TransferQueue, which are in memory."""
    return TransferQueueStore(run=f"bench {next(_runs)}")


def open_bare(folder: Path | None = None) -> AbstractContextManager[Store]:
    return cast(AbstractContextManager[Store], BareTransferQueue())


def open_bare_in_large_batches(folder: Path) -> AbstractContextManager[Store]:
    return cast(AbstractContextManager[Store], BareTransferQueue(rows_a_put=360))


BACKENDS: dict[str, Callable[[Path], AbstractContextManager[Store]]] = {
    "transfer_queue": open_adapter,
    "bare": open_bare,
    "bare-360": open_bare_in_large_batches,
}


def measure(store: Store, sessions: Sequence[Sequence[NewRow]], num_sessions: int) -> tuple[float, float]:
    """Seconds to put all sessions, one by one, and to get all rows, 360 at a time."""
    began = perf_counter()
    for i in range(num_sessions):
        store.put(session_key(i, 0), sessions[i % len(sessions)], score=0.5)
    put = perf_counter()
    keys = [Key(*session_key(i, 0), t) for i in range(num_sessions) for t in range(ROWS_A_SESSION)]
    for i in range(0, len(keys), 360):
        store.get(keys[i : i + 360], FIELDS)
    got = perf_counter()
    store.delete(0)
    return put - began, got - put


def compare_side_by_side() -> Iterator[tuple[int, float, float]]:
    """How many times bare's seconds our put and get take, by the number of rows; medians, by turns on one Ray."""
    sessions = [session_rows(i) for i in range(16)]
    with TransferQueueStore(run="owner"):
        for num_rows, repeats in ((64, 2), (360, 15), (4_000, 5)):  # the first one warms up
            taken: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
            for _ in range(repeats):
                for name, opened in (("ours", open_adapter), ("bare", open_bare)):
                    with opened() as store:
                        taken[name].append(measure(store, sessions, num_rows // ROWS_A_SESSION))
            ours, bare = ([median(each) for each in zip(*taken[name], strict=True)] for name in ("ours", "bare"))
            if num_rows > 64:
                yield num_rows, ours[0] / bare[0], ours[1] / bare[1]


if __name__ == "__main__":
    for num_rows, put, got in compare_side_by_side():
        print(f"{num_rows:,} rows, ours to bare: put {put:.2f} x, get {got:.2f} x the seconds", flush=True)
