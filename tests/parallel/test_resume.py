"""A run that was cut goes on as if it had not been."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from parallel.launch import launch
from parallel.whole_runs import EXPERTS, IMAGES, distance, rollouts_of, train_one, weights_of, write_run
from raggedright.config import load_config
from raggedright.config.key_rules import resume_changes
from raggedright.errors import ConfigError
from raggedright.report.events import read_events
from raggedright.store.sqlite import SqliteStore
from raggedright.train import loop
from raggedright.train.checkpoint import last_checkpoint
from raggedright.train.world import TrainError, World
from recorded import recorded_sessions

ALONE = World(0, 1, torch.device("cpu"))
LONG: dict[str, dict[str, object]] = {
    "train": {"rounds": 4, "epochs": 1},
    "algorithm": {"advantages": "gae", "entropy_coef": 0.1},
    "critic": {"mini_batch_size": 2, "lr": 1e-3, "decay": "linear"},
    "optimizer": {"lr": 3e-3, "decay": "linear"},
    "checkpoint": {"every": 1},
    "store": {"keep_rounds": 4},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("whole") / "run", LONG)
    train_one(folder, ALONE)
    return folder


def train_until(monkeypatch: pytest.MonkeyPatch, folder: Path, round: int, *, crash: bool) -> None:
    """Train, and have it end after a round: by a request to stop, or by an error before that round is kept."""

    def train_and_end(setup, number, *args):
        result = train_round(setup, number, *args)
        if number == round and crash:
            raise TrainError("the power went")
        if number == round:
            (folder / "stop").touch()
            time.sleep(0.5)  # longer than the run looks away
        return result

    train_round = loop.train_round
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_round", train_and_end)
        if crash:
            with pytest.raises(TrainError, match="the power went"):
                loop.train(load_config(folder / "config.toml"), ALONE)
        else:
            assert loop.train(load_config(folder / "config.toml"), ALONE) == "interrupted"
            (folder / "stop").unlink()


def test_a_run_with_images_goes_on_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Its rows, with their pixels, come from the store; the processor is beside the exported model."""
    short: dict[str, dict[str, object]] = {"train": {"rounds": 2, "epochs": 1}, "checkpoint": {"every": 1}}
    whole, cut = (write_run(tmp_path / name, IMAGES, short) for name in ("whole", "cut"))
    train_one(whole, ALONE)
    train_until(monkeypatch, cut, 2, crash=True)
    checkpoint = last_checkpoint(cut)
    assert checkpoint is not None
    assert checkpoint[0] == 1
    train_one(cut, ALONE)
    assert distance(weights_of(cut), weights_of(whole)) == 0
    assert (cut / "model" / "processor_config.json").is_file()


def scores_of(folder: Path) -> list[float]:
    return [round.metrics["critic/score/mean"] for round in read_events(folder / "events.jsonl").rounds]


@pytest.mark.parametrize("crash", [False, True])
def test_a_run_that_was_cut_has_the_weights_of_one_that_was_not(
    monkeypatch: pytest.MonkeyPatch, whole: Path, tmp_path: Path, crash: bool
):
    """In float64 on one rank: identical, not near; each round counts once, though one was trained twice."""
    folder = write_run(tmp_path / "run", LONG)
    train_until(monkeypatch, folder, 3, crash=crash)
    checkpoint = last_checkpoint(folder)
    assert checkpoint is not None
    assert checkpoint[0] == (2 if crash else 3)
    train_one(folder, ALONE)
    assert distance(weights_of(folder), weights_of(whole)) == 0
    assert rollouts_of(folder) == rollouts_of(whole)
    events = read_events(folder / "events.jsonl")
    assert [round.round for round in events.rounds] == [1, 2, 3, 4]
    assert scores_of(folder) == scores_of(whole)
    assert events.end is not None
    assert events.end.reason == "finished"


def test_a_run_with_experts_goes_on_and_replays_what_was_recorded_before_the_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    short: dict[str, dict[str, object]] = {
        "train": {"rounds": 2, "epochs": 1},
        "experts": {"balance_coef": 0.1},
        **EXPERTS,
    }
    changes = {**short, "checkpoint": {"every": 1}, "store": {"keep_rounds": 4}}
    whole, cut = (write_run(tmp_path / name, changes) for name in ("whole", "cut"))
    train_one(whole, ALONE)
    train_until(monkeypatch, cut, 2, crash=True)
    with SqliteStore(cut / "rows.db") as store:
        rows = [row for session in recorded_sessions(store, 2) for row in session.trajectories]
    assert rows
    assert all("routed_experts" in row.extra for row in rows)
    train_one(cut, ALONE)
    assert distance(weights_of(cut), weights_of(whole)) == 0
    assert rollouts_of(cut) == rollouts_of(whole)


