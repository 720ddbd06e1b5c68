"""What a SQLite store is asked: keys to rows, rows to fields.

Each works inside a transaction that the caller has begun. Keys are looked up many a statement.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from sqlite3 import Connection
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from raggedright.ragged import Ragged
from raggedright.store.blocks import Block, decode_block
from raggedright.store.checks import MOST_ROWS, field_missing, row_missing
from raggedright.store.encoding import decode_field, type_name
from raggedright.store.protocol import Key, StoreError
from raggedright.store.row_encoding import decode_row

_T = TypeVar("_T")
KEYS_A_STATEMENT = 64

# Many keys a statement; CROSS has the keys, numbered, in the outer loop.
_FIND = """WITH k (i, round, prompt, session, attempt) AS (VALUES {})
  SELECT k.i, s.id, s.state, s.num_rows, s.apart, s.block, s.first
  FROM k CROSS JOIN sessions s USING (round, prompt, session, attempt)"""


class FoundSession(NamedTuple):
    """A session as the file has it, without what a listing says."""

    id: int
    state: str
    num_rows: int
    apart: bool
    block: int | None
    first: int | None


class Found(NamedTuple):
    """A row as the file has it: its place in a block, or a value of its own."""

    row_id: int
    apart: bool
    block: int | None
    place: int


def watermark_of(connection: Connection) -> int:
    """The last round that was deleted."""
    found = connection.execute("SELECT value FROM meta WHERE name = 'deleted_round'").fetchone()
    if found is None:
        raise StoreError("table meta has no deleted_round; the file was altered: use another one")
    return found[0]


def find_sessions(connection: Connection, keys: Sequence[tuple]) -> dict[tuple, FoundSession]:
    """Those of these sessions that are there."""
    known: dict[tuple, FoundSession] = {}
    for part in parts(keys):
        values = [value for i, key in enumerate(part) for value in (i, *key)]
        for i, *found in connection.execute(_FIND.format(_places(len(part), 5)), values):
            known[part[i]] = FoundSession(*found)
    return known


def find_rows(connection: Connection, keys: Sequence[Key]) -> list[Found]:
    """Where rows are, in the order of the keys; all of them are there."""
    watermark = watermark_of(connection)
    sessions = find_sessions(connection, [*dict.fromkeys([key[:4] for key in keys])])
    rows: list[Found] = []
    for key in keys:
        session, trajectory = sessions.get(key[:4]), key[4]
        if session is None or key[0] <= watermark or not 0 <= trajectory < session.num_rows:
            raise row_missing(Key(*key), session.state if session else None, watermark)
        session_id, _, _, apart, block, first = session
        rows.append(Found(session_id * MOST_ROWS + trajectory, apart, block, (first or 0) + trajectory))
    return rows


class Values:
    """The values of rows that were found; the blocks of the last ones are kept, for neighbours share one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._blocks: dict[int, Block] = {}

    def blocks(self, rows: Sequence[Found]) -> dict[int, Block]:
        """The blocks that these rows are in."""
        read = "SELECT value FROM blocks WHERE id = ?"
        numbers = dict.fromkeys([row.block for row in rows if row.block is not None])
        known, self._blocks = self._blocks, {}
        for number in numbers:
            if number not in known:
                found = self._connection.execute(read, (number,)).fetchone()
                known[number] = decode_block(number, found[0] if found else None)
            self._blocks[number] = known[number]
        return self._blocks

    def of(self, keys: Sequence[Key], rows: Sequence[Found]) -> list[Mapping[str, object]]:
        """The fields of rows, but for those that stand apart."""
        blocks = self.blocks(rows)
        alone = [row.row_id for row in rows if row.block is None]
        read = f"SELECT row_id, value FROM row_values WHERE row_id IN ({','.join('?' * len(alone))})"
        values = dict(self._connection.execute(read, alone).fetchall()) if alone else {}
        found: list[Mapping[str, object]] = []
        for key, row in zip(keys, rows, strict=True):
            if row.block is None:
                found.append(decode_row(key, values.get(row.row_id)))
            elif row.place < blocks[row.block].num_rows:
                found.append(blocks[row.block].row(row.place))
            else:
                raise StoreError(f"{key}: block {row.block} has no such row; the file was altered")
        return found


