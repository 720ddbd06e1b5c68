"""The whole run does not depend on how it is cut: the same rollouts and weights for any ranks, cuts and padding.

Every run below is the real trainer, from agents to the saved model. In float64, weights after two optimizer epochs
over round 1 agree to 1e-9; in float32, where AdamW's first steps are sign-like, gradients do to 1e-5. With trees, whose
shared prefixes add up before the model's own casts to float32, gradients agree to 1e-6 in float64 and weights to 1e-4;
where nothing is cast, weights agree to 1e-12.
"""

import json
from pathlib import Path

import pytest
import torch

from parallel.launch import launch
from parallel.whole_runs import (
    EXPERTS,
    IMAGES,
    IMAGES_AND_EXPERTS,
    adapter_of,
    distance,
    first_norm,
    gradient_of,
    rollouts_of,
    train_one,
    weights_of,
    write_run,
)
from raggedright.check.check_inputs import _Double
from raggedright.check.compare import relative_error
from raggedright.train.world import World

Changes = dict[str, dict[str, object]]

GAE: Changes = {"algorithm": {"advantages": "gae", "entropy_coef": 0.1}, "critic": {"mini_batch_size": 2, "lr": 1e-3}}
LORA: Changes = {"lora": {"rank": 2}}
CASES: dict[str, Changes] = {  # the first in every variant, the others in those of FEW, or in their own
    "steps token-mean": {},
    "steps session-mean": {"train": {"loss_agg": "session-mean"}},
    "lcm token-mean": {"train": {"align": "lcm"}},
    "lcm session-mean": {"train": {"align": "lcm", "loss_agg": "session-mean"}},
    "critic": GAE,
    "kl in the reward": {"reference": {"kl": "reward", "coef": 0.1}, "rollout": {"temperature": 0.7}},
    "kl in the loss": {"reference": {"kl": "loss", "coef": 0.1}, "algorithm": {"policy_loss": "gspo"}},
    "experts replayed": {**EXPERTS, "reference": {"kl": "loss", "coef": 0.1}},
    "experts balanced": {**EXPERTS, "experts": {"balance_coef": 0.1}},
    "temperatures": {
        "agent": {"name": "parallel.whole_runs:vary"},
        "rollout": {"temperature": 0.8},
        "reference": {"kl": "loss", "coef": 0.1},
    },
    "dynamic sampling": {
        "agent": {"name": "parallel.whole_runs:sparse"},
        "rollout": {"dynamic_sampling": True},
        "train": {"rounds": 2, "epochs": 1},
        "checkpoint": {"every": 1, "keep": 2},
        "store": {"keep_rounds": 2},
    },
    "images": {**IMAGES, "train": {"align": "lcm"}},
    "images and experts": {**IMAGES_AND_EXPERTS, "experts": {"balance_coef": 0.1}},
    "images, critic and kl": {**IMAGES, **GAE, "reference": {"kl": "loss", "coef": 0.1}},
    "lora": {**LORA, "reference": {"kl": "loss", "coef": 0.1}},
    "lora, experts": {**LORA, **EXPERTS, "experts": {"balance_coef": 0.1}},
    "lora, images and critic": {**LORA, **IMAGES, **GAE, "reference": {"kl": "reward", "coef": 0.1}},
}
ONE_RANK: dict[str, Changes] = {
    "rows alone": {"train": {"micro_batch_rows": 1}},
    "small packs": {"train": {"micro_batch_tokens": 27}},
    "rectangles": {"train": {"micro_batch_rows": 5, "collate": "padded"}},
    "trees": {"train": {"micro_batch_tokens": 48, "collate": "tree"}},
}
TWO_RANKS: dict[str, Changes] = {
    "two ranks": {"parallel": {"dp": 2}},
    "two ranks, rectangles": {"parallel": {"dp": 2}, "train": {"micro_batch_rows": 2, "collate": "padded"}},
    "two ranks, much padding": {
        "parallel": {"dp": 2},
        "train": {"micro_batch_rows": 3, "micro_batch_multiple": 24, "min_row_tokens": 11},
    },
    "two ranks, trees": {"parallel": {"dp": 2}, "train": {"collate": "tree"}},
}
THREE_RANKS: dict[str, Changes] = {
    "three ranks": {"parallel": {"dp": 3}},
    "three ranks, small packs": {"parallel": {"dp": 3}, "train": {"micro_batch_tokens": 30}},
}
FLOAT32: Changes = {"model": {"dtype": "float32"}}
SHARDED: dict[str, Changes] = {"two ranks, sharded": {"parallel": {"dp": 2, "shard": "fsdp2"}}}

