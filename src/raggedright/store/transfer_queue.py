"""A store on TransferQueue and Ray, for clusters: many processes and machines, tensors in the memory of its units.

TransferQueue speaks pickle over unauthenticated sockets: trusted networks only.

TransferQueue carries the values, an actor of ours (`ray_sessions.py`) says which sessions there are. A put sends its
rows first and then becomes visible in one step; a get asks where the rows are, fetches them, compares what came back
with what was asked for, and asks whether their round is still there. Every call ends in a bounded time.

For others who read the same TransferQueue: a round is the partition `{run}/{round}`, a row the key
`{uid}_{session}_{trajectory}@{round}.{attempt}.{write}` (% and _ of the uid are escaped as in a URL). Tensors are
tensors, in a column with the field's name; where a round has the field in a second dtype or rank, or again after an
update, the column has another one. Any other value is bytes, or a uint8 tensor (see `encoding.py`). The row's tag has
`is_padding` and two JSON texts: `columns` (by field) and `row` (counts, the number of `rows` of its session, `tags`).

The surprise: nothing is on disk. The store ends with the process that started it, or when that one closes it; the
others only let go. A dead storage unit, controller or sessions' actor is a StoreError in seconds and takes what it had.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import islice
from typing import Any, TypeVar

from raggedright.store.checks import check_can_become, check_put
from raggedright.store.listing import About
from raggedright.store.protocol import (
    Fields,
    Key,
    NewSession,
    SessionEntry,
    SessionKey,
    State,
    Store,
    StoreError,
)
from raggedright.store.ray_columns import (
    Cell,
    columns_json,
    in_columns,
    join,
    row_name,
    share_columns,
    split,
    tag,
    to_cells,
)
from raggedright.store.ray_round import Column, RowColumns
from raggedright.store.ray_start import connect, disconnect

__all__ = ["TransferQueueStore"]

ROWS_A_CALL = 1024  # of TransferQueue, so that a call's time does not grow with the round
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
        """Those of its actors that are dead: with one of them a part of the rows is lost, or all."""
        return self._link.dead()

    def give_up_writes(self) -> None:
        """Give up the writes of this run that are under way, once their writers are known to be dead."""
        self._clear(self._ask("give_up_writes"))

    def put_all(self, sessions: Sequence[NewSession]) -> None:
        """Record several sessions, sent as one: all of them, or those that have rows not at all."""
        states: dict[SessionKey, State] = {}
        for new in sessions:
            check_put(new)
            check_can_become(new.key, states.get(new.key), new.state)
            states[new.key] = new.state
        if sessions:
            self._put([new._replace(key=SessionKey(*new.key)) for new in sessions])

    def list(
        self,
        *,
        round: int | None = None,
        prompt: str | None = None,
        session: int | None = None,
        state: State | None = None,
    ) -> Sequence[SessionEntry]:
        """Sessions that match, in the order of their keys."""
        return self._ask("listing", round, prompt, session, state)

    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> Sequence[dict[str, object]]:
        """These fields of these rows, in the order asked for."""
        wanted = [*dict.fromkeys(Key(*key) for key in keys)]
        writes, numbers, lists = self._ask("locate", [tuple(key) for key in wanted], fields)
        groups: dict[tuple[int, int], list[tuple[Key, int]]] = defaultdict(list)
        for key, write, number in zip(wanted, writes, numbers, strict=True):
            groups[key.round, number].append((key, write))
        answers = []
        for (round, number), rows in groups.items() if fields else ():
            answers += [(part, lists[number], self._fetch(round, part, lists[number])) for part in _parts(rows)]
        asked = self._send("check_rounds", {key.round for key in wanted})
        values: dict[Key, dict[str, object]] = {}
        for part, columns, answer in answers:  # meanwhile
            found = [key for key, _ in part]
            values.update(zip(found, split(_several(found), found, fields, columns, answer), strict=True))
        self._link.hear(asked, self._timeout)
        if len(wanted) == len(keys):
            return [values.get(key, {}) for key in wanted]
        seen: set[Key] = set()
        return [deepcopy(values.get(k, {})) if k in seen or seen.add(k) else values.get(k, {}) for k in keys]

    def update(self, values: Mapping[Key, Fields]) -> None:
        """Add fields to rows that are there, all of them or none."""
        values = {Key(*key): fields for key, fields in values.items()}
        cells = [to_cells(key, fields) for key, fields in values.items()]
        shared: dict[tuple, RowColumns] = {}
        new = {key: share_columns(shared, c) for key, c in zip(values, cells, strict=True)}
        write, placed = self._ask("update", new, self._lease(len(new), len(shared) * len({key.round for key in new})))
        rows = [(key, made_by) for key, (made_by, _, _) in zip(values, placed, strict=True)]
        tags = [{"columns": text} for text in columns_json([whole for _, _, whole in placed])]
        self._write([write], rows, cells, [new for _, new, _ in placed], tags)

    def delete(self, round: int) -> None:
        """Forget all sessions of a round and of those before it; they are out of sight even if clearing fails."""
        self._clear(self._ask("delete", round))

    def wait(self, round: int, sessions: Collection[tuple[str, int]], *, timeout: float) -> Sequence[SessionEntry]:
        """The last attempt of each of these (prompt, session) pairs, once all are finished or failed."""
        wanted = sorted({(prompt, session) for prompt, session in sessions})
        return self._ask("wait", round, wanted, timeout, within=timeout + self._timeout)

    def close(self) -> None:
        """Let go of the store; what was put stays, unless this one started it."""
        if not self._closed and self._owns:
            disconnect(self._link)
        self._closed = True

    def _send(self, method: str, *args: object) -> Any:
        if self._closed:
            raise StoreError(f"the store of run {self._run} on TransferQueue is closed; open it again")
        return self._link.ask(self._run, method, *args)

    def _ask(self, method: str, *args: object, within: float = 0.0) -> Any:
        return self._link.hear(self._send(method, *args), within or self._timeout)

    def _put(self, sessions: Sequence[NewSession]) -> None:
        """Begin all, send their rows, make all visible."""
        rows = [row for each in sessions for row in each.rows]
        keys = [Key(*each.key, i) for each in sessions for i in range(len(each.rows))]
        cells = [to_cells(key, row.fields) for key, row in zip(keys, rows, strict=True)]
        shared: dict[tuple, RowColumns] = {}
        columns_of_rows, begun, row_tags = iter([share_columns(shared, each) for each in cells]), [], []
        for each in sessions:
            said = About.of_new(each.rows)
            row_tags += said.tags
            begun.append(
                (each.key, each.state, each.cause, each.score, said, [*islice(columns_of_rows, len(each.rows))])
            )
        num_rounds = len({each.key.round for each in sessions})
        asked = self._send("puts", begun, self._lease(len(rows), len(shared) * num_rounds))
        at_once = len(shared) == num_rounds == 1 and len(rows) <= ROWS_A_CALL
        joined = join(cells) if at_once else None  # meanwhile
        answers: list[tuple[int, list[RowColumns]]] = self._link.hear(asked, self._timeout)
        if rows:
            placed = [each for _, columns in answers for each in columns]
            counts = [len(each.rows) for each in sessions for _ in each.rows]
            all_of = zip(rows, row_tags, counts, columns_json(placed), strict=True)
            tags = [tag(row, own, num_rows, columns) for row, own, num_rows, columns in all_of]
            made_by = [write for write, columns in answers for _ in columns]
            writes = [write for write, columns in answers if columns]
            self._write(writes, [*zip(keys, made_by, strict=True)], cells, placed, tags, joined)

    def _lease(self, num_rows: int, num_groups: int) -> float:
        """Longer than a write can take: its calls, and the two to the sessions' actor."""
        return self._timeout * (num_rows // ROWS_A_CALL + num_groups + 4)

    def _write(
        self,
        writes: Sequence[int],
        rows: Sequence[tuple[Key, int]],
        cells: Sequence[Mapping[str, Cell]],
        columns_of_rows: Sequence[RowColumns],
        tags: Sequence[Mapping[str, object]],
        joined: Mapping[str, object] | None = None,
    ) -> None:
        """Send the rows, those with the same columns together, and commit."""
        import transfer_queue

        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, ((key, _), row_columns) in enumerate(zip(rows, columns_of_rows, strict=True)):
            groups[key.round, id(row_columns)].append(i)
        with self._giving_up(writes, ended=False):  # what was cut short may still arrive
            for (round, _), members in groups.items():
                for part in _parts(members):
                    values = joined if joined is not None else join([cells[i] for i in part])
                    fields = in_columns(values, columns_of_rows[part[0]], len(part))
                    names = [row_name(*rows[i]) for i in part]
                    partition, new_tags = self._partition(round), [dict(tags[i]) for i in part]
                    call = transfer_queue.async_kv_batch_put(names, partition, fields, new_tags)
                    self._link.queue(_several([rows[i][0] for i in part]), call, self._timeout)
        with self._giving_up(writes, ended=True):
            self._ask("commits", writes)

    @contextmanager
    def _giving_up(self, writes: Sequence[int], *, ended: bool) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with suppress(StoreError):
                self._clear(self._ask("abort", writes, ended))
            raise

    def _fetch(self, round: int, rows: Sequence[tuple[Key, int]], columns: Sequence[Column]) -> Any:
        import transfer_queue

        wanted = [*dict.fromkeys(column.name for column in columns)]
        call = transfer_queue.async_kv_batch_get([row_name(*row) for row in rows], self._partition(round), wanted)
        return self._link.queue(_several([key for key, _ in rows]), call, self._timeout)

    def _clear(self, rounds: Sequence[int]) -> None:
        import transfer_queue

        for round in rounds:
            call = transfer_queue.get_client().async_clear_partition(self._partition(round))
            self._link.queue(f"round {round}", call, self._timeout)

    def _partition(self, round: int) -> str:
        return f"{self._run}/{round}"


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    yield from (items[i : i + ROWS_A_CALL] for i in range(0, len(items), ROWS_A_CALL))


def _several(keys: Sequence[Key]) -> str:
    return str(keys[0]) if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1:,} more rows"
