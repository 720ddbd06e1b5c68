"""Dynamic sampling in whole runs: resumed, killed, at its limit, and where there is nothing to leave out."""

import json
from html import unescape
from pathlib import Path

import pytest
import torch

from integration.test_train import events_of, run
from parallel.whole_runs import distance, train_one, weights_of, write_run
from raggedright.config import load_config
from raggedright.store.sqlite import SqliteStore
from raggedright.train import loop, train_round
from raggedright.train.world import TrainError, World
from recorded import recorded_sessions

ALONE = World(0, 1, torch.device("cpu"))
DYNAMIC: dict[str, dict[str, object]] = {
    "agent": {"name": "parallel.whole_runs:sparse"},
    "rollout": {"dynamic_sampling": True},
    "train": {"rounds": 3, "epochs": 1},
    "checkpoint": {"every": 1, "keep": 9},
    "store": {"keep_rounds": 9},
}


def rounds_of(folder: Path) -> list[dict]:
    """The last event of each round."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [*{line["round"]: line for line in lines if line["event"] == "round"}.values()]


def sessions_of(folder: Path) -> list[tuple]:
    with SqliteStore(folder / "rows.db") as store:
        return [(*session.key, session.state, session.score) for session in recorded_sessions(store)]


def check_same(folder: Path, whole: Path) -> None:
    """The same weights, sessions, ledger and prompts drawn, after every round."""
    assert distance(weights_of(folder), weights_of(whole)) == 0
    assert sessions_of(folder) == sessions_of(whole)
    for one, other in zip(rounds_of(folder), rounds_of(whole), strict=True):
        assert {**one["ledger"], "reused_sessions": 0} == other["ledger"]
    drawn = [
        [json.loads((path / "state.json").read_text())["prompts_drawn"] for path in sorted(run.glob("checkpoints/*"))]
        for run in (folder, whole)
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0][-1] > 3 * 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("whole") / "run", DYNAMIC)
    train_one(folder, ALONE)
    return folder


@pytest.mark.parametrize("in_wave", [1, 2])
def test_a_run_that_was_cut_between_waves_samples_the_same_prompts_and_runs_no_session_twice(
    monkeypatch: pytest.MonkeyPatch, whole: Path, tmp_path: Path, in_wave: int
):
    folder, num_waves = write_run(tmp_path / "run", DYNAMIC), 0
    run_sessions = train_round.run_sessions

    def run_and_end(setup, round, *args):
        nonlocal num_waves
        num_waves += round == 2
        if num_waves == in_wave + 1:
            raise TrainError("the power went")
        return run_sessions(setup, round, *args)

    with monkeypatch.context() as patch:
        patch.setattr(train_round, "run_sessions", run_and_end)
        with pytest.raises(TrainError, match="the power went"):
            loop.train(load_config(folder / "config.toml"), ALONE)
    train_one(folder, ALONE)
    check_same(folder, whole)
    assert rounds_of(folder)[1]["ledger"]["reused_sessions"] > 0


@pytest.mark.xdist_group("launch")
def test_a_run_on_two_ranks_that_is_killed_in_mid_round_ends_as_if_it_had_not_been(tmp_path: Path):
    """SIGKILL in the second wave of round 2, in one rank; the command again goes on with what the store has."""
    folders = [tmp_path / "killed", tmp_path / "whole"]
    options = ("--parallel.dp", "2", "--model.dtype", "float64", "--rollout.dynamic_sampling", "true")
    options += ("--checkpoint.every", "1", "--checkpoint.keep", "9", "--store.keep_rounds", "9")
    code, _, err = run(folders[0], "killed_once", *options)
    assert code != 0
    assert (folders[0] / "died").exists(), err
    (folders[1] / "died").parent.mkdir()
    (folders[1] / "died").touch()
    for folder in folders:
        code, _, err = run(folder, "killed_once", *options)
        assert code == 0, err
    killed, alone = (folder / "run" for folder in folders)
    assert distance(weights_of(killed), weights_of(alone)) < 1e-9
    assert sessions_of(killed) == sessions_of(alone)
    again = [{**round["ledger"], "reused_sessions": 0} for round in rounds_of(killed)]
    assert again == [round["ledger"] for round in rounds_of(alone)]
    assert rounds_of(killed)[1]["ledger"]["reused_sessions"] >= 32  # the first wave, but for what ended as it died
    assert {round["optimizer_steps"] for round in rounds_of(killed)} == {2}


def test_at_its_limit_the_batch_is_filled_up_and_a_warning_says_so(tmp_path: Path):
    options = ("--rollout.dynamic_sampling", "true", "--rollout.max_sampled_batches", "2", "--train.rounds", "2")
    code, out, err = run(tmp_path, "constant", *options)
    assert code == 0, err
    for round in events_of(tmp_path, "round"):
        assert round["metrics"]["prompts/sampled"] == 16
        assert round["ledger"]["sessions"] == {"trained": 32, "skipped (no signal)": 32}
        assert round["optimizer_steps"] == 2
    texts = [event["text"] for event in events_of(tmp_path, "warning") if event["kind"] == "dynamic sampling"]
    assert texts[-1].startswith("rounds 1 to 2 did not find 8 prompts with signal")
    assert "0 of 16" in texts[-1]
    assert texts[-1] in out
    assert texts[-1] in unescape((tmp_path / "run" / "report.html").read_text())


def test_where_every_prompt_has_signal_dynamic_sampling_changes_nothing(tmp_path: Path):
    agent: dict[str, dict[str, object]] = {"agent": {"name": "parallel.whole_runs:spread"}}
    with_it, without = (
        write_run(tmp_path / str(on), DYNAMIC, agent, {"rollout": {"dynamic_sampling": on}}) for on in (True, False)
    )
    for folder in (with_it, without):
        train_one(folder, ALONE)
    assert distance(weights_of(with_it), weights_of(without)) == 0
    assert sessions_of(with_it) == sessions_of(without)
