"""`raggedright train --launcher ray` as a user runs it: a Ray on this machine for the run, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cluster.runs import HELD_ROUND, ROUNDS, make_run
from integration.test_ports import listening
from parallel.whole_runs import distance, weights_of
from raggedright.report.events import read_events

TESTS = str(Path(__file__).parents[1])
pytestmark = pytest.mark.xdist_group("launch")


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raggedright", "train", str(folder / "config.toml"), *options]
    path = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], timeout: float = 240) -> tuple[str, str]:
    try:
        return process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_on_ray_ends_the_run_cleanly_and_the_local_launcher_goes_on_with_it(alone: Path, tmp_path: Path):
    """With SQLite, since all ranks are on one node: so the sessions in the store are there for the other launcher."""
    config = make_run(tmp_path / "run", {"parallel": {"dp": 2}, "store": {"backend": "sqlite", "keep_rounds": ROUNDS}})
    process = start(config.out, "--launcher", "ray")
    first, deadline = config.out / "checkpoints" / f"round-{HELD_ROUND - 1:06}", time.monotonic() + 400
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert first.exists(), end(process, 0)
    time.sleep(2)  # into the held round
    assert {address for _, address, _ in listening(process)} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    os.killpg(process.pid, signal.SIGINT)
    out, err = end(process)
    assert process.returncode == 130, err
    assert "round 1/3" in out
    assert "interrupted after 1 round" in out
    assert "report: " in out
    assert "Traceback" not in err
    (config.out / "go").touch()
    out, err = end(start(config.out, "--launcher", "local"))
    assert "changed since the run began: parallel.launcher 'ray' -> 'local'" in out
    assert "found the checkpoint of round 1" in out
    assert "finished after 3 rounds" in out, err
    assert [each.round for each in read_events(config.out / "events.jsonl").rounds] == [1, 2, 3]
    assert distance(weights_of(config.out), weights_of(alone)) < 1e-9


def parts_below(pid: int, name: str) -> list[psutil.Process]:
    """The processes below another one that have this in their program's path, or in their title in Ray."""
    parts = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            parts += [each] if name in "".join(each.cmdline()[:1]) else []
    return parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("ray::TrainController", "Ray's TrainController died"),
        ("/gcs_server", "its raylet or GCS died"),
    ],
)
def test_a_part_of_ray_that_is_killed_is_started_again_and_costs_no_bit(
    part: str, words: str, alone: Path, tmp_path: Path
):
    """Ray Train restarts ranks; nothing restarts its controller and its GCS: runs ended with Ray's own traces."""
    config = make_run(tmp_path / "run", {"parallel": {"dp": 2}, "store": {"backend": "sqlite", "keep_rounds": ROUNDS}})
    process = start(config.out, "--launcher", "ray", "--max-restarts", "1")
    first, deadline = config.out / "checkpoints" / f"round-{HELD_ROUND - 1:06}", time.monotonic() + 400
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert first.exists(), end(process, 0)
    (killed,) = parts_below(process.pid, part)
    killed.kill()
    while not {each.pid for each in parts_below(process.pid, part)} - {killed.pid} and process.poll() is None:
        assert time.monotonic() < deadline, end(process, 0)  # ranks wait for `go` until Ray has been started again
        time.sleep(0.1)
    (config.out / "go").touch()
    out, err = end(process, 400)
    assert process.returncode == 0, err
    assert "\x1b" not in out + err  # Ray colours what its raylet says
    assert words in out
    assert "starting the driver again (1 of 1 restarts)" in out
    assert "found the checkpoint of round 1" in out
    assert distance(weights_of(config.out), weights_of(alone)) < 1e-9
