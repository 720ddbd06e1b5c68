"""Engine, store, tracker, prompts and agent of the user's: the examples train, and wrong ones are refused by key."""

from pathlib import Path
from typing import Any

import pytest

from parallel.whole_runs import distance, weights_of, write_run
from raggedright.config import load_config
from raggedright.errors import ConfigError, RaggedRightError
from raggedright.report.events import read_events
from raggedright.rollout.engine import EngineContext
from raggedright.rollout.local_engine import LocalEngine
from raggedright.store.memory import MemoryStore
from raggedright.store.session_store import StoreError
from raggedright.train.launch import launch
from raggedright.train.setup import StoreContext

ROOT = Path(__file__).parents[2]
HERE = "integration.test_plug_in"
TASKS: dict[str, dict[str, object]] = {
    "prompts": {"source": "examples.plug_in.prompts:sums"},
    "agent": {"name": "examples.plug_in.agent:answer"},
}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def train(folder: Path, *changes: dict[str, dict[str, Any]]) -> Path:
    launch(load_config(write_run(folder, *changes) / "config.toml"))
    (round,) = read_events(folder / "events.jsonl").rounds
    assert round.ledger.sessions == {"trained": 24}
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plain") / "run")


def test_the_prompts_and_the_agent_of_the_examples_train(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", TASKS)
    (round,) = read_events(folder / "events.jsonl").rounds
    assert round.metrics["critic/score/max"] > 0


def test_the_engine_of_the_examples_trains_to_the_same_weights(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "generations.jsonl"
    engine = {"engine": "examples.plug_in.engine:TimedEngine", "engine_options": {"file": str(file)}}
    folder = train(tmp_path / "run", {"rollout": engine})
    assert distance(weights_of(folder), weights_of(plain)) == 0
    assert len(file.read_text().splitlines()) >= 24


def test_the_store_of_the_examples_trains_to_the_same_weights(plain: Path, tmp_path: Path) -> None:
    store = {"backend": "examples.plug_in.store:ScoreLog", "options": {"name": "mine"}}
    folder = train(tmp_path / "run", {"store": store})
    assert distance(weights_of(folder), weights_of(plain)) == 0
    assert len((folder / "mine-0.txt").read_text().splitlines()) == 24


def test_the_tracker_of_the_examples_has_the_scores(tmp_path: Path) -> None:
    name = "examples.plug_in.tracker:ScoreFile"
    logging = {"trackers": [name], "tracker_options": {name: {"name": "mine.txt"}}}
    folder = train(tmp_path / "run", {"logging": logging})
    (round,) = read_events(folder / "events.jsonl").rounds
    assert (folder / "mine.txt").read_text() == f"1 {round.metrics['critic/score/mean']}\n"


class NotAnEngine:
    """Has no methods."""

    def __init__(self, context: EngineContext) -> None:
        pass


def not_a_store(context: StoreContext) -> object:
    return context


def without_context() -> None:
    pass


NUMBER = 7


@pytest.mark.parametrize(
    ("section", "values", "match"),
    [
        ("rollout", {"engine": "locl"}, r"rollout.engine: is 'locl'.*local"),
        ("rollout", {"engine": "no_such_module:Engine"}, "rollout.engine.*no module no_such_module"),
        ("rollout", {"engine": f"{HERE}:NotAnEngin"}, "rollout.engine.*is it NotAnEngine"),
        ("rollout", {"engine": f"{HERE}:NUMBER"}, "rollout.engine.*a int that cannot be called"),
        ("rollout", {"engine": f"{HERE}:without_context"}, "rollout.engine.*called with one argument"),
        ("rollout", {"engine": f"{HERE}:NotAnEngine"}, "rollout.engine.*without generate, update_weights"),
        (
            "rollout",
            {"engine": f"{HERE}:NotAnEngine", "engine_options": {"a": 1}},
            "rollout.engine_options.a is unknown",
        ),
        ("rollout", {"engine_options": {"a": 1}}, "rollout.engine_options.a is unknown to local"),
        ("store", {"options": {"b": 1}}, "store.options.b is set and store.backend is auto"),
        ("store", {"backend": "sqlit"}, r"store.backend: is 'sqlit'.*auto, sqlite, memory"),
        ("store", {"backend": f"{HERE}:nothing"}, "store.backend"),
        ("store", {"backend": f"{HERE}:not_a_store"}, "store.backend.*StoreContext without append"),
        ("store", {"backend": f"{HERE}:not_a_store", "options": {"b": 1}}, "store.options.b is unknown"),
    ],
)
def test_what_does_not_exist_or_does_not_fit_is_refused_by_its_key(
    tmp_path: Path, section: str, values: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        train(tmp_path / "run", {section: values})


class LoggedEngine(LocalEngine):
    """Writes to a file that it was opened and closed; the run may be in another process."""

    def __init__(self, context: EngineContext, file: str) -> None:
        super().__init__(context)
        self._file = Path(file)
        self._file.write_text("opened")

    def close(self) -> None:
        super().close()
        self._file.write_text("closed")


class UnreadableStore(MemoryStore):
    """Fails when a run looks for the sessions of earlier rounds."""

    def __init__(self, context: StoreContext, file: str) -> None:
        super().__init__()
        self._file = Path(file)
        self._file.write_text("opened")

    def rounds(self) -> dict[int, int]:
        raise StoreError("rounds cannot be read")

    def close(self) -> None:
        super().close()
        self._file.write_text("closed")


def test_a_run_that_fails_before_its_first_round_closes_engine_and_store(tmp_path: Path) -> None:
    engine_file, store_file = tmp_path / "engine", tmp_path / "store"
    engine = {"engine": f"{HERE}:LoggedEngine", "engine_options": {"file": str(engine_file)}}
    store = {"backend": f"{HERE}:UnreadableStore", "options": {"file": str(store_file)}}
    with pytest.raises(RaggedRightError, match="rounds cannot be read"):
        train(tmp_path / "first", {"rollout": engine, "store": store})
    assert (engine_file.read_text(), store_file.read_text()) == ("closed", "closed")
    with pytest.raises(ConfigError, match=r"store\.backend"):
        train(tmp_path / "third", {"rollout": engine, "store": {"backend": f"{HERE}:not_a_store"}})
    assert engine_file.read_text() == "closed"
    folder = write_run(tmp_path / "second", {"rollout": engine})
    (folder / "events.jsonl").write_text("damaged\n{}\n")
    with pytest.raises(RaggedRightError, match=r"events\.jsonl"):
        launch(load_config(folder / "config.toml"))
    assert engine_file.read_text() == "closed"
