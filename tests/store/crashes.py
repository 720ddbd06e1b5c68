"""Processes that use a store until they are killed: `python crashes.py write|read STORE LOG SEED`.

STORE is a SQLite store's file, or `queue ADDRESS RUN`.

A writer logs a session, durably, before it begins to put it and once put has returned. What a session holds follows
from its key, so that whoever looks afterwards can compare every bit.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import torch

from raggedright.store.protocol import Key, NewRow, SessionKey, Store
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


def open_store(where: str) -> Store:
    if not where.startswith("queue "):
        return SqliteStore(where)
    from raggedright.store.transfer_queue import TransferQueueStore

    _, address, run = where.split(" ", 2)
    return TransferQueueStore(address, run=run, timeout=3.0)  # a killed writer's lease is a few times that


def write(where: str, log: Path, seed: int) -> None:
    """Put sessions for ever; some as running first."""
    chance = random.Random(seed)
    with log.open("a") as file, open_store(where) as store:
        print("ready", flush=True)
        for i in range(10**9):
            session = SessionKey(7, f"writer {seed}", i)
            if chance.random() < 0.3:
                store.put(session, state="running")
            store.put(session, rows_like(session), score=float(i))
            file.write(f"{i}\n")
            file.flush()
            os.fsync(file.fileno())


def read(where: str) -> None:
    """Read all there is, for ever."""
    with open_store(where) as store:
        print("ready", flush=True)
        while True:
            check(store)


def start(what: str, where: str, log: Path, seed: int) -> subprocess.Popen[bytes]:
    """One of these in a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, what, where, str(log), str(seed)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )


def run_and_kill(where: str, folder: Path, seed: int, whats: list[str], chance: random.Random) -> None:
    """Start these at once, and kill each at a random moment after all are ready."""
    logs = [folder / f"log {seed + i}" for i in range(len(whats))]
    processes = [start(what, where, log, seed + i) for i, (what, log) in enumerate(zip(whats, logs, strict=True))]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in chance.sample(processes, len(processes)):
        sleep(chance.random() * 0.4)
        assert process.poll() is None, "it ended by itself"
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def compare(store: Store, folder: Path) -> None:
    """All that any log reports is in the store; what more is there is at most one session a writer."""
    found = check(store)
    for log in folder.glob("log *"):
        writer = f"writer {log.name.removeprefix('log ')}"
        reported = {SessionKey(7, writer, int(line)) for line in log.read_text().split()}
        mine = {key for key in found if key.prompt == writer}
        assert reported <= mine, "a session that was reported is lost"
        assert len(mine - reported) <= 1, "more than the one that was being reported when it was killed"


def check(store: Store) -> set[SessionKey]:
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
    what, where, log, seed = sys.argv[1:]
    torch.set_num_threads(1)
    write(where, Path(log), int(seed)) if what == "write" else read(where)
