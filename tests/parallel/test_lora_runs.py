"""LoRA in whole runs: the base stays, the reference is the base, and every way to load the result agrees."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from parallel.launch import launch
from parallel.test_resume import train_until
from parallel.whole_runs import BASE, EXPERTS, adapter_of, distance, train_one, weights_of, write_run
from raggedright.config import load_config
from raggedright.store.sqlite import SqliteStore
from raggedright.train import loop
from raggedright.train.checkpoint import last_checkpoint
from raggedright.train.load_models import load_actor, load_tokenizer
from raggedright.train.setup import Setup, set_up
from raggedright.train.world import World

Changes = dict[str, dict[str, object]]

ALONE = World(0, 1, torch.device("cpu"))
LORA: Changes = {"lora": {"rank": 2}, "reference": {"kl": "loss", "coef": 0.1}}
ROUNDS: Changes = {
    "train": {"rounds": 3, "epochs": 1, "mini_batch_size": 6},
    "checkpoint": {"every": 1, "keep": 3},
    "store": {"keep_rounds": 3},
}


def trained(folder: Path, *changes: Changes) -> Path:
    train_one(write_run(folder, LORA, *changes), ALONE)
    return folder


def base_of(folder: Path) -> nn.Module:
    config = load_config(folder / "config.toml")
    return load_actor(config.model, load_tokenizer(config.model), seed=config.seed)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["event"] == "round"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("whole") / "run", ROUNDS)


def test_the_base_does_not_change_by_one_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    setups: list[Setup] = []

    def keep(*args) -> Setup:
        setups.append(set_up(*args))
        return setups[0]

    monkeypatch.setattr(loop, "set_up", keep)
    folder = trained(tmp_path / "run")
    base, after = base_of(folder).state_dict(), setups[0].full_model.state_dict()
    frozen = {name.replace(".base_layer", ""): weight for name, weight in after.items() if "lora_" not in name}
    assert frozen.keys() == base.keys()
    assert all(torch.equal(weight, base[name]) for name, weight in frozen.items())
    assert setups[0].reference is setups[0].actor.model  # no second copy
    assert distance(weights_of(folder), {**base, **adapter_of(folder)}) > 1e-3  # the export is merged


def test_the_kl_to_the_base_is_zero_at_the_first_step_and_not_later(whole: Path):
    first, *later = (metrics["actor/kl_loss"] for metrics in metrics_of(whole))
    assert first == 0
    assert min(later) > 1e-5


def test_a_run_that_was_cut_has_the_adapter_of_one_that_was_not(
    monkeypatch: pytest.MonkeyPatch, whole: Path, tmp_path: Path
):
    folder = write_run(tmp_path / "run", LORA, ROUNDS)
    train_until(monkeypatch, folder, 2, crash=True)
    train_one(folder, ALONE)
    assert distance(weights_of(folder), weights_of(whole)) == 0


@pytest.mark.xdist_group("launch")
def test_a_run_goes_on_sharded_over_two_ranks(monkeypatch: pytest.MonkeyPatch, whole: Path, tmp_path: Path):
    folder = write_run(tmp_path / "run", LORA, ROUNDS)
    train_until(monkeypatch, folder, 2, crash=False)
    again = write_run(tmp_path / "again", LORA, ROUNDS, {"parallel": {"dp": 2, "shard": "fsdp2"}})
    (folder / "config.toml").write_text((again / "config.toml").read_text().replace(str(again), str(folder)))
    launch("parallel.whole_runs:train_all", 2, [str(folder)])
    assert distance(weights_of(folder), weights_of(whole)) < 1e-9


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_holds_the_adapter_and_its_optimizer_alone(tmp_path: Path, tied: bool):
    """Tied weights have two names, of which torch knows only one as frozen."""
    folder = trained(tmp_path / "run", {"model": {"made": {**BASE["model"]["made"], "tie_word_embeddings": tied}}})
    checkpoint = last_checkpoint(folder)
    assert checkpoint is not None
    names = list(FileSystemReader(checkpoint[1]).read_metadata().state_dict_metadata)
    models = [name for name in names if name.startswith("actor model.")]
    assert len(models) == len(adapter_of(folder)) == 28
    assert all("lora_" in name or "param_groups" in name for name in names)


def test_adapter_merged_model_and_engine_have_the_same_log_probs(tmp_path: Path):
    """In float32. The engine sampled the second round with the weights that a run of one round exports."""
    single: Changes = {"model": {"dtype": "float32"}}
    one = trained(tmp_path / "one", ROUNDS, single, {"train": {"rounds": 1}})
    two = trained(tmp_path / "two", ROUNDS, single, {"train": {"rounds": 2}})
    base = base_of(one)
    with torch.no_grad():
        plain = [log_probs_of(base, row) for row in rows_of(two, 2)]
    merged = AutoModelForCausalLM.from_pretrained(one / "model", dtype=torch.float32)
    unmerged = PeftModel.from_pretrained(base, str(one / "adapter"))
    apart = 0.0
    with torch.no_grad():
        for row, before in zip(rows_of(two, 2), plain, strict=True):
            sampled = torch.from_numpy(row["response_mask"]).bool()
            recorded = torch.from_numpy(row["rollout_log_probs"]).float()[sampled]
            ours, theirs = log_probs_of(merged, row), log_probs_of(unmerged, row)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            torch.testing.assert_close(ours[sampled], recorded, rtol=0, atol=1e-5)
            apart = max(apart, float((ours - before).abs().max()))
    assert apart > 1e-2


def rows_of(folder: Path, round: int) -> list[Mapping[str, NDArray]]:
    with SqliteStore(folder / "rows.db") as store:
        table = store.sessions(round)
        return list(store.read(table.row_keys(np.arange(len(table.rows)))))


def log_probs_of(model: nn.Module, row: Mapping[str, NDArray]) -> torch.Tensor:
    """Of the response's tokens, with transformers and nothing of ours."""
    ids = torch.from_numpy(row["input_ids"]).long()
    log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, ids[1:, None])[-len(row["response_mask"]) :, 0]


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_activation_checkpointing_changes_no_adapter(tmp_path: Path, changes: Changes):
    plain = trained(tmp_path / "plain", changes)
    model: Changes = {"model": {**changes.get("model", {}), "activation_checkpointing": True}}
    run = trained(tmp_path / "run", changes, model)
    assert distance(weights_of(run), weights_of(plain)) < 1e-12


@pytest.mark.parametrize(
    "model", [{"dtype": "bfloat16"}, {"dtype": "float32", "compute_dtype": "bfloat16"}], ids=["bfloat16", "mixed"]
)
def test_half_precision_trains_an_adapter_in_float32(tmp_path: Path, model: dict[str, object]):
    run = trained(tmp_path / "run", {"model": model})
    adapter = adapter_of(run)
    assert {weight.dtype for weight in adapter.values()} == {torch.float32}
    assert all(bool(weight.any()) for name, weight in adapter.items() if "lora_B" in name)
    assert abs(metrics_of(run)[0]["rollout_corr/kl"]) < 1e-2  # the engine samples from what trains
