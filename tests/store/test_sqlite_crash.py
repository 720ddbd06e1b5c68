"""kill -9 at any moment: every session whose append returned is stored bit for bit, none is stored in part."""

import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from raggedright.store.sqlite import SqliteStore
from store import crashes


def run_and_kill(path: Path, seed: int, modes: list[str], rng: random.Random) -> None:
    """Start these processes, kill each at a random moment, and compare the store with their logs."""
    crashes.run_and_kill(str(path), path.parent, seed, modes, rng)
    with SqliteStore(path) as store:
        crashes.compare(store, path.parent)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    expected = "SELECT arrays_id FROM rows"
    assert connection.execute(f"SELECT count(*) FROM arrays WHERE id NOT IN ({expected})").fetchone() == (0,)
    assert connection.execute(f"SELECT count(*) FROM ({expected} EXCEPT SELECT id FROM arrays)").fetchone() == (0,)
    connection.close()


@pytest.mark.parametrize("modes", [["write"], ["write", "write", "read"]], ids="+".join)
def test_a_kill_loses_no_logged_session(tmp_path: Path, modes: list[str]) -> None:
    run_and_kill(tmp_path / "rows.db", 0, modes, random.Random(1))


@pytest.mark.slow
@pytest.mark.parametrize("modes", [["write"], ["write", "read"], ["write", "write"], ["write"] * 3], ids="+".join)
def test_repeated_kills_lose_no_logged_session(tmp_path: Path, modes: list[str]) -> None:
    """Ten times on one file: each start opens the file that the last kill left."""
    rng = random.Random(len(modes))
    for turn in range(10):
        run_and_kill(tmp_path / "rows.db", 10 * turn, modes, rng)


def test_a_kill_while_a_store_is_made_leaves_no_file_or_a_complete_one(tmp_path: Path) -> None:
    rng = random.Random(3)
    for turn in range(4):
        path = tmp_path / f"{turn}.db"
        make = f"from raggedright.store.sqlite_file import Database as D; from pathlib import Path; print(1, flush=True); D(Path({str(path)!r}), 'run', 5)"  # noqa: E501
        process = subprocess.Popen([sys.executable, "-c", make], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        sleep(rng.random() * 0.05)
        process.kill()
        process.wait()
        process.stdout.close()
        with SqliteStore(path) as store:
            assert store.rounds() == {}
