"""The verification run, killed a dozen times, ends as if nobody had touched it."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from raggedright.report.events import read_events

ROOT = Path(__file__).parents[2]
KILLS = 12
ROUNDS = 150
START_SECONDS, RUN_SECONDS = 240.0, 1500.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "raggedright", "train", str(ROOT / "configs" / "compaction.toml")]
    command += ["--out", str(folder), "--checkpoint.every", "3", "--eval.every", "0"]
    with (folder.parent / "out.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the ranks: children of the launcher, each in a session of its own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == process.pid and b"raggedright.train.rank" in command:
            found.append(int(entry.name))
    return sorted(found)


def kill(process: subprocess.Popen[bytes], chance: random.Random) -> None:
    """One rank, which ends the others by itself, or everything."""
    ranks = ranks_of(process)
    victims = [chance.choice(ranks)] if chance.random() < 0.5 and ranks else [process.pid, *ranks]
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=120)
    for pid in ranks_left(ranks):
        os.kill(pid, signal.SIGKILL)


def ranks_left(ranks: list[int]) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in ranks):
        time.sleep(0.1)
    return [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def rounds_done(folder: Path) -> int:
    path = folder / "events.jsonl"
    rounds = read_events(path).rounds if path.exists() else ()
    return rounds[-1].round if rounds else 0


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_run_that_is_killed_a_dozen_times_learns_and_counts_every_session_once(tmp_path: Path):
    folder, chance = tmp_path / "run", random.Random(3)
    for number in range(KILLS):
        process = start(folder)
        target = rounds_done(folder) + chance.randint(2, 9)
        at_checkpoint = number % 3 == 0
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None and rounds_done(folder) < target:
            time.sleep(0.2)
        assert process.poll() is None, (tmp_path / "out.log").read_text()[-3000:]
        if at_checkpoint:  # or, if it is quicker than we look, somewhere behind it
            while process.poll() is None and not (folder / "checkpoints" / ".new").exists():
                time.sleep(0.001)
        else:
            time.sleep(chance.random())
        kill(process, chance)
    process = start(folder)
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline and process.poll() is None and not (folder / "model.new").exists():
        time.sleep(0.001)
    kill(process, chance)  # in the export, or where it is quicker than we look, behind it
    process = start(folder)
    assert process.wait(timeout=RUN_SECONDS) == 0, (tmp_path / "out.log").read_text()[-3000:]
    events = read_events(folder / "events.jsonl")
    assert [round.round for round in events.rounds] == list(range(1, ROUNDS + 1))
    assert {sum(round.ledger.sessions.values()) for round in events.rounds} == {360}
    assert {round.optimizer_steps for round in events.rounds} == {3}
    for rows in events.rows:
        first = rows.round * 45
        assert sorted(set(rows.rows.prompt.tolist()), key=int) == [str(i) for i in range(first, first + 45)]
        assert set(rows.rows.session.tolist()) == set(range(8))
    scores = [round.metrics["critic/score/mean"] for round in events.rounds]
    assert scores[0] < 0.1
    assert sum(scores[-10:]) / 10 >= 0.8
    assert (folder / "model" / "model.safetensors").exists()
