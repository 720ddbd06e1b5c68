"""What a SQLite store is given: sessions as the file takes them, and the checks that need the file.

Encoding needs no file, so that it is done before the file is locked; what is written works inside a transaction that
the caller has begun.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from sqlite3 import Connection
from typing import NamedTuple

import torch

from raggedright.store.blocks import MOST, Alike, alike, encode_block
from raggedright.store.checks import check_can_become, check_put, check_types, round_deleted
from raggedright.store.encoding import check_names
from raggedright.store.protocol import Key, NewRow, NewSession
from raggedright.store.row_encoding import EncodedRow, encode_row
from raggedright.store.sqlite_rows import find_sessions, watermark_of


class Ready(NamedTuple):
    """A session to put, encoded: `rows` that have a value each, or `alike`, which are to share a block."""

    new: NewSession
    rows: list[EncodedRow]
    alike: Alike | None
    listed: str
    field_names: str

    @property
    def types(self) -> list[Mapping[str, str]]:
        """The types of its rows' fields, once for those in a block."""
        return [_types(self.alike.kinds)] if self.alike else [row.types for row in self.rows]


class ReadyBlock(NamedTuple):
    """A block to put: its round, its value, and the places of its sessions among those that are put."""

    round: int
    value: bytes
    sessions: list[int]


def encode_session(new: NewSession) -> Ready:
    """A session that can be put, whatever the store holds, as the file takes it."""
    check_put(new)
    shared = alike(new.rows)
    if shared is not None:
        check_names(Key(*new.key, 0), new.rows[0].fields)
    rows = [] if shared is not None else [encode_row(Key(*new.key, i), row.fields) for i, row in enumerate(new.rows)]
    lists: dict[tuple[str, ...], int] = {}  # of field names, most often one
    listed = [[*_counts(row), dict(row.tags), lists.setdefault(tuple(row.fields), len(lists))] for row in new.rows]
    return Ready(new, rows, shared, _json(listed), _names(tuple(lists)))


def encode_blocks(ready: Sequence[Ready]) -> list[ReadyBlock]:
    """The blocks of sessions whose rows share one, in their order."""
    blocks: dict[tuple, list[list[int]]] = {}
    sizes: dict[tuple, int] = {}
    for i, each in enumerate(ready):
        if each.alike is not None:
            kind = each.new.key.round, each.alike.kinds
            sizes[kind] = sizes.get(kind, MOST) + each.alike.num_bytes
            if sizes[kind] > MOST:
                blocks.setdefault(kind, []).append([])
                sizes[kind] = each.alike.num_bytes
            blocks[kind][-1].append(i)
    return [
        ReadyBlock(round, encode_block([rows for i in of_block if (rows := ready[i].alike)]), of_block)
        for (round, _), of_kind in blocks.items()
        for of_block in of_kind
    ]


def put_blocks(
    connection: Connection, blocks: Sequence[ReadyBlock], ready: Sequence[Ready]
) -> dict[int, tuple[int, int]]:
    """Write blocks; the block of each session in one, by its place, and where its rows begin there."""
    if not blocks:
        return {}
    (next_id,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM blocks").fetchone()
    put = [(next_id + n, block.round, block.value) for n, block in enumerate(blocks)]
    connection.executemany("INSERT INTO blocks (id, round, value) VALUES (?, ?, ?)", put)
    places = {}
    for (block_id, _, _), block in zip(put, blocks, strict=True):
        first = 0
        for i in block.sessions:
            places[i] = block_id, first
            first += len(ready[i].new.rows)
    return places


def session_row(session_id: int, ready: Ready, place: tuple[int, int] | None) -> tuple[object, ...]:
    """What table sessions has of it; `place` is its block and where it begins there."""
    key, rows, state, cause, score = ready.new
    apart = int(any(row.apart for row in ready.rows))
    where = place or (None, None)
    return session_id, *key, state, cause, score, len(rows), *where, apart, ready.listed, ready.field_names


def check_keys(connection: Connection, sessions: Sequence[NewSession]) -> list[int]:
    """The id of each session, new or known; refused where its round is gone or it cannot become what is put."""
    watermark = watermark_of(connection)
    found = find_sessions(connection, [new.key for new in sessions])
    known: dict[tuple, tuple[int, str]] = {key: (session.id, session.state) for key, session in found.items()}
    (next_id,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM sessions").fetchone()
    ids = []
    for new in sessions:
        if new.key.round <= watermark:
            raise round_deleted(str(new.key), watermark)
        session_id, before = known.get(new.key, (next_id, None))
        check_can_become(new.key, before, new.state)
        known[new.key] = session_id, new.state
        next_id += before is None
        ids.append(session_id)
    return ids


def check_round_types(connection: Connection, of_rows: Sequence[tuple[Key, Mapping[str, str]]]) -> None:
    """Compare fields with the types of their rounds, and record the new ones."""
    for round in sorted({key.round for key, _ in of_rows}):
        known = dict(connection.execute("SELECT name, type FROM types WHERE round = ?", (round,)).fetchall())
        types = dict(known)
        for key, of_row in of_rows:
            if key.round == round:
                check_types(types, key, of_row)
        new = [(round, name, type_) for name, type_ in types.items() if name not in known]
        if new:
            connection.executemany("INSERT INTO types VALUES (?, ?, ?)", new)


@lru_cache(maxsize=256)
def _names(lists: tuple[tuple[str, ...], ...]) -> str:
    """Lists of field names as JSON; a run's rows have the same few."""
    return _json([sorted(names) for names in lists])


@lru_cache(maxsize=256)
def _types(kinds: tuple[tuple[str, torch.dtype], ...]) -> Mapping[str, str]:
    return {name: str(dtype) for name, dtype in kinds}


def _counts(row: NewRow) -> tuple[int, int, int, int]:
    return row.prompt_tokens, row.response_tokens, row.loss_tokens, int(row.is_padding)


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # made once
