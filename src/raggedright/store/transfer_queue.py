"""A store on TransferQueue and Ray, for clusters: many processes and machines, rows in the memory of its storage units.

TransferQueue speaks pickle over unauthenticated sockets: use it in trusted networks only.

TransferQueue carries each row as bytes, an actor of ours (`ray_index.py`) knows which sessions there are. An append
sends its rows first and then becomes visible in one step. A read asks the actor where the rows are, fetches them and
compares their number and their digests. Every call ends within a bounded time.

Note: nothing is on disk. The store ends with the process that started it, or when that process closes it; the others
only disconnect. A dead storage unit, controller or index is a StoreError within seconds, and its contents are lost.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.sessions import RowKey, Session, SessionTable
from raggedright.store.encoding import EncodedSession, decode_row, decode_table, encode_session
from raggedright.store.protocol import Store, StoreError, already_recorded
from raggedright.store.ray_index import IndexedSession
from raggedright.store.ray_start import connect, disconnect

ROWS_PER_CALL = 1024  # of TransferQueue, so that the time of a call does not grow with the round
COLUMN = "row"
_T = TypeVar("_T")


class TransferQueueStore(Store):
    """A run's store; attaches to the TransferQueue at a Ray address, or starts one and owns it unless it may not."""

    def __init__(
        self,
        address: str | None = None,
        *,
        run: str = "run",
        storage_units: int = 2,
        timeout: float = 60.0,
        start_timeout: float = 180.0,
        attach: bool = False,
    ) -> None:
        self._link, self._owns = connect(address, storage_units, start_timeout, attach=attach)
        self._run, self._timeout, self._closed = run, timeout, False

    @property
    def address(self) -> str:
        """Where other processes find it."""
        return self._link.address

    @property
    def owns_queue(self) -> bool:
        """Whether this one started TransferQueue, which ends with it."""
        return self._owns

    def dead(self) -> list[str]:
        """Those of its actors that are dead: some of the rows are lost with them, or all."""
        return self._link.dead()

    def give_up_writes(self) -> None:
        """End the writes of this run that are under way, once their writers are known to be dead."""
        self._clear(self._ask("abort_all"))

    def append(self, sessions: Sequence[Session]) -> None:
        """Record sessions, all of them or none."""
        encoded = [encode_session(self._run, session) for session in sessions]
        keys = [each.key for each in encoded]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise already_recorded(key)
        if not encoded:
            return
        write = self._ask("begin", keys)
        try:
            self._ask("commit", write, self._send(encoded, write))
        except BaseException:
            with suppress(StoreError):
                self._clear(self._ask("abort", write))
            raise

    def sessions(self, round: int, *, every_attempt: bool = False) -> SessionTable:
        """The sessions of a round."""
        return decode_table(self._run, round, self._ask("listing", round, every_attempt))

    def rounds(self) -> dict[int, int]:
        """The rounds that have finished sessions, and how many."""
        counts = {round: int((~self.sessions(round).failed).sum()) for round in self._ask("rounds")}
        return {round: count for round, count in counts.items() if count}

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        """The arrays of these rows."""
        places: list[tuple[str, bytes]] = self._ask("locate", [RowKey(*key) for key in keys])
        by_round: dict[int, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            by_round[key.round].append(i)
        rows: dict[int, dict[str, NDArray]] = {}
        for round, members in by_round.items():
            for part in _parts(members):
                values = self._fetch(round, [keys[i] for i in part], [places[i][0] for i in part])
                for i, value in zip(part, values, strict=True):
                    rows[i] = decode_row(self._run, keys[i], value, places[i][1], fields)
        return [rows[i] for i in range(len(keys))]

    def drop(self, round: int) -> None:
        """Delete a round and those before it; they are hidden even if clearing them fails."""
        self._clear(self._ask("drop", round))

    def close(self) -> None:
        """Disconnect; what was appended stays, unless this one started TransferQueue."""
        if not self._closed and self._owns:
            disconnect(self._link)
        self._closed = True

    def _ask(self, method: str, *args: object) -> Any:
        if self._closed:
            raise StoreError(f"the store of run {self._run} on TransferQueue is closed; open it again")
        return self._link.hear(self._link.ask(self._run, method, *args), self._timeout)

    def _send(self, encoded: Sequence[EncodedSession], write: int) -> list[IndexedSession]:
        """Put the rows of sessions into TransferQueue, and say where they are."""
        import transfer_queue
        from tensordict import NonTensorStack, TensorDict

        indexed, by_round = [], defaultdict(list)
        for key, text, digest, values, digests in encoded:
            prompt = quote(key.prompt, safe="/ :.,+-").replace("_", "%5F")
            names = [f"{prompt}_{key.session}_{i}@{key.round}.{key.attempt}.{write}" for i in range(len(values))]
            by_round[key.round] += zip([key] * len(names), names, values, strict=True)
            indexed.append(IndexedSession(key, text, digest, names, digests))
        for round, rows in by_round.items():
            for part in _parts(rows):
                tensors = [torch.frombuffer(bytearray(value), dtype=torch.uint8) for _, _, value in part]
                fields = TensorDict({COLUMN: NonTensorStack(*tensors)}, len(part))  # pyright: ignore[reportArgumentType]
                tags = [{"is_padding": False} for _ in part]
                call = transfer_queue.async_kv_batch_put([n for _, n, _ in part], self._partition(round), fields, tags)
                self._link.queue(f"{part[0][0]} and {len(part) - 1:,} more rows", call, self._timeout)
        return indexed

    def _fetch(self, round: int, keys: Sequence[RowKey], names: Sequence[str]) -> list[bytes]:
        import transfer_queue

        what = str(keys[0]) if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1:,} more rows"
        call = transfer_queue.async_kv_batch_get([*names], self._partition(round), [COLUMN])
        answer = self._link.queue(what, call, self._timeout)
        joined = answer.get(COLUMN, None)
        tensors = [*joined.unbind()] if isinstance(joined, Tensor) else [*(joined if joined is not None else ())]
        if len(tensors) != len(keys) or not all(isinstance(each, Tensor) for each in tensors):
            raise StoreError(
                f"{what}: {len(keys):,} rows were asked for and TransferQueue returned {len(tensors):,}; it lost or "
                "replaced some: start a new store and resume from the last checkpoint"
            )
        return [each.numpy().tobytes() for each in tensors]

    def _clear(self, rounds: Sequence[int]) -> None:
        import transfer_queue

        for round in rounds:
            call = transfer_queue.get_client().async_clear_partition(self._partition(round))
            self._link.queue(f"round {round}", call, self._timeout)

    def _partition(self, round: int) -> str:
        return f"{self._run}/{round}"


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    yield from (items[i : i + ROWS_PER_CALL] for i in range(0, len(items), ROWS_PER_CALL))
