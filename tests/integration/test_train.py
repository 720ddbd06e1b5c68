"""`raggedright train` as a user runs it: what it prints, what it leaves, how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from html import unescape
from pathlib import Path

import pytest

from parallel.whole_runs import write_run

TESTS = Path(__file__).parents[1]
SMALL: dict[str, dict[str, object]] = {
    "model": {"dtype": "float32"},
    "prompts": {"source": "integration.train_agents:tasks"},
    "rollout": {"n": 4, "max_tokens": 2, "timeout": 2.0},
    "train": {"rounds": 3, "batch_size": 8, "mini_batch_size": 4, "epochs": 1},
}


def start(folder: Path, agent: str, *options: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A run of an agent of `train_agents`, in a process group of its own, in folder/run."""
    folder.mkdir(exist_ok=True)
    file = folder / "config" / "config.toml"
    if not file.exists():
        write_run(file.parent, SMALL, {"agent": {"name": f"integration.train_agents:{agent}"}})
    command = [sys.executable, "-m", "raggedright", "train", str(file), "--out", str(folder / "run"), *options]
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TASKS_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment, start_new_session=True)


def wait_for(folder: Path, process: subprocess.Popen[str]) -> None:
    """Until a session of the agent `waits` is in its second round."""
    deadline = time.monotonic() + 200
    while not (folder / "waiting").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)


def run(folder: Path, agent: str, *options: str) -> tuple[int, str, str]:
    process = start(folder, agent, *options)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def events_of(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


@pytest.mark.xdist_group("launch")
def test_a_run_on_two_ranks_ends_with_the_reports_path_and_all_files(tmp_path: Path):
    code, out, err = run(
        tmp_path, "healthy", "--parallel.dp", "2", "--eval.every", "2", "--logging.trackers", '["tensorboard"]'
    )
    assert code == 0, err
    report = tmp_path / "run" / "report.html"
    assert out.rstrip().endswith(f"report: {report}")
    assert "round 3/3" in out
    for name in ("config.toml", "events.jsonl", "rows.db", "report.html", "tensorboard", "model/model.safetensors"):
        assert (tmp_path / "run" / name).exists(), name
    rounds = events_of(tmp_path, "round")
    assert [event["round"] for event in rounds] == [1, 2, 3]
    assert {event["optimizer_steps"] for event in rounds} == {2}
    assert [event["round"] for event in events_of(tmp_path, "eval")] == [2, 3]
    assert events_of(tmp_path, "end")[0]["reason"] == "finished"
    sampled = [session for event in events_of(tmp_path, "samples") for session in event["sessions"]]
    assert all(session["task"] and session["trajectories"] for session in sampled)
    assert "37" in report.read_text()


def test_the_same_command_goes_on_with_the_run_in_its_folder(tmp_path: Path):
    code, _, err = run(tmp_path, "healthy", "--agent.name", "compacton")
    assert code == 1
    assert err.startswith("raggedright: agent.name is 'compacton'")
    assert err.endswith("is it compaction?\n")
    code, _, err = run(tmp_path, "healthy", "--train.rounds", "2")
    assert code == 0, err
    code, _, err = run(tmp_path, "healthy", "--rollout.n", "2")
    assert code == 1
    assert "rollout.n 4 -> 2; give those keys their old values, another --out, or --fresh" in err
    (tmp_path / "run" / "stop").touch()  # of nobody any more
    code, out, err = run(tmp_path, "healthy", "--train.rounds", "3")
    assert code == 0, err
    assert not (tmp_path / "run" / "stop").exists()
    assert "changed since the run began: train.rounds 2 -> 3" in out
    assert "found the checkpoint of round 2 and 0 of 32 sessions of round 3; 1 of 3 rounds to go" in out
    assert "finished after 3 rounds" in out
    assert "(of the first and the last round)" in out
    code, out, err = run(tmp_path, "healthy", "--train.rounds", "3")
    assert code == 0, err
    assert "found the checkpoint of round 3, and all 3 rounds are done; raise train.rounds for more" in out


def test_a_zoo_of_misbehaving_agents_does_not_stop_the_run_and_the_ledger_names_each(tmp_path: Path):
    code, out, err = run(tmp_path, "zoo", "--train.rounds", "1")
    assert code == 0, err
    (event,) = events_of(tmp_path, "round")
    causes = {int(failure["prompt"]) % 8: failure["cause"] for failure in event["failed"]}
    words = {
        0: "ValueError: no idea what to do with",
        1: "2 s",
        2: "None",
        3: "nan",
        4: "rollout.max_row_tokens",
        5: "trajector",
        7: "rollout.max_trajectories",
    }
    assert causes.keys() == words.keys()
    for number, word in words.items():
        assert word in causes[number], causes[number]
    assert "7 failed" in out
    sessions = event["ledger"]["sessions"]
    assert sum(sessions.values()) == 32
    assert sessions["trained"] == 24
    assert sessions["skipped (no loss tokens)"] == 1


@pytest.mark.xdist_group("launch")
def test_ctrl_c_ends_the_run_cleanly_and_says_what_was_kept(tmp_path: Path):
    process = start(tmp_path, "waits", "--parallel.dp", "2", "--rollout.timeout", "600")
    wait_for(tmp_path, process)
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, err
    assert "interrupted after 1 round" in out
    assert ": events of 1 round, the checkpoint of round 1, the model; run the same command again to resume" in out
    assert events_of(tmp_path, "end")[0]["reason"] == "interrupted"
    assert "Traceback" not in err


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("dp", [1, 2])
def test_an_agent_that_hangs_in_a_thread_does_not_keep_a_finished_run_from_ending(tmp_path: Path, dp: int):
    code, out, err = run(tmp_path, "hangs_in_a_thread", "--parallel.dp", str(dp))
    assert code == 0, err
    ended = datetime.fromisoformat(events_of(tmp_path, "end")[0]["time"]).timestamp()
    assert (tmp_path / "run" / "report.html").stat().st_mtime - ended < 60
    assert "8 failed" in out


def test_an_agent_that_changes_the_working_folder_does_not_lose_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    process = start(tmp_path / "there", "changes_folder", "--out", "run", "--checkpoint.every", "1")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    run_folder = tmp_path / "here" / "run"
    assert {"checkpoints", "events.jsonl", "model", "report.html"} <= {path.name for path in run_folder.iterdir()}
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"config"}


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("dp", [1, 2])
def test_a_run_whose_terminal_is_closed_keeps_a_checkpoint_and_writes_its_report(tmp_path: Path, dp: int):
    terminal, output = os.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and so it would be by the run
    try:
        process = start(tmp_path, "waits", "--parallel.dp", str(dp), "--rollout.timeout", "600", output=output)
    finally:
        signal.signal(signal.SIGHUP, before)
    os.close(output)
    wait_for(tmp_path, process)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    try:
        assert process.wait(timeout=120) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert events_of(tmp_path, "end")[0]["reason"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / "round-000001").is_dir()
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.xdist_group("launch")
@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path: Path):
    code, out, err = run(tmp_path, "dies", "--parallel.dp", "2")
    assert code == 1
    assert "raggedright: rank 1 ended with exit code 7 and reported no error" in err
    assert "rank-1.log; run the same command again to resume" in err
    assert "Traceback" not in err  # of the other rank, which waited for it
    assert "after 1 round" in out


