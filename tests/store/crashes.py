"""Processes that use a store until they are killed: `python crashes.py write|read STORE LOG SEED`.

STORE is a SQLite store's file, or `queue ADDRESS RUN`.

A writer logs a session, durably, once append has returned. The contents of a session follow from its key, so that a
test can compare every bit afterwards.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import numpy as np

from raggedright.sessions import Session, SessionKey, Trajectory
from raggedright.store.session_store import Store
from raggedright.store.sqlite import SqliteStore
from store.values import same


def session_of(key: SessionKey) -> Session:
    """The session of this key; its rows have between 1 and 20,000 tokens."""
    rng = np.random.default_rng([key.session, key.attempt, len(key.prompt)])
    trajectories = []
    for _ in range(int(rng.integers(0, 6))):
        count = int(rng.integers(1, 20_000))
        trajectory = Trajectory(
            input_ids=rng.integers(0, 2**40, count + 1),
            response_mask=np.ones(count, dtype=np.int64),
            rollout_log_probs=rng.random(count, dtype=np.float32),
            extra={"multi_modal_inputs.pixel_values": rng.random((3, 5))},
        )
        trajectories.append(trajectory)
    return Session(key=key, score=float(key.session), trajectories=trajectories)


def open_store(where: str) -> Store:
    if not where.startswith("queue "):
        return SqliteStore(where)
    from raggedright.store.transfer_queue import TransferQueueStore

    _, address, run = where.split(" ", 2)
    return TransferQueueStore(address, run=run)


def write(where: str, log: Path, seed: int) -> None:
    """Append sessions until killed."""
    with log.open("a") as file, open_store(where) as store:
        print("ready", flush=True)
        for i in range(10**9):
            session = SessionKey(7, f"writer {seed}", i)
            store.append([session_of(session)])
            file.write(f"{i}\n")
            file.flush()
            os.fsync(file.fileno())


def read(where: str) -> None:
    """Read everything, again and again, until killed."""
    with open_store(where) as store:
        print("ready", flush=True)
        while True:
            check(store)


def start(mode: str, where: str, log: Path, seed: int) -> subprocess.Popen[bytes]:
    """Start a writer or a reader in its own process."""
    return subprocess.Popen(
        [sys.executable, __file__, mode, where, str(log), str(seed)],
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
        },
    )


def run_and_kill(where: str, folder: Path, seed: int, modes: list[str], rng: random.Random) -> None:
    """Start these processes, and kill each at a random moment after all are ready."""
    logs = [folder / f"log {seed + i}" for i in range(len(modes))]
    processes = [start(mode, where, log, seed + i) for i, (mode, log) in enumerate(zip(modes, logs, strict=True))]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in rng.sample(processes, len(processes)):
        sleep(rng.random() * 0.4)
        assert process.poll() is None, "the process ended by itself"
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def compare(store: Store, folder: Path) -> None:
    """Every session in a log is in the store; the store has at most one more session per writer."""
    stored = check(store)
    for log in folder.glob("log *"):
        writer = f"writer {log.name.removeprefix('log ')}"
        reported = {SessionKey(7, writer, int(line)) for line in log.read_text().split()}
        of_writer = {key for key in stored if key.prompt == writer}
        assert reported <= of_writer, "a logged session is lost"
        assert len(of_writer - reported) <= 1, "more than the session that was being logged when the writer was killed"


def check(store: Store) -> set[SessionKey]:
    """The sessions of a store, each compared with its expected contents."""
    table = store.sessions(7)
    for i in range(len(table)):
        key = table.session_key(i)
        appended = session_of(key)
        assert table.score[i] == key.session
        rows = store.read(table.row_keys(np.flatnonzero(table.session_of_row == i)))
        expected = [trajectory.fields for trajectory in appended.trajectories]
        assert len(rows) == len(expected), key
        assert all(same(*pair) for pair in zip(rows, expected, strict=True)), key
    return {table.session_key(i) for i in range(len(table))}


if __name__ == "__main__":
    mode, where, log, seed = sys.argv[1:]
    write(where, Path(log), int(seed)) if mode == "write" else read(where)
