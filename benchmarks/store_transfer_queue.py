"""TransferQueue bare and through our adapter, on the same rows: what the guards cost.

Both put a session's rows in one call and get all rows in one. Bare TransferQueue is used as its documentation does: a
batch of nested tensors with a tag a row in, a TensorDict out; the adapter's answer is taken apart into rows and checked.
`BACKENDS` is what `bench_store.py` takes from here.

    .venv/bin/python benchmarks/store_transfer_queue.py                # 360 and 4,000 rows; about a minute and a half
"""

from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from time import perf_counter
from typing import Protocol

import torch
from rich.console import Console

from raggedright.store.protocol import Key, NewRow, SessionKey
from raggedright.store.transfer_queue import TransferQueueStore

ROWS_A_SESSION = 8
TOKENS = 2_000  # of a row, on average: 57 KB
FIELDS = ("input_ids", "position_ids", "response_mask", "rollout_log_probs", "old_log_probs", "advantages")
_runs = count()


class Queue(Protocol):
    """The part of a store that is measured."""

    def put(self, session: SessionKey, rows: Sequence[NewRow]) -> None: ...
    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> object: ...
    def delete(self, round: int) -> None: ...
    def close(self) -> None: ...


class BareTransferQueue:
    """TransferQueue's own batched calls, with no guard at all."""

    def __init__(self) -> None:
        self._started = TransferQueueStore(run="bare")  # for a bounded, loopback start
        self._partition = f"bare {next(_runs)}"

    def put(self, session: SessionKey, rows: Sequence[NewRow]) -> None:
        import transfer_queue
        from tensordict import TensorDict

        columns = {}
        for name in rows[0].fields:
            tensors = [row.fields[name] for row in rows]
            columns[name] = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)  # type: ignore[arg-type]
        names = [f"{session.prompt}_{session.session}_{i}" for i in range(len(rows))]
        tags = [{"is_padding": row.is_padding} for row in rows]
        transfer_queue.kv_batch_put(names, self._partition, TensorDict(columns, batch_size=len(rows)), tags)

    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> object:
        import transfer_queue

        names = [f"{key.prompt}_{key.session}_{key.trajectory}" for key in keys]
        return transfer_queue.kv_batch_get(names, self._partition, [*fields])

    def delete(self, round: int) -> None:
        import transfer_queue

        transfer_queue.get_client().clear_partition(self._partition)

    def close(self) -> None:
        self._started.close()


def open_adapter() -> TransferQueueStore:
    """A store of a run of its own; the first one in a process starts Ray and TransferQueue."""
    return TransferQueueStore(run=f"bench {next(_runs)}")


BACKENDS: dict[str, Callable[[], Queue]] = {
    "transfer_queue": open_adapter,
    "bare TransferQueue": BareTransferQueue,
}


def make_rows(num_rows: int) -> list[NewRow]:
    """Rows of ~57 KB, their lengths spread evenly over 0.5 to 1.5 of the mean."""
    lengths = torch.linspace(0.5 * TOKENS, 1.5 * TOKENS, num_rows).long()[torch.randperm(num_rows)].tolist()
    return [_row(length) for length in lengths]


def _row(length: int) -> NewRow:
    numbers = torch.arange(length)
    fields = {name: torch.rand(length) for name in ("rollout_log_probs", "old_log_probs", "advantages")}
    fields |= {"input_ids": numbers, "position_ids": numbers, "response_mask": torch.ones(length, dtype=torch.bool)}
    return NewRow(prompt_tokens=0, response_tokens=length, loss_tokens=length, fields=fields)


def measure(queue: Queue, rows: Sequence[NewRow], round: int) -> tuple[float, float]:
    """Seconds to put all rows, session by session, and to get them all."""
    sessions = [rows[i : i + ROWS_A_SESSION] for i in range(0, len(rows), ROWS_A_SESSION)]
    began = perf_counter()
    for i, session in enumerate(sessions):
        queue.put(SessionKey(round, "p", i), session)
    put = perf_counter()
    queue.get([Key(round, "p", i, 0, t) for i, session in enumerate(sessions) for t in range(len(session))], FIELDS)
    got = perf_counter()
    queue.delete(round)
    return put - began, got - put


def main() -> None:
    console = Console()
    with TransferQueueStore(run="owner"):
        for num_rows, repeats in ((64, 1), (360, 7), (4_000, 3)):  # the first one warms up
            rows = make_rows(num_rows)
            size = sum(t.nbytes for t in rows[num_rows // 2].fields.values())  # type: ignore[attr-defined]
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in BACKENDS}
            for _ in range(repeats):  # alternating, for the machine is noisy
                for name, opened in BACKENDS.items():
                    taken[name].append(measure(opened(), rows, 0))
            seconds = {name: [median(each) for each in zip(*pairs, strict=True)] for name, pairs in taken.items()}
            console.print(
                f"{num_rows:,} rows of about {size / 1e3:.0f} KB, {ROWS_A_SESSION} a put; median of {repeats}"
            )
            for name, (put, got) in seconds.items():
                console.print(f"  {name:20} put {num_rows / put:7,.0f} rows/s   get {num_rows / got:7,.0f} rows/s")
            (put, got), (bare_put, bare_got) = seconds.values()
            console.print(f"  adapter / bare       put {put / bare_put:.2f} x           get {got / bare_got:.2f} x")


if __name__ == "__main__":
    main()