@pytest.mark.xdist_group("launch")
@pytest.mark.slow
def test_what_a_killed_rank_has_started_is_ended_too(tmp_path: Path):
    code, _, err = run(tmp_path, "dies_with_children", "--parallel.dp", "2")
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in err
    status = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"  # ended, if nobody has waited for it


@pytest.mark.xdist_group("launch")
@pytest.mark.slow
def test_ranks_are_started_again_from_the_last_checkpoint_where_that_is_asked_for(tmp_path: Path):
    code, out, err = run(tmp_path, "dies_once", "--parallel.dp", "2", "--max-restarts", "1", "--checkpoint.every", "1")
    assert code == 0, err
    assert "found the checkpoint of round 1" in out
    assert "finished after 3 rounds" in out
    assert "(of the first and the last round)" in out
    assert [event["round"] for event in events_of(tmp_path, "round")] == [1, 2, 3]


def test_when_every_session_fails_the_run_stops_with_the_first_cause(tmp_path: Path):
    code, _, err = run(tmp_path, "raises")
    assert code == 1
    assert "round 1: all 32 sessions failed" in err
    assert "ValueError: no idea what to do with" in err
    assert "Traceback" not in err


def test_a_dry_run_prints_the_resolved_config_and_a_plan_and_starts_nothing(tmp_path: Path):
    code, out, err = run(tmp_path, "healthy", "--dry-run", "--train.align", "lcm")
    assert code == 0, err
    assert 'align = "lcm"' in out
    assert "optimizer" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.xdist_group("launch")
@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_ranks_along_and_two_runs_cannot_share_a_folder(tmp_path: Path):
    process = start(tmp_path, "waits", "--parallel.dp", "2", "--rollout.timeout", "600")
    wait_for(tmp_path, process)
    code, _, err = run(tmp_path, "waits")
    assert code == 1
    assert "is being trained in by another process" in err
    ranks = [int(pid) for pid in (Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()).split()]
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(ranks) >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_run_with_more_padding_than_rows_says_so_once(tmp_path: Path):
    code, out, err = run(tmp_path, "healthy", "--train.rounds", "2", "--train.micro_batch_multiple", "150")
    assert code == 0, err
    (warning,) = events_of(tmp_path, "warning")
    assert (warning["kind"], warning["round"]) == ("plan", 1)
    assert "micro_batch_multiple 150" in warning["text"]
    assert out.count("padding rows for") == 1
    assert warning["text"] in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("rounds", [2, 5])
def test_a_run_whose_scores_are_all_equal_says_that_it_learned_nothing(tmp_path: Path, rounds: int):
    """After three rounds, or at the end of a shorter run: in the console, the events and the top of the report."""
    options = ("--algorithm.entropy_coef", "0", "--logging.no_gradient_rounds", "3")
    code, out, err = run(tmp_path, "constant", "--train.rounds", str(rounds), *options)
    assert code == 0, err
    warnings = events_of(tmp_path, "warning")
    assert [(event["first_round"], event["round"]) for event in warnings] == (
        [(1, 2)] if rounds == 2 else [(1, 3), (1, 5)]
    )
    last = warnings[-1]["text"]
    assert last.startswith(f"rounds 1 to {rounds} had no gradient")
    assert "every finished session scored 0" in last
    assert f"warning: {last}" in out
    assert last in unescape((tmp_path / "run" / "report.html").read_text())
    assert {event["metrics"]["actor/grad_norm"] for event in events_of(tmp_path, "round")} == {0.0}
    assert {event["metrics"]["prompts/no_signal_ratio"] for event in events_of(tmp_path, "round")} == {1.0}
    assert "no signal 100%" in out
