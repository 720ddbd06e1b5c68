"""A store on TransferQueue and Ray, for clusters: many processes and machines, rows in the memory of its storage units.

TransferQueue uses pickle over unauthenticated sockets: use it in trusted networks only.

TransferQueue carries each row as bytes and guarantees little about them; an actor of ours knows which sessions exist
and where their rows are. A writer begins a write there, sends its rows to TransferQueue and then commits: only the
commit makes sessions visible, all of a write at once. A read asks the actor where the rows are, fetches them and checks
their number and digests. Every call ends within a bounded time.

A round is cleared from TransferQueue only when no write to it is in progress, because TransferQueue gives the place of
a cleared row to the next one, and a late put would overwrite that.

Note: nothing is on disk. The store ends with the process that started it, or when that process closes it; the others
only disconnect. A dead storage unit, controller or sessions actor is a StoreError within seconds, and its contents are
lost.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar
from urllib.parse import quote

from numpy.typing import NDArray

from raggedright.sessions import RowKey, Session, SessionKey, SessionTable
from raggedright.store.encoding import EncodedSession, decode_row, decode_table, encode_session
from raggedright.store.memory import SessionIndex
from raggedright.store.ray_queue import connect, disconnect
from raggedright.store.session_store import Store, StoreError

ROWS_PER_CALL = 1024  # of TransferQueue, so that the time of a call does not grow with the round
COLUMN = "row"
_T = TypeVar("_T")


class TransferQueueStore(Store):
    """Attaches to the TransferQueue at a Ray address, or starts one and owns it, unless `attach` is set."""

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
        self._link, self._owns = connect(SessionsActor, address, storage_units, start_timeout, attach=attach)
        self._run, self._timeout, self._closed = run, timeout, False

    @property
    def address(self) -> str:
        """The Ray address for other processes."""
        return self._link.address

    @property
    def owns_queue(self) -> bool:
        """Whether this store started TransferQueue, which ends with it."""
        return self._owns

    def dead(self) -> list[str]:
        """The names of its dead actors: some or all rows are lost with them."""
        return self._link.dead_actors()

    def give_up_writes(self) -> None:
        """Abort the writes of this run that are in progress, once their writers are known to be dead."""
        self._clear(self._ask("abort_all"))

    def append(self, sessions: Sequence[Session]) -> None:
        """Record sessions, all of them or none."""
        encoded = [encode_session(self._run, session) for session in sessions]
        if not encoded:
            return
        write = self._ask("begin", [session.key for session in encoded])
        try:
            self._ask("commit", write, self._send(encoded, write))
        except BaseException:
            with suppress(StoreError):
                self._clear(self._ask("abort", write))
            raise

    def sessions(self, round: int, *, every_attempt: bool = False) -> SessionTable:
        """The sessions of a round."""
        return decode_table(self._run, round, self._ask("lines", round), every_attempt=every_attempt)

    def rounds(self) -> dict[int, int]:
        """The number of finished sessions of each round that has any."""
        return self._ask("rounds")

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        """The arrays of these rows."""
        names_and_digests: list[tuple[str, bytes]] = self._ask("find", [RowKey(*key) for key in keys])
        positions_by_round: dict[int, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            positions_by_round[key.round].append(i)
        rows: dict[int, dict[str, NDArray]] = {}
        for round, positions in positions_by_round.items():
            for part in _parts(positions):
                values = self._fetch(round, [keys[i] for i in part], [names_and_digests[i][0] for i in part])
                for i, value in zip(part, values, strict=True):
                    rows[i] = decode_row(self._run, keys[i], value, names_and_digests[i][1], fields)
        return [rows[i] for i in range(len(keys))]

    def drop(self, round: int) -> None:
        """Delete a round and those before it; they are hidden even if clearing them fails."""
        self._clear(self._ask("drop", round))

    def close(self) -> None:
        """Disconnect; what was appended stays, unless this store started TransferQueue."""
        if not self._closed and self._owns:
            disconnect(self._link)
        self._closed = True

    def _ask(self, method: str, *args: object) -> Any:
        if self._closed:
            raise StoreError(f"the store of run {self._run} on TransferQueue is closed; open it again")
        return self._link.call_actor(self._run, method, *args, timeout=self._timeout)

    def _send(self, encoded: Sequence[EncodedSession[bytes]], write: int) -> list[EncodedSession[str]]:
        """Put the rows of sessions into TransferQueue; returns the sessions with the names of their rows there."""
        import torch
        import transfer_queue
        from tensordict import NonTensorStack, TensorDict

        named, rows_by_round = [], defaultdict(list)
        for key, text, digest, rows, row_digests in encoded:
            prompt = quote(key.prompt, safe="/ :.,+-").replace("_", "%5F")
            names = [f"{prompt}_{key.session}_{i}@{key.round}.{key.attempt}.{write}" for i in range(len(rows))]
            rows_by_round[key.round] += zip([key] * len(names), names, rows, strict=True)
            named.append(EncodedSession(key, text, digest, names, row_digests))
        for round, rows in rows_by_round.items():
            for part in _parts(rows):
                tensors = [torch.frombuffer(bytearray(value), dtype=torch.uint8) for _, _, value in part]
                fields = TensorDict({COLUMN: NonTensorStack(*tensors)}, len(part))  # pyright: ignore[reportArgumentType]
                tags = [{"is_padding": False} for _ in part]
                call = transfer_queue.async_kv_batch_put([n for _, n, _ in part], self._partition(round), fields, tags)
                self._link.call_queue(f"{part[0][0]} and {len(part) - 1:,} more rows", call, self._timeout)
        return named

    def _fetch(self, round: int, keys: Sequence[RowKey], names: Sequence[str]) -> list[bytes]:
        import transfer_queue
        from torch import Tensor

        subject = str(keys[0]) if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1:,} more rows"
        call = transfer_queue.async_kv_batch_get([*names], self._partition(round), [COLUMN])
        column = self._link.call_queue(subject, call, self._timeout).get(COLUMN, None)
        tensors = [*column.unbind()] if isinstance(column, Tensor) else [*(column if column is not None else ())]
        if len(tensors) != len(keys) or not all(isinstance(each, Tensor) for each in tensors):
            raise StoreError(
                f"{subject}: {len(keys):,} rows were requested and TransferQueue returned {len(tensors):,}; it lost or "
                "replaced some: start a new store and resume from the last checkpoint"
            )
        return [each.numpy().tobytes() for each in tensors]

    def _clear(self, rounds: Sequence[int]) -> None:
        import transfer_queue

        for round in rounds:
            call = transfer_queue.get_client().async_clear_partition(self._partition(round))
            self._link.call_queue(f"round {round}", call, self._timeout)

    def _partition(self, round: int) -> str:
        return f"{self._run}/{round}"


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    yield from (items[i : i + ROWS_PER_CALL] for i in range(0, len(items), ROWS_PER_CALL))


class RunIndex(SessionIndex[str]):
    """The sessions of one run, with the names of their rows in TransferQueue, and the writes in progress.

    Methods that return rounds name those that the caller must clear from TransferQueue.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rounds_of_write: dict[int, frozenset[int]] = {}
        self._to_clear: set[int] = set()
        self._numbers = count()

    def begin(self, keys: Sequence[SessionKey]) -> int:
        """The number of a new write; refused if one of its sessions cannot be recorded."""
        self.check_new(keys)
        number = next(self._numbers)
        self._rounds_of_write[number] = frozenset(key.round for key in keys)
        return number

    def commit(self, write: int, sessions: Sequence[EncodedSession[str]]) -> None:
        """Make the sessions of a write visible."""
        self.add(sessions)
        self._rounds_of_write.pop(write, None)

    def abort(self, write: int) -> list[int]:
        """End a write without its sessions."""
        self._rounds_of_write.pop(write, None)
        return self._release()

    def abort_all(self) -> list[int]:
        """End all writes."""
        self._rounds_of_write.clear()
        return self._release()

    def drop(self, round: int) -> list[int]:
        """Delete a round and those before it."""
        self._to_clear.update(super().drop(round))
        return self._release()

    def _release(self) -> list[int]:
        busy = {round for rounds in self._rounds_of_write.values() for round in rounds}
        ready, self._to_clear = self._to_clear - busy, self._to_clear & busy
        return sorted(ready)


class SessionsActor:
    """The Ray actor: one RunIndex per run. The process that made it starts TransferQueue; the others wait for that."""

    def __init__(self) -> None:
        self._runs: dict[str, RunIndex] = defaultdict(RunIndex)
        self._started = asyncio.Event()

    async def call(self, run: str, method: str, *args: object) -> object:
        """Call a method of a run's index."""
        return getattr(self._runs[run], method)(*args)

    async def set_started(self) -> None:
        """Report that TransferQueue has started."""
        self._started.set()

    async def wait_started(self) -> None:
        """Return once TransferQueue has started."""
        await self._started.wait()
