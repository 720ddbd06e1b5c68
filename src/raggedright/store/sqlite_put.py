"""What a SQLite store is given: sessions as the file takes them, and the checks that need the file.

Encoding needs no file, so that it is done before the file is locked; what is written works inside a transaction that
the caller has begun.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from sqlite3 import Connection, IntegrityError
from typing import NamedTuple

import numpy as np
import torch

from raggedright.arrays import offsets
from raggedright.store.blocks import NewBlock, encode_blocks
from raggedright.store.checks import check_can_become, check_listing, check_put, check_types, round_deleted
from raggedright.store.encoding import check_names
from raggedright.store.listing import Listing, SessionLine, Sessions, listing_of_new
from raggedright.store.protocol import Key, NewRow, NewSession, SessionKey
from raggedright.store.row_encoding import EncodedRow, encode_row
from raggedright.store.sqlite_rows import find_sessions, watermark_of
from raggedright.store.tags import tags_text, to_json

_PUT = """INSERT INTO sessions (id, round, prompt, session, attempt, state, cause, score, num_rows, block,
  first, apart, rows, fields) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)"""
_PUT_KNOWN = f"""{_PUT} ON CONFLICT (id) DO UPDATE SET state = excluded.state, cause = excluded.cause,
  score = excluded.score, num_rows = excluded.num_rows, block = excluded.block, first = excluded.first,
  apart = excluded.apart, rows = excluded.rows, fields = excluded.fields"""


class Ready(NamedTuple):
    """Sessions to put, encoded: what is listed of each, and blocks with their rows, or a value for each row."""

    sessions: Sessions
    listed: tuple[Sequence[str], Sequence[str]]  # of each session, its rows as JSON; the field names that they have
    types: list[tuple[Key, Mapping[str, str]]]  # of fields, with the first row of its round that has these
    blocks: Sequence[NewBlock] = ()
    rows: Sequence[Sequence[EncodedRow]] = ()


def encode_sessions(sessions: Sequence[NewSession]) -> Ready:
    """Sessions that can be put, whatever the store holds, as the file takes them."""
    for new in sessions:
        check_put(new)
    listing = listing_of_new(sessions)
    if listing.vectors is not None and (ready := encode_listing(listing)) is not None:
        return ready
    rows = [[encode_row(Key(*new.key, i), row.fields) for i, row in enumerate(new.rows)] for new in sessions]
    types: dict[tuple, tuple[Key, Mapping[str, str]]] = {}
    for new, of_session in zip(sessions, rows, strict=True):
        for i, row in enumerate(of_session):
            types.setdefault((new.key[0], *row.types.items()), (Key(*new.key, i), row.types))
    lines: list[SessionLine] = [(tuple(new.key), new.state, new.cause, new.score, len(new.rows)) for new in sessions]
    listed = [_listed(new.rows) for new in sessions]
    said = [text for text, _ in listed], [names for _, names in listed]
    return Ready(Sessions.of(lines), said, [*types.values()], rows=rows)


def encode_listing(listing: Listing) -> Ready | None:
    """Sessions with their rows' vectors, in blocks; None where a session is too long for one."""
    vectors, sessions = listing.vectors or {}, listing.sessions
    check_listing(listing)
    blocks = encode_blocks(sessions, vectors)
    if blocks is None:
        return None
    of_fields = _types(tuple((name, ragged.flat.dtype) for name, ragged in vectors.items()))
    num_rows: list[int] = sessions.num_rows.tolist()  # of each session
    with_rows = zip(reversed(sessions.key), reversed(num_rows), strict=True)
    first = {key[0]: key for key, count in with_rows if count}  # of each round
    types = [(Key(*key, trajectory=0), of_fields) for key in first.values()]
    check_names(types[0][0], vectors)
    *counts, tags = listing.about
    said = [*zip(*(column.tolist() for column in counts), tags, strict=True)]
    texts = {row: "[{},{},{},{:d},{},0]".format(*row) for row in {*said}}  # few differ
    rows = map(texts.__getitem__, said)
    names, none = _names((tuple(vectors),)), _names(())
    listed = [f"[{','.join(islice(rows, count))}]" for count in num_rows]
    return Ready(sessions, (listed, [names if count else none for count in num_rows]), types, blocks)