EVERY = [*ONE_RANK, *TWO_RANKS, *THREE_RANKS, *SHARDED]
FEW = ["small packs", "two ranks, much padding", "two ranks, trees", "three ranks"]
SOME = {  # dearer than the others
    "images": ["small packs", "rectangles", "two ranks, much padding", "three ranks, small packs", *SHARDED],
    "images and experts": ["rectangles", "two ranks, much padding"],
    "images, critic and kl": [*SHARDED],
    "experts replayed": ["small packs", "two ranks", "three ranks"],
    "experts balanced": ["rectangles", "two ranks, much padding", "two ranks, sharded", "three ranks"],
    "lora": [*FEW, "rectangles", *SHARDED],
    "lora, experts": ["small packs", "two ranks, much padding", "three ranks", *SHARDED],
    "lora, images and critic": ["rectangles", "two ranks, much padding", *SHARDED],
}
Pairs = list[tuple[str, str]]
PAIRS: Pairs = [(c, variant) for i, c in enumerate(CASES) for variant in SOME.get(c, FEW if i else EVERY)]
MORE: Pairs = [  # in a slow test
    (c, variant) for c in ("steps session-mean", "lcm session-mean") for variant in EVERY if variant not in FEW
]


def merge(case: Changes, variant: Changes) -> Changes:
    return {name: {**case.get(name, {}), **variant.get(name, {})} for name in case.keys() | variant.keys()}


def train_runs(root: Path, pairs: Pairs, *more: Changes) -> None:
    """Each of these cases on one rank and in its variants, and `more` in every one but the sharded.

    The ranks of two and of three are started once.
    """
    for dp, variants in ((1, {"one rank": {}} | ONE_RANK), (2, TWO_RANKS | SHARDED), (3, THREE_RANKS)):
        folders = [
            write_run(root / case / variant, merge(CASES[case], variants[variant]))
            for case, variant in [*pairs, *((case, "one rank") for case in dict(pairs))]
            if variant in variants
        ]
        folders += [
            write_run(root / "float32" / variant, merge(changes, change))
            for changes in more
            for variant, change in variants.items()
            if variant not in SHARDED
        ]
        if dp == 1:
            for folder in folders:
                train_one(folder, World(0, 1, torch.device("cpu")))
        else:
            launch("parallel.whole_runs:train_all", dp, [str(folder) for folder in folders])


def check_same(root: Path, case: str, variant: str) -> None:
    """The variant's rollouts, and its weights to 1e-9 (trees: see above), are those of one rank."""
    alone, other = root / case / "one rank", root / case / variant
    assert rollouts_of(other) == rollouts_of(alone)
    if variant.endswith("trees"):
        assert relative_error(gradient_of(other), gradient_of(alone)) < 1e-6
    assert distance(weights_of(other), weights_of(alone)) < (1e-4 if variant.endswith("trees") else 1e-9)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train_runs(root, PAIRS, FLOAT32)
    return root


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize(("case", "variant"), PAIRS)
def test_rollouts_and_weights_are_those_of_one_rank(runs: Path, case: str, variant: str):
    check_same(runs, case, variant)


@pytest.mark.parametrize("case", ["steps token-mean", "lcm session-mean", "critic", "temperatures", "lora"])
def test_weights_of_trees_agree_to_1e_12_where_the_model_casts_nothing(tmp_path: Path, case: str):
    """A shared prefix adds up its gradient before a cast to float32, rows one by one after it: only that differs."""
    weights = []
    for variant in ({}, ONE_RANK["trees"]):
        folder = write_run(tmp_path / str(len(weights)), merge(CASES[case], variant))
        with _Double():
            train_one(folder, World(0, 1, torch.device("cpu")))
        weights.append(weights_of(folder))
    assert distance(*weights) < 1e-12


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_every_alignment_and_weighting_is_the_same_in_every_variant(tmp_path: Path):
    train_runs(tmp_path, MORE)
    for case, variant in MORE:
        check_same(tmp_path, case, variant)


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("variant", [*ONE_RANK, *TWO_RANKS, *THREE_RANKS])
def test_the_first_gradient_in_float32_is_that_of_one_rank(runs: Path, variant: str):
    alone, other = gradient_of(runs / "float32" / "one rank"), gradient_of(runs / "float32" / variant)
    assert rollouts_of(runs / "float32" / variant) == rollouts_of(runs / "float32" / "one rank")
    assert relative_error(other, alone) < 1e-5


