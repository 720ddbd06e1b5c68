"""Every checkpoint that is kept can be resumed from, and a damaged one is named before anything of it is loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from parallel.whole_runs import distance, train_one, weights_of, write_run
from raggedright.cli import main
from raggedright.config.load import dump_config, load_config
from raggedright.report.events import EventsError, read_events
from raggedright.train.checkpoint import check_files, checkpoints
from raggedright.train.world import TrainError, World

MISPLACED = {  # by the name in the run folder: what stands there, and what the sentence says
    "stop": (Path.mkdir, "stop is a folder"),
    "run_id": (os.mkfifo, "run_id is a special file"),
    "config.toml": (os.mkfifo, "config.toml is a special file"),
    "events.jsonl": (lambda path: path.symlink_to("/proc/self/mem"), "events.jsonl is a symbolic link"),
    "model": (lambda path: path.symlink_to("/"), "model is a symbolic link"),
    "checkpoints": (lambda path: path.symlink_to("/"), "checkpoints is a symbolic link"),
    "logs": (Path.touch, "logs is a file"),
    "logs/rank-1.log": (lambda path: path.symlink_to("/elsewhere"), "rank-1.log is a symbolic link"),
}
ALONE = World(0, 1, torch.device("cpu"))
SHORT: dict[str, dict[str, object]] = {"train": {"rounds": 6, "epochs": 1}, "checkpoint": {"every": 2}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the defaults of `checkpoint.keep` and `store.keep_rounds`."""
    folder = write_run(tmp_path_factory.mktemp("finished") / "run", SHORT)
    train_one(folder, ALONE)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    (copy / "config.toml").write_text(dump_config(load_config(finished / "config.toml", {"out": copy})))
    return copy


def test_the_older_of_two_checkpoints_can_be_resumed_from(finished: Path, run: Path):
    kept = checkpoints(run)
    assert [round for round, _ in kept] == [4, 6]
    shutil.rmtree(kept[-1][1])
    shutil.rmtree(run / "model")
    train_one(run, ALONE)
    assert distance(weights_of(run), weights_of(finished)) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "state.json"),
        (b"{", "state.json"),
        (b"[" * 200_000, "state.json"),
        (b"\xff\xfe\x00", "state.json"),
        (b"[]", "state.json"),
        (b'{"round": "six"}', "state.json"),
        (b'{"round": 6, "optimizer_steps": {"actor": 1e999}}', "state.json"),
        (None, "has no state.json"),
    ],
)
def test_a_damaged_state_file_is_a_sentence_that_names_the_checkpoint_before(run: Path, text: bytes | None, words: str):
    newest = checkpoints(run)[-1][1]
    (newest / "state.json").unlink()
    if text is not None:
        (newest / "state.json").write_bytes(text)
    with pytest.raises(TrainError, match=words) as error:
        train_one(run, ALONE)
    assert "round-000004" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_flipped_bit_in_a_checkpoint_is_refused_before_it_is_loaded(run: Path, name: str):
    newest = checkpoints(run)[-1][1]
    data = bytearray((newest / name).read_bytes())
    data[len(data) // 2] ^= 4
    (newest / name).write_bytes(data)
    with pytest.raises(TrainError, match=rf"{name} was altered.*round-000004"):
        train_one(run, ALONE)


def test_a_file_missing_from_the_only_checkpoint_says_to_start_again(run: Path):
    (_, older), (_, newest) = checkpoints(run)
    shutil.rmtree(older)
    (newest / "__0_0.distcp").unlink()
    with pytest.raises(TrainError, match=r"__0_0.distcp.*--fresh"):
        train_one(run, ALONE)


@pytest.mark.parametrize("key", ["prompts_drawn", "optimizer_steps", "config"])
def test_an_altered_value_of_the_state_file_is_refused(run: Path, key: str):
    """Another number of prompts drawn changed the data order, and no optimizer_steps was a KeyError."""
    file = checkpoints(run)[-1][1] / "state.json"
    values = json.loads(file.read_text())
    values[key] = {"prompts_drawn": 3, "optimizer_steps": {}, "config": ""}[key]
    file.write_text(json.dumps(values))
    with pytest.raises(TrainError, match=r"state.json was altered.*round-000004"):
        train_one(run, ALONE)


def test_a_state_without_the_steps_of_an_optimizer_is_a_sentence(run: Path):
    folder = checkpoints(run)[-1][1]
    state = check_files(folder)
    state.optimizer_steps = {}
    state.state_sha256 = state.digest()
    (folder / "state.json").write_text(state.model_dump_json())
    with pytest.raises(TrainError, match=r"no optimizer_steps of the actor.*round-000004"):
        train_one(run, ALONE)


def test_a_checkpoint_under_the_name_of_another_round_is_refused(run: Path):
    """A copied folder was loaded as a later round."""
    (_, folder), _ = checkpoints(run)
    shutil.copytree(folder, folder.with_name("round-000007"))
    with pytest.raises(TrainError, match=r"round-000007 cannot be loaded: .*that of round-000004.*round-000006"):
        train_one(run, ALONE)


def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path):
    other = write_run(tmp_path / "other", SHORT, {"train": {"rounds": 8}})
    train_one(other, ALONE)
    shutil.copytree(other / "checkpoints" / "round-000008", run / "checkpoints" / "round-000008")
    with pytest.raises(TrainError, match=r"round-000008 cannot be loaded: .*of the run .*run_id.*round-000006"):
        train_one(run, ALONE)


def test_a_lost_run_id_is_written_again_from_the_checkpoint(run: Path):
    before = (run / "run_id").read_bytes()
    (run / "run_id").unlink()
    train_one(run, ALONE)
    assert (run / "run_id").read_bytes() == before


