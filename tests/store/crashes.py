"""Processes that use a store until they are killed: `python crashes.py write|read FILE LOG SEED`.

A writer logs a session, durably, before it begins to put it and once put has returned. What a session holds follows
from its key, so that whoever looks afterwards can compare every bit.
"""

import os
import random
import sys
from pathlib import Path

import torch

from raggedright.store.protocol import Key, NewRow, SessionKey
from raggedright.store.sqlite import SqliteStore
from store.values import same

FIELDS = ["input_ids", "rollout_log_probs", "media"]


def rows_like(session: SessionKey) -> list[NewRow]:
    """The rows that this session has; of some tokens, and now and then of many."""
    generator = torch.Generator().manual_seed(hash(tuple(session[2:])) % 2**31 + len(session.prompt))
    rows = []
    for _ in range(int(torch.randint(0, 6, (), generator=generator))):
        count = int(torch.randint(1, 20_000, (), generator=generator))
        fields = {
            "input_ids": torch.randint(0, 2**40, (count,), generator=generator),
            "rollout_log_probs": torch.rand(count, generator=generator),
            "media": {"pixel_values": torch.rand(3, 5, generator=generator)},
        }
        rows.append(NewRow(prompt_tokens=1, response_tokens=count, loss_tokens=1, fields=fields, tags={"count": count}))
    return rows


def write(path: Path, log: Path, seed: int) -> None:
    """Put sessions for ever; some as running first, and delete a round now and then where the seed says so."""
    chance = random.Random(seed)
    with log.open("a") as file, SqliteStore(path) as store:
        print("ready", flush=True)
        for i in range(10**9):
            session = SessionKey(7, f"writer {seed}", i)
            if chance.random() < 0.3:
                store.put(session, state="running")
            store.put(session, rows_like(session), score=float(i))
            file.write(f"{i}\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> None:
    """Read all there is, for ever."""
    with SqliteStore(path) as store:
        print("ready", flush=True)
        while True:
            check(store)


def check(store: SqliteStore) -> set[SessionKey]:
    """The finished sessions of a store, each compared with what it has to be."""
    entries = store.list(state="finished")
    for entry in entries:
        put = rows_like(entry.key)
        assert entry.score == entry.key.session
        assert [row.tags["count"] for row in entry.rows] == [row.response_tokens for row in put], entry.key
        answer = store.get([Key(*entry.key, i) for i in range(len(put))], FIELDS)
        assert same(list(answer), [dict(row.fields) for row in put]), entry.key
    assert all(not entry.rows for entry in store.list(state="running"))
    return {entry.key for entry in entries}


if __name__ == "__main__":
    what, path, log, seed = sys.argv[1:]
    torch.set_num_threads(1)
    write(Path(path), Path(log), int(seed)) if what == "write" else read(Path(path))