def test_a_resumed_round_says_what_it_found_and_runs_no_session_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = write_run(tmp_path / "run", LONG)
    train_until(monkeypatch, folder, 3, crash=True)
    capsys.readouterr()
    train_one(folder, ALONE)
    said = capsys.readouterr().out.splitlines()
    assert "found the checkpoint of round 2 and 24 of 24 sessions of round 3; 2 of 4 rounds to go" in said[0]


@pytest.mark.xdist_group("launch")
def test_a_run_goes_on_with_another_number_of_ranks_sharding_and_alignment(
    monkeypatch: pytest.MonkeyPatch, whole: Path, tmp_path: Path
):
    folder = write_run(tmp_path / "run", LONG)
    train_until(monkeypatch, folder, 2, crash=False)
    other = {"parallel": {"dp": 2, "shard": "fsdp2"}, "train": {"rounds": 4, "epochs": 1, "micro_batch_rows": 3}}
    again = write_run(tmp_path / "again", LONG, other)
    config = (again / "config.toml").read_text().replace(str(again), str(folder))
    (folder / "config.toml").write_text(config)
    launch("parallel.whole_runs:train_all", 2, [str(folder)])
    assert distance(weights_of(folder), weights_of(whole)) < 1e-9
    assert scores_of(folder) == pytest.approx(scores_of(whole), abs=1e-12)


def test_what_would_make_it_another_run_is_refused_with_the_difference_shown(tmp_path: Path):
    old = load_config(write_run(tmp_path / "old", LONG) / "config.toml")
    others: dict[str, dict[str, object]] = {"train": {"batch_size": 12, "rounds": 9}, "rollout": {"n": 2}}
    new = load_config(write_run(tmp_path / "new", LONG, others) / "config.toml")
    with pytest.raises(ConfigError, match=r"train.batch_size 6 -> 12.*--fresh") as caught:
        resume_changes(old, new)
    assert "rollout.n 4 -> 2" in str(caught.value)
    assert "rounds" not in str(caught.value)


def test_what_may_differ_is_told(tmp_path: Path):
    old = load_config(write_run(tmp_path / "old", LONG) / "config.toml")
    other: dict[str, dict[str, object]] = {"train": {"rounds": 9, "align": "lcm"}, "parallel": {"dp": 2}}
    new = load_config(write_run(tmp_path / "new", LONG, other) / "config.toml")
    assert sorted(resume_changes(old, new)) == [
        "parallel.dp 1 -> 2",
        "train.align 'steps' -> 'lcm'",
        "train.rounds 4 -> 9",
    ]


def test_only_the_newest_checkpoints_are_kept_and_half_written_ones_removed(whole: Path):
    (whole / "checkpoints" / ".new").mkdir()
    (whole / "checkpoints" / "round-000099.tmp").mkdir()
    checkpoint = last_checkpoint(whole)
    assert checkpoint is not None
    assert checkpoint[0] == 4
    train_one(whole, ALONE)  # nothing is left to do
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["round-000003", "round-000004", "round-000099.tmp"]


def test_a_full_disk_at_a_checkpoint_stops_the_run_and_leaves_the_last_one_good(
    monkeypatch: pytest.MonkeyPatch, whole: Path, mount: Callable[[int], Path]
):
    disk = mount(16)
    folder = write_run(disk / "run", LONG)

    def train_and_fill(setup, number, *args):
        result = train_round(setup, number, *args)
        if number == 3:
            with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            with (disk / "filler").open("r+b") as file:
                file.truncate((disk / "filler").stat().st_size - 32 * 1024)  # room for the events, not for weights
        return result

    train_round = loop.train_round
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_round", train_and_fill)
        with pytest.raises(TrainError, match=r"checkpoint of round 3 cannot be written.*round-000002"):
            loop.train(load_config(folder / "config.toml"), ALONE)
    (disk / "filler").unlink()
    train_one(folder, ALONE)
    assert distance(weights_of(folder), weights_of(whole)) == 0
