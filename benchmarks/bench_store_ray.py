# pyright: reportMissingImports=false
"""TransferQueue bare and through our adapter, on the same rows: what the guards cost.

`bench_store.py` takes `BACKENDS` from here. Bare TransferQueue is used as it documents: batches of nested tensors with
a tag a row in, a TensorDict out. The adapter's answer is taken apart into rows, and checked.

    .venv/bin/python benchmarks/bench_store_ray.py                     # 360 and 4,000 rows, the two side by side
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Self, cast

import torch
from rich.console import Console

from raggedright.store.protocol import Key, NewRow, RowEntry, SessionEntry, SessionKey, Store
from raggedright.store.transfer_queue import TransferQueueStore
from store_rows import FIELDS, ROWS_A_SESSION, row_bytes, session_key, session_rows

_runs = count()


class BareTransferQueue:
    """TransferQueue's own batched calls, with no guard at all; the part of a store that is measured."""

    def __init__(self) -> None:
        self._started = TransferQueueStore(run="bare")  # for a bounded start on loopback
        self._name = f"bare {next(_runs)}"

    def put(self, session: SessionKey, rows: Sequence[NewRow], *, score: float | None = None) -> None:
        import transfer_queue
        from tensordict import NonTensorStack, TensorDict

        columns: dict[str, Any] = {}
        for name, first in rows[0].fields.items():
            values: list[Any] = [row.fields[name] for row in rows]
            columns[name] = NonTensorStack(*values)
            if isinstance(first, torch.Tensor):
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        names = [f"{session.prompt}_{session.session}_{i}" for i in range(len(rows))]
        tags = [{"is_padding": row.is_padding, "score": score, **row.tags} for row in rows]
        transfer_queue.kv_batch_put(names, f"{self._name}/{session.round}", TensorDict(columns, len(rows)), tags)

    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> object:
        import transfer_queue

        names = [f"{key.prompt}_{key.session}_{key.trajectory}" for key in keys]
        return transfer_queue.kv_batch_get(names, f"{self._name}/{keys[0].round}", [*fields])

    def list(self, *, round: int) -> Sequence[SessionEntry]:
        import transfer_queue

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


BACKENDS = {"transfer_queue": open_adapter, "bare": open_bare}


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


def main() -> None:
    console, sessions = Console(), [session_rows(i) for i in range(16)]
    with TransferQueueStore(run="owner"):
        for num_rows, repeats in ((64, 1), (360, 7), (4_000, 3)):  # the first one warms up
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in BACKENDS}
            for _ in range(repeats):  # alternating, for machines are noisy
                for name, opened in BACKENDS.items():
                    with opened() as store:
                        taken[name].append(measure(store, sessions, num_rows // ROWS_A_SESSION))
            seconds = {name: [median(each) for each in zip(*pairs, strict=True)] for name, pairs in taken.items()}
            size = row_bytes(sessions[0]) / ROWS_A_SESSION / 1e3
            console.print(f"{num_rows:,} rows of {size:.0f} KB, {ROWS_A_SESSION} a put, 360 a get; median of {repeats}")
            for name, (put, got) in seconds.items():
                console.print(f"  {name:16} put {num_rows / put:7,.0f} rows/s   get {num_rows / got:7,.0f} rows/s")
            (put, got), (bare_put, bare_got) = seconds["transfer_queue"], seconds["bare"]
            console.print(f"  adapter / bare   put {put / bare_put:7.2f} x        get {got / bare_got:7.2f} x")


if __name__ == "__main__":
    main()