def join_blocks(
    keys: Sequence[Key], rows: Sequence[Found], blocks: Mapping[int, Block], names: Sequence[str]
) -> dict[str, Ragged]:
    """These fields of rows that are all in blocks, joined field by field."""
    counts = np.array([block.num_rows for block in blocks.values()])
    which = {number: i for i, number in enumerate(blocks)}
    block = np.array([which[row.block] for row in rows if row.block is not None])
    place = np.array([row.place for row in rows])
    if (wrong := np.flatnonzero(place >= counts[block])).size:
        raise StoreError(f"{keys[wrong[0]]}: its block has no such row; the file was altered")
    at = (np.cumsum(counts) - counts)[block] + place
    joined = {}
    for name in names:
        for i, each in enumerate(blocks.values()):
            if name not in each.vectors:
                raise field_missing(keys[int((block == i).argmax())], name)
        sizes = np.concatenate([each.sizes[name] for each in blocks.values()])
        vectors = [each.vectors[name] for each in blocks.values()]
        if len({vector.dtype for vector in vectors}) > 1:
            raise StoreError(f"{keys[0]}: field {name} is not of one dtype in all rows; ask for one round at a time")
        joined[name] = Ragged.of(torch.cat(vectors), sizes).rows(at)
    return joined


def read_apart(connection: Connection, row_ids: Sequence[int], names: Sequence[str]) -> dict[tuple[int, str], bytes]:
    """What these rows have of these fields beside their one value."""
    wanted = f"SELECT name, value FROM fields WHERE row_id = ? AND name IN ({','.join('?' * len(names))})"
    return {(row_id, name): value for row_id in row_ids for name, value in connection.execute(wanted, (row_id, *names))}


def fields_of(
    key: Key, row: Found, whole: Mapping[str, object], names: Sequence[str], apart: Mapping[tuple[int, str], bytes]
) -> dict[str, object]:
    """A row's fields; what stands apart is newer than what its value has."""
    if not row.apart and all(name in whole for name in names):
        return {name: whole[name] for name in names}
    answer = {}
    for name in names:
        if (value := apart.get((row.row_id, name))) is not None:
            answer[name] = decode_field(key, name, value)
        elif name in whole:
            answer[name] = whole[name]
        else:
            raise field_missing(key, name)
    return answer


def field_types(connection: Connection, row: Found, whole: Mapping[str, object]) -> dict[str, str]:
    """The type of each field that a row has."""
    apart = connection.execute("SELECT name, type FROM fields WHERE row_id = ?", (row.row_id,)).fetchall()
    return {**{name: type_name(value) for name, value in whole.items()}, **dict(apart)}


def list_fields(connection: Connection, row_id: int, names: Collection[str]) -> None:
    """Have a row listed with these fields, some of which stand apart."""
    session_id, trajectory = divmod(row_id, MOST_ROWS)
    of_session = "SELECT rows, fields FROM sessions WHERE id = ?"
    rows, lists = map(json.loads, connection.execute(of_session, (session_id,)).fetchone())
    wanted = sorted(names)
    if wanted not in lists:
        lists.append(wanted)
    rows[trajectory][5] = lists.index(wanted)
    change = "UPDATE sessions SET rows = ?, fields = ?, apart = 1 WHERE id = ?"
    connection.execute(change, (json.dumps(rows), json.dumps(lists), session_id))


def parts(items: Sequence[_T]) -> list[list[_T]]:
    """As many at a time as a statement takes."""
    return [[*items[start : start + KEYS_A_STATEMENT]] for start in range(0, len(items), KEYS_A_STATEMENT)]


def _places(count: int, width: int) -> str:
    return ",".join([f"({','.join('?' * width)})"] * count)
