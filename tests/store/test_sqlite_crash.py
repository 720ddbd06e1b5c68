"""kill -9 at any moment: what was reported as appended is there, whole and bit-identical, and nothing half is."""

import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from raggedright.store.sqlite import SqliteStore
from store import crashes


def run_and_kill(path: Path, seed: int, whats: list[str], chance: random.Random) -> None:
    """Start these at once, kill each at a random moment, and compare the store with their logs."""
    crashes.run_and_kill(str(path), path.parent, seed, whats, chance)
    with SqliteStore(path) as store:
        crashes.compare(store, path.parent)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    wanted = "SELECT arrays_id FROM rows"
    assert connection.execute(f"SELECT count(*) FROM arrays WHERE id NOT IN ({wanted})").fetchone() == (0,)
    assert connection.execute(f"SELECT count(*) FROM ({wanted} EXCEPT SELECT id FROM arrays)").fetchone() == (0,)
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
        make = f"from raggedright.store.sqlite_file import Database as D; from pathlib import Path; print(1, flush=True); D(Path({str(path)!r}), 'run', 5)"  # noqa: E501
        process = subprocess.Popen([sys.executable, "-c", make], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        sleep(chance.random() * 0.05)
        process.kill()
        process.wait()
        process.stdout.close()
        with SqliteStore(path) as store:
            assert store.rounds() == {}
