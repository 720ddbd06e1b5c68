"""Trackers of real runs, read back with their own readers; and trackers that fail."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from parallel.whole_runs import write_run
from raggedright.config import load_config
from raggedright.config.load import make_config
from raggedright.config.schema import Config
from raggedright.errors import ConfigError
from raggedright.train.loop import train
from raggedright.train.trackers import TrackedRun, check_trackers
from raggedright.train.world import World

ROOT = Path(__file__).parents[2]
Options = Mapping[str, Mapping[str, object]]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that are tracked with


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": "",
    }.items():
        monkeypatch.setenv(name, value)


def config_of(folder: Path, trackers: list[str], options: Options | None = None, rounds: int = 2) -> Config:
    if not folder.exists():
        write_run(folder, {"eval": {"every": 2, "prompts": 4}})
    overrides = {"train": {"rounds": rounds}, "logging": {"trackers": trackers, "tracker_options": options or {}}}
    return load_config(folder / "config.toml", overrides)


def run(config: Config) -> None:
    check_trackers(config)
    torch.set_num_threads(1)
    assert train(config, World(0, 1, torch.device("cpu"))) == "finished"


def events_of(folder: Path, kind: str) -> list[dict]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


def scores_of(folder: Path) -> dict[int, float]:
    return {event["round"]: event["metrics"]["critic/score/mean"] for event in events_of(folder, "round")}


def run_and_resume(folder: Path, tracker: str, options: Options | None = None) -> dict[int, float]:
    for rounds in (2, 3):
        run(config_of(folder, [tracker], options, rounds))
    assert events_of(folder, "warning") == []
    scores = scores_of(folder)
    assert [*scores] == [1, 2, 3]
    return scores


def test_tensorboard_has_every_metric_of_a_run_and_of_its_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scores = run_and_resume(tmp_path / "run", "tensorboard")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert {event.step: event.value for event in board.Scalars("critic/score/mean")} == pytest.approx(scores)
    assert [event.step for event in board.Scalars("eval/score/mean")] == [2, 3]
    metrics = {name for event in events_of(tmp_path / "run", "round") for name in event["metrics"]}
    assert metrics <= {*board.Tags()["scalars"]}


def test_wandb_has_every_metric_of_a_run_under_one_id(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]
    from wandb.sdk.internal.datastore import DataStore

    scores = run_and_resume(tmp_path / "run", "wandb", {"wandb": {"project": "digits"}})
    read, evaluated, ids, projects = {}, [], set(), set()
    for file in sorted((tmp_path / "run").glob("wandb/offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(bytes(data))
            if record.HasField("run"):
                ids.add(record.run.run_id)
                projects.add(record.run.project)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "critic/score/mean" in row:
                read[row["round"]] = row["critic/score/mean"]
            if "eval/score/mean" in row:
                evaluated.append(row["round"])
        store.close()
    assert read == pytest.approx(scores)
    assert evaluated == [2, 3]
    assert ids == {(tmp_path / "run" / "run_id").read_text().strip()}
    assert projects == {"digits"}


def test_mlflow_has_every_metric_in_one_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    scores = run_and_resume(tmp_path / "run", "mlflow", {"mlflow": {"experiment": "digits"}})
    client = MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "critic/score/mean")
    assert {metric.step: metric.value for metric in history} == pytest.approx(scores)
    evaluations = client.get_metric_history(found.info.run_id, "eval/score/mean")
    assert [metric.step for metric in evaluations] == [2, 3]
    assert found.data.params["rollout.n"] == "4"
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"


def test_the_tracker_of_the_page_tracks_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "TrackedRun" in code)
    (tmp_path / "page_tracker.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    name = "page_tracker:ScoreFile"
    run(config_of(tmp_path / "run", [name], {name: {"name": "own.txt"}}))
    lines = (tmp_path / "run" / "own.txt").read_text().splitlines()
    read = {int(line.split()[0]): float(line.split()[1]) for line in lines}
    assert read == scores_of(tmp_path / "run")


class Failing:
    """Fails when it starts, when it logs a round, or when it is closed."""

    def __init__(self, run: TrackedRun, when: str) -> None:
        self.when = when
        self.fail("start")

    def log(self, metrics: Mapping[str, float], round: int) -> None:
        self.fail(f"round {round}")

    def close(self) -> None:
        self.fail("close")

    def fail(self, now: str) -> None:
        if now == self.when:
            raise OSError(f"no route to host at {now}")


@pytest.mark.parametrize("when", ["start", "round 1", "close"])
def test_a_tracker_that_fails_is_one_warning_and_the_run_ends_well(
    tmp_path: Path, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "integration.test_trackers:Failing"
    run(config_of(tmp_path / "run", [name, "tensorboard"], {name: {"when": when}}))
    (warning,) = events_of(tmp_path / "run", "warning")
    assert warning["kind"] == "tracker"
    assert f"no route to host at {when}" in warning["text"]
    assert " ".join(capsys.readouterr().out.split()).count("no route to host") == 1
    assert [*(tmp_path / "run" / "tensorboard").iterdir()] != []


def test_what_is_wrong_with_trackers_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"logging\.trackers.*tensorbord.*tensorboard"):
        check_trackers(config_of(tmp_path / "run", ["tensorbord"]))
    with pytest.raises(ConfigError, match=r"logging\.tracker_options\.wandb"):
        check_trackers(config_of(tmp_path / "run", [], {"wandb": {"project": "x"}}))
    with pytest.raises(ConfigError, match=r"logging\.tracker_options\.mlflow\.experimnt.*experiment"):
        check_trackers(config_of(tmp_path / "run", ["mlflow"], {"mlflow": {"experimnt": "x"}}))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb.*\.\[wandb\]"):
        check_trackers(config_of(tmp_path / "run", ["wandb"]))


def test_the_old_key_is_refused_with_the_new_one(tmp_path: Path) -> None:
    values = config_of(tmp_path / "run", []).model_dump(mode="json", exclude_none=True)
    with pytest.raises(ConfigError, match=r"logging: tensorboard.*trackers = \[\]"):
        make_config({**values, "logging": {"tensorboard": False}}, source="test")
