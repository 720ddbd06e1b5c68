"""kill -9 at any moment: what was reported as put is there, whole and bit-identical, and nothing half is."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from raggedright.store.protocol import SessionKey
from raggedright.store.sqlite import SqliteStore
from store import crashes


def start(what: str, path: Path, log: Path, seed: int) -> subprocess.Popen[bytes]:
    tests = Path(crashes.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, crashes.__file__, what, str(path), str(log), str(seed)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"},
    )


def run_and_kill(path: Path, seed: int, whats: list[str], chance: random.Random) -> None:
    """Start these at once, kill each at a random moment after it is ready, and compare the store with their logs."""
    logs = [path.with_name(f"log {seed + i}") for i in range(len(whats))]
    processes = [start(what, path, log, seed + i) for i, (what, log) in enumerate(zip(whats, logs, strict=True))]
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
    compare(path)


def compare(path: Path) -> None:
    """All that any log of this store reports is there; what more is there is at most one session a writer."""
    with SqliteStore(path) as store:
        found = crashes.check(store)
    for log in path.parent.glob("log *"):
        writer = f"writer {log.name.removeprefix('log ')}"
        reported = {SessionKey(7, writer, int(line)) for line in log.read_text().split()}
        mine = {key for key in found if key.prompt == writer}
        assert reported <= mine, "a session that was reported is lost"
        assert len(mine - reported) <= 1, "more than the one that was being reported when it was killed"
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    orphans = "SELECT count(*) FROM fields WHERE row_id NOT IN (SELECT id FROM rows)"
    assert connection.execute(orphans).fetchone() == (0,)
    connection.close()


@pytest.mark.parametrize("whats", [["write"], ["write", "write", "read"]], ids="+".join)
def test_a_kill_loses_nothing_that_was_reported(tmp_path: Path, whats: list[str]) -> None:
    run_and_kill(tmp_path / "rows.db", 0, whats, random.Random(1))


@pytest.mark.slow
@pytest.mark.parametrize("whats", [["write"], ["write", "read"], ["write", "write"], ["write"] * 3], ids="+".join)
def test_many_kills_lose_nothing_that_was_reported(tmp_path: Path, whats: list[str]) -> None:
    """Ten times over on one file: each start finds what the kill before it left."""
    chance = random.Random(len(whats))
    for turn in range(10):
        run_and_kill(tmp_path / "rows.db", 10 * turn, whats, chance)


def test_a_kill_while_a_store_is_made_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    chance = random.Random(3)
    for turn in range(4):
        path = tmp_path / f"{turn}.db"
        make = f"from raggedright.store.sqlite_file import Database as D; from pathlib import Path; print(1, flush=True); D(Path({str(path)!r}), 5)"  # noqa: E501
        process = subprocess.Popen([sys.executable, "-c", make], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        sleep(chance.random() * 0.05)
        process.kill()
        process.wait()
        process.stdout.close()
        with SqliteStore(path) as store:
            assert list(store.list()) == []