def _listed(rows: Sequence[NewRow]) -> tuple[str, str]:
    lists: dict[tuple[str, ...], int] = {}  # of field names, most often one
    listed = []
    for prompt, response, loss, fields, is_padding, tags in rows:
        names = lists.setdefault(tuple(fields), len(lists))
        listed.append(f"[{prompt},{response},{loss},{int(is_padding)},{tags_text(tags)},{names}]")
    return f"[{','.join(listed)}]", _names(tuple(lists))


def put_blocks(connection: Connection, ready: Ready) -> tuple[list[int | None], list[int | None]]:
    """Write blocks; the block of each session that has rows, and where they begin there."""
    num_rows = ready.sessions.num_rows
    block_of: list[int | None] = [None] * len(num_rows)
    first: list[int | None] = [*block_of]
    if not ready.blocks:
        return block_of, first
    (next_id,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM blocks").fetchone()
    put = [(next_id + n, block.round, block.value) for n, block in enumerate(ready.blocks)]
    connection.executemany("INSERT INTO blocks (id, round, value) VALUES (?, ?, ?)", put)
    for (block_id, _, _), block in zip(put, ready.blocks, strict=True):
        among = slice(block.sessions.start, block.sessions.stop)
        block_of[among] = [block_id] * len(block.sessions)
        first[among] = offsets(num_rows[among])[:-1].tolist()
    for i in np.flatnonzero(num_rows == 0).tolist():
        block_of[i] = first[i] = None
    return block_of, first


def put_sessions(
    connection: Connection, ready: Ready, places: tuple[Sequence[int | None], Sequence[int | None]]
) -> Sequence[int]:
    """Write sessions; the id of each. Most are new, and so none is looked up unless one turns out to be known."""
    (next_id,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM sessions").fetchone()
    key, *said, num_rows = ready.sessions
    apart = [int(any(row.apart for row in rows)) for rows in ready.rows] or [0] * len(key)
    put = [*zip(*zip(*key, strict=True), *said, num_rows.tolist(), *places, apart, *ready.listed, strict=True)]
    ids = range(next_id, next_id + len(put))
    try:
        connection.executemany(_PUT, [(id_, *values) for id_, values in zip(ids, put, strict=True)])
        return ids
    except IntegrityError:
        connection.execute("DELETE FROM sessions WHERE id >= ?", (next_id,))
    known = check_known(connection, ready.sessions, next_id)
    connection.executemany(_PUT_KNOWN, [(id_, *values) for id_, values in zip(known, put, strict=True)])
    return known


def check_rounds(connection: Connection, sessions: Sessions) -> None:
    """Refuse sessions of a round that is gone."""
    watermark = watermark_of(connection)
    for key in sessions.key:
        if key[0] <= watermark:
            raise round_deleted(str(SessionKey(*key)), watermark)


def check_known(connection: Connection, sessions: Sessions, next_id: int) -> list[int]:
    """The id of each session, new or known; refused where it cannot become what is put."""
    found = find_sessions(connection, sessions.key)
    known: dict[tuple, tuple[int, str]] = {key: (session.id, session.state) for key, session in found.items()}
    ids = []
    for key, state in zip(sessions.key, sessions.state, strict=True):
        session_id, before = known.get(key, (next_id, None))
        check_can_become(SessionKey(*key), before, state)
        known[key] = session_id, state
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
    return to_json([sorted(names) for names in lists])


@lru_cache(maxsize=256)
def _types(kinds: tuple[tuple[str, torch.dtype], ...]) -> Mapping[str, str]:
    return {name: str(dtype) for name, dtype in kinds}