@pytest.mark.xdist_group("launch")
def test_the_runs_that_are_compared_trained_and_differ_between_cases(runs: Path):
    weights = [weights_of(runs / case / "one rank") for case in CASES if not case.startswith(("images", "lora"))]
    assert all(first_norm(runs / case / "one rank") > 1e-3 for case in CASES)
    pairs = [(one, other) for i, one in enumerate(weights) for other in weights[:i] if one.keys() == other.keys()]
    assert len(pairs) == 37  # 9 dense models, 2 with experts
    assert all(distance(one, other) > 1e-6 for one, other in pairs)


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("case", [case for case in CASES if "lora" in case])
def test_the_adapters_that_are_compared_trained_and_nothing_else_did(runs: Path, case: str):
    gradient, adapter = gradient_of(runs / case / "one rank"), adapter_of(runs / case / "one rank")
    assert len(gradient) == len(adapter) >= 28
    assert all("lora_" in name for name in gradient)
    assert all(bool(weight.any()) for name, weight in adapter.items() if "lora_B" in name)  # they start at zero


@pytest.mark.xdist_group("launch")
def test_some_of_the_runs_have_padding_and_some_have_none(runs: Path):
    padding = {}
    for path in runs.glob("*/*/events.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        padding[path.parts[-3], path.parts[-2]] = next(e["padding_rows"] for e in lines if e["event"] == "round")
    assert padding["steps token-mean", "one rank"] == 0
    assert padding["steps token-mean", "two ranks, much padding"] > 5
    assert padding["lcm token-mean", "one rank"] > 0


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("variant", [variant for case, variant in PAIRS if case == "experts balanced"])
def test_loads_of_experts_do_not_depend_on_cut_or_padding(runs: Path, variant: str):
    alone, other = (_round_metrics(runs / "experts balanced" / name) for name in ("one rank", variant))
    names = [name for name in alone if name.startswith(("actor/experts/", "actor/balance_loss"))]
    assert len(names) == 4
    assert [other[name] for name in names] == pytest.approx([alone[name] for name in names], rel=1e-12)


def _round_metrics(folder: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return next(line["metrics"] for line in lines if line["event"] == "round")


@pytest.mark.xdist_group("launch")
def test_the_vision_tower_trains(runs: Path):
    gradient = gradient_of(runs / "images" / "one rank")
    tower = {name: grad.norm().item() for name, grad in gradient.items() if ".visual." in name}
    assert len(tower) > 20
    assert min(tower.values()) > 0


SIGNAL = (
    "critic/score/std", "prompts/no_signal_ratio", "prompts/sampled", "response_length/clip_ratio",
    "sessions/failed_ratio", "rows/no_loss_ratio",
)  # fmt: skip


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("variant", FEW)
def test_with_dynamic_sampling_prompts_ledger_and_metrics_are_those_of_one_rank(runs: Path, variant: str):
    """Both rounds: the second one's prompts depend on how many the first one drew."""
    alone, other = (_rounds(runs / "dynamic sampling" / name) for name in ("one rank", variant))
    for one, two in zip(alone, other, strict=True):
        assert [two["metrics"][name] for name in SIGNAL] == [one["metrics"][name] for name in SIGNAL]
        assert two["ledger"]["sessions"] == one["ledger"]["sessions"]
        assert two["ledger"]["rows"] == one["ledger"]["rows"]
        assert two["optimizer_steps"] == 2
        sessions = one["ledger"]["sessions"]
        assert sessions["skipped (no signal)"] > 0
        assert sum(sessions.values()) == 4 * one["metrics"]["prompts/sampled"] == one["sessions"]
        assert one["metrics"]["prompts/sampled"] > 6


def _rounds(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "round"]
