"""Folders of Hugging Face datasets as tasks: what is read, without a network, and what is refused."""

import json
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from raggedright.agents import dataset_folder
from raggedright.agents.task_sources import load_tasks
from raggedright.errors import ConfigError

ROWS = [{"question": f"q{i}", "nested": {"numbers": [i, i + 1]}} for i in range(10)]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    """No network, and a cache of the test's own."""

    def refuse(*_arguments, **_named):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def load(folder: Path, **options):
    return load_tasks(str(folder), seed=0, options=options)


def data(tasks) -> list[object]:
    return sorted((task.data for task in tasks.of_round(1, tasks.num_different)), key=str)


def write_files(folder: Path, **splits) -> Path:
    (folder / "data").mkdir(parents=True)
    for name, rows in splits.items():
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("kind", ["saved", "saved with splits", "parquet", "jsonl"])
def test_every_kind_of_folder_has_the_same_tasks(tmp_path: Path, kind: str):
    folder, rows = tmp_path / "set", Dataset.from_list(ROWS)
    if kind == "saved":
        rows.save_to_disk(folder)
    elif kind == "saved with splits":
        DatasetDict({"test": rows}).save_to_disk(folder)
    elif kind == "parquet":
        folder.mkdir()
        rows.to_parquet(folder / "train-00000-of-00001.parquet")
    else:
        write_files(folder, train=ROWS)
    tasks = load(folder)
    assert data(tasks) == ROWS
    assert sorted(task.uid for task in tasks.of_round(2, 10)) == [str(i) for i in range(10)]


@pytest.mark.parametrize("saved", [True, False])
def test_a_split_or_a_part_of_it_is_chosen(tmp_path: Path, saved: bool):
    folder = tmp_path / "set"
    if saved:
        DatasetDict({"train": Dataset.from_list(ROWS[:8]), "test": Dataset.from_list(ROWS[8:])}).save_to_disk(folder)
    else:
        write_files(folder, train=ROWS[:8], test=ROWS[8:])
    assert data(load(folder, split="test")) == ROWS[8:]
    assert data(load(folder, split="train[:25%]")) == ROWS[:2]
    assert data(load(folder, split="train[6:]")) == ROWS[6:8]


def test_a_configuration_of_the_folder_is_chosen_by_its_name(tmp_path: Path):
    folder = write_files(tmp_path / "set", easy=ROWS[:1], hard=ROWS[1:])
    configs = [{"config_name": name, "data_files": f"data/{name}.jsonl"} for name in ("easy", "hard")]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    assert data(load(folder, name="easy")) == ROWS[:1]
    with pytest.raises(ConfigError, match=r"prompts\.source .*'easy', 'hard'"):
        load(folder)


def test_uids_of_the_rows_are_kept_and_must_differ(tmp_path: Path):
    Dataset.from_list([{"uid": "a"}, {"uid": "b"}]).save_to_disk(tmp_path / "good")
    Dataset.from_list([{"uid": "a"}, {"uid": "a"}]).save_to_disk(tmp_path / "twice")
    assert sorted(task.uid for task in load(tmp_path / "good").of_round(1, 2)) == ["a", "b"]
    with pytest.raises(ConfigError, match=r"twice, row 1: field uid is 'a', as in .*, row 0"):
        load(tmp_path / "twice")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"prompts\.source is .* has splits train, test; set prompts\.options\.split"),
        ({"split": "tran"}, r"prompts\.options\.split is 'tran' .*train, test"),
        ({"split": "train[:"}, r"prompts\.options\.split is"),
        ({"split": "train+test"}, r"prompts\.options\.split is 'train\+test'; it takes one split"),
        ({"split": "train[8:]"}, r"prompts\.options\.split is 'train\[8:\]', which has no rows; train has 8"),
        ({"split": 3}, r"prompts\.options\.split is 3; it takes text"),
        ({"spit": "train"}, r"prompts\.options\.spit is unknown"),
    ],
)
def test_options_that_are_wrong_are_told(tmp_path: Path, options, message):
    folder = write_files(tmp_path / "set", train=ROWS[:8], test=ROWS[8:])
    with pytest.raises(ConfigError, match=message):
        load(folder, **options)


def test_a_folder_without_a_dataset_is_told(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_text("no")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "state.json").write_text("{")
    for name in ("empty", "broken", "cut"):
        with pytest.raises(ConfigError, match=rf"prompts\.source is .*{name}, which is no folder of a dataset"):
            load(tmp_path / name)


def test_files_of_another_machine_are_not_fetched(tmp_path: Path):
    folder = tmp_path / "set"
    folder.mkdir()
    files = [{"config_name": "default", "data_files": "https://example.com/train.jsonl"}]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(files)}\n---\n")
    with pytest.raises(ConfigError, match=r"prompts\.source .* no folder of a dataset"):
        load(folder)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dataset_folder, "find_spec", lambda name: None if name == "datasets" else find_spec(name))
    with pytest.raises(ConfigError, match=r"prompts\.source is .*, a folder, which needs datasets; .*\[tasks\]"):
        load(tmp_path)


def test_a_file_takes_no_options(tmp_path: Path):
    (tmp_path / "t.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"prompts\.options has split and prompts\.source is a file"):
        load(tmp_path / "t.jsonl", split="train")