def test_checksums_cover_every_file_of_a_checkpoint(finished: Path):
    folder = checkpoints(finished)[-1][1]
    state = check_files(folder)
    assert {*state.sha256, "state.json"} == {path.name for path in folder.iterdir()}
    assert json.loads((folder / "state.json").read_text())["round"] == 6


def test_a_run_whose_last_checkpoint_fails_has_failed(tmp_path: Path):
    """Its events said that it had finished."""
    folder = write_run(tmp_path / "run", {"train": {"rounds": 1}})
    (folder / "checkpoints").write_bytes(b"")
    with pytest.raises(TrainError, match="the checkpoint of round 1 cannot be written"):
        train_one(folder, ALONE)
    end = read_events(folder / "events.jsonl").end
    assert end is not None
    assert end.reason == "failed"


def misplace(run: Path, name: str) -> None:
    """Put something else where the run folder has a file or a folder."""
    path, (put, _) = run / name, MISPLACED[name]
    if path.exists():
        path.rename(run.with_name(f"former {path.name}"))
    path.parent.mkdir(exist_ok=True)
    put(path)


@pytest.mark.parametrize("name", MISPLACED)
def test_what_is_not_a_file_of_a_run_is_refused_in_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    shutil.copy(run / "config.toml", given := tmp_path / "given.toml")
    misplace(run, name)
    assert main(["train", str(given), "--out", str(run), "--parallel.dp", "2"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert MISPLACED[name][1] in line
    assert "move it away, or give another --out" in line


def test_fresh_removes_what_is_not_a_file_of_a_run(run: Path, tmp_path: Path):
    shutil.copy(run / "config.toml", given := tmp_path / "given.toml")
    for name in MISPLACED:
        if name != "logs":
            misplace(run, name)
    elsewhere = tmp_path / "former checkpoints"
    (run / "checkpoints").unlink()
    (run / "checkpoints").symlink_to(elsewhere)
    kept = sorted(elsewhere.iterdir())
    assert main(["train", str(given), "--out", str(run), "--fresh", "--train.rounds", "1"]) == 0
    assert kept
    assert sorted(elsewhere.iterdir()) == kept


def ending(run: object) -> None:
    """A tracker that is interrupted while it starts."""
    raise KeyboardInterrupt


def test_a_tracker_that_ends_the_start_leaves_no_open_file(tmp_path: Path):
    folder = write_run(tmp_path / "run", {"logging": {"trackers": ["parallel.test_checkpoint_files:ending"]}})
    with pytest.raises(KeyboardInterrupt) as kept:  # its frames hold the recorder
        train_one(folder, ALONE)
    opened = {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}
    assert str(folder / "events.jsonl") not in opened, kept


@pytest.mark.parametrize("text", [b"", b"\0" * 512, b"train = ["])
def test_a_config_that_a_crash_emptied_is_taken_from_the_last_checkpoint(run: Path, tmp_path: Path, text: bytes):
    given = tmp_path / "given.toml"
    shutil.copy(run / "config.toml", given)
    (run / "config.toml").write_bytes(text)
    assert main(["train", str(given), "--out", str(run)]) == 0
    assert load_config(run / "config.toml").train.rounds == 6


def test_a_run_without_config_and_checkpoint_says_what_to_do(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = tmp_path / "given.toml"
    shutil.copy(run / "config.toml", given)
    (run / "config.toml").write_bytes(b"train = [")
    shutil.rmtree(run / "checkpoints")
    assert main(["train", str(given), "--out", str(run)]) == 1
    assert "--fresh" in capsys.readouterr().err


def test_another_config_is_refused_even_where_the_runs_own_is_damaged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = tmp_path / "given.toml"
    shutil.copy(run / "config.toml", given)
    (run / "config.toml").write_bytes(b"")
    assert main(["train", str(given), "--out", str(run), "--seed", "99"]) == 1
    assert "seed" in capsys.readouterr().err


def test_a_record_that_lost_rounds_is_said_and_changes_no_weight(
    finished: Path, run: Path, capsys: pytest.CaptureFixture[str]
):
    """A run without its events went on silently, and its report began in the middle."""
    shutil.rmtree(checkpoints(run)[-1][1])
    (run / "events.jsonl").write_bytes(b"")
    train_one(run, ALONE)
    assert "events.jsonl has 0 of the 4 rounds that the checkpoint contains" in capsys.readouterr().out
    events = read_events(run / "events.jsonl")
    assert [each.round for each in events.rounds] == [5, 6]
    assert [(each.first_round, each.round) for each in events.warnings if each.kind == "events"] == [(1, 4)]
    assert distance(weights_of(run), weights_of(finished)) == 0


def test_a_damaged_record_is_refused_before_anything_is_trained(run: Path):
    """The run trained to its end, and only then the report said so."""
    shutil.rmtree(checkpoints(run)[-1][1])
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join([lines[0], b"{\n", *lines[1:]]))
    with pytest.raises(EventsError, match=r"events.jsonl, line 2: .*remove that line"):
        train_one(run, ALONE)
    assert [round for round, _ in checkpoints(run)] == [4]


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"another run"])
def test_a_damaged_run_id_says_what_to_remove(run: Path, text: bytes):
    """An empty one made every later start refuse the store, whatever was removed."""
    (run / "run_id").write_bytes(text)
    with pytest.raises(TrainError, match=r"run_id: .* remove it and rows.db"):
        train_one(run, ALONE)
    for name in ("run_id", "rows.db"):
        (run / name).unlink()
    shutil.rmtree(checkpoints(run)[-1][1])
    train_one(run, ALONE)
