"""Whole training runs in one set of ranks: what each leaves behind, compared with another's."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from raggedright.agents.agent_session import Session, Task
from raggedright.agents.digits import SYMBOLS, digits_of
from raggedright.agents.tiles import END, START, paint
from raggedright.agents.tiles import SYMBOLS as TILE_SYMBOLS
from raggedright.config import dump_config, load_config
from raggedright.config.load import make_config
from raggedright.sessions import TOKEN_FIELDS
from raggedright.store.sqlite import SqliteStore
from raggedright.train.loop import train
from raggedright.train.update import Learner
from raggedright.train.world import World

BASE: dict[str, Any] = {
    "seed": 3,
    "model": {
        "made": {
            "model_type": "qwen3",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
        },
        "symbols": SYMBOLS,
        "dtype": "float64",
    },
    "prompts": {"source": "raggedright.agents.digits:tasks"},
    "agent": {"name": "parallel.whole_runs:wander"},
    "rollout": {"n": 4, "max_tokens": 4, "max_row_tokens": 24},
    # 3 prompts x 4 sessions divide by 1, 2 and 3 ranks, so that lcm asks for the same row counts of all
    "train": {"rounds": 1, "batch_size": 6, "mini_batch_size": 3, "epochs": 2},
    "algorithm": {"entropy_coef": 0.1},
    "optimizer": {"lr": 3e-3},
    "logging": {"trackers": []},
}
IMAGES: dict[str, dict[str, object]] = {
    "model": {
        "made": {
            "model_type": "qwen3_vl",
            "text_config": {
                **{name: value for name, value in BASE["model"]["made"].items() if name != "model_type"},
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 7,
                "out_hidden_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
                "initializer_range": 0.1,
            },
        },
        "symbols": TILE_SYMBOLS,
    },
    "prompts": {"source": "raggedright.agents.tiles:tasks"},
    "agent": {"name": "parallel.whole_runs:look"},
}


async def look(task: Task, session: Session) -> float:
    """One to three trajectories of two turns, some with an image in the prompt, some with one between the turns."""
    good, draw, seen = 0, session.random, f"{START}{session.image}{END}"
    for i in range(draw.randint(1, 3)):
        images = [paint(draw.choices("rgb", k=draw.randint(1, 3)), draw) for _ in range(2)]
        first_shown, second_shown = draw.random() < 0.4, draw.random() < 0.4
        trajectory = session.trajectory(f"{i}:{seen if first_shown else 'rg'}=", images=images[:1] * first_shown)
        first = await trajectory.generate(max_tokens=draw.randint(1, 4))
        trajectory.observe(f"g{seen if second_shown else ''}", images=images[1:] * second_shown)
        second = await trajectory.generate(max_tokens=2)
        good += sum(token % 3 == 0 for token in (*first.ids, *second.ids))
    return good / 4


SPARSE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
EXPERTS: dict[str, dict[str, object]] = {
    "model": {"made": {**BASE["model"]["made"], **SPARSE, "model_type": "qwen3_moe"}},
}
IMAGES_AND_EXPERTS: dict[str, dict[str, Any]] = deepcopy(IMAGES)
IMAGES_AND_EXPERTS["model"]["made"]["model_type"] = "qwen3_vl_moe"
IMAGES_AND_EXPERTS["model"]["made"]["text_config"] |= SPARSE


async def wander(task: Task, session: Session) -> float:
    """One to three trajectories of two turns and an observation between, with rewards that an untrained model gets."""
    good = 0
    for i in range(session.random.randint(1, 3)):
        trajectory = session.trajectory("m" * (i + 1) + "".join(map(str, digits_of(task))) + "=", role=f"turn {i}")
        first = await trajectory.generate(max_tokens=session.random.randint(1, 4))
        trajectory.observe("|7:")
        second = await trajectory.generate(max_tokens=2)
        good += sum(token % 3 == 0 for token in (*first.ids, *second.ids))
        if i == 1:
            trajectory.reward = good / 2
    return good / 4


async def vary(task: Task, session: Session) -> float:
    """Two trajectories: one whose turns have temperatures of their own, greedy ones among them, and a plain one."""
    good, prompt = 0, "".join(map(str, digits_of(task))) + "="
    for own in (True, False) if session.random.random() < 0.8 else (False,):
        trajectory = session.trajectory(f"m{prompt}" if own else prompt)
        for temperature in (None, 0.5, 0, 1.7):
            reply = await trajectory.generate(max_tokens=2, temperature=temperature if own else None)
            good += sum(token % 3 == 0 for token in reply.ids)
    return good / 4


async def sparse(task: Task, session: Session) -> float:
    """As `wander`, but four prompts of seven have one score in all their sessions, and some first sessions fail."""
    if int(task.uid) % 11 == 0 and session.key.session == 0:
        raise ValueError("no luck")
    score = await wander(task, session)
    return score if int(task.uid) % 7 in (0, 3, 5) else 0.25


async def spread(task: Task, session: Session) -> float:
    """As `wander`, but that no two sessions of a prompt have the same score."""
    return await wander(task, session) + session.key.session / 1000


def write_run(folder: Path, *changes: dict[str, dict[str, object]]) -> Path:
    """A run folder with a config, the base one with changes."""
    values: dict[str, object] = {**BASE, "out": str(folder)}
    for change in changes:
        for name, section in change.items():
            inside = values.get(name, {})
            assert isinstance(inside, dict)
            values[name] = {**inside, **section}
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(make_config(values, source=str(folder))))
    return folder


def train_all(folders: list[str]) -> None:
    """Train each run in these ranks, in turn."""
    world = World.of_group(torch.device("cpu"))
    for folder in folders:
        train_one(Path(folder), world)


def train_one(folder: Path, world: World) -> None:
    """Train to the end; the actor's first gradient, summed over ranks, is left in a file of its own."""
    torch.set_num_threads(1)
    clip = Learner._clip

    def keep(self: Learner, vectors: Sequence[torch.Tensor]) -> float:
        if self.name == "actor" and world.is_first and not (folder / "gradient.safetensors").exists():
            save_file(_plain(self), folder / "gradient.safetensors")
        return clip(self, vectors)

    Learner._clip = keep
    try:
        assert train(load_config(folder / "config.toml"), world) == "finished"
    finally:
        Learner._clip = clip


def _plain(learner: Learner) -> dict[str, torch.Tensor]:
    """Gradients of a model that is not sharded; gathering sharded ones takes all ranks."""
    found = {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}
    return {name: grad.clone() for name, grad in found.items() if not isinstance(grad, DTensor)}


def gradient_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "gradient.safetensors")


def first_norm(folder: Path) -> float:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return next(line["metrics"]["actor/grad_norm"] for line in lines if line["event"] == "round")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of the exported model and, with LoRA, of the adapter that is merged into it."""
    return load_file(folder / "model" / "model.safetensors") | adapter_of(folder)


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "adapter" / "adapter_model.safetensors"
    return load_file(file) if file.exists() else {}


def rollouts_of(folder: Path) -> dict[str, list[list[float]]]:
    """Token ids and masks of round 1's rows, by key."""
    with SqliteStore(folder / "rows.db") as store:
        table = store.sessions(1)
        keys = table.row_keys(np.arange(len(table.rows)))
        rows = store.read(keys, TOKEN_FIELDS[:2])
    return {str(key): [row[name].tolist() for name in TOKEN_FIELDS[:2]] for key, row in zip(keys, rows, strict=True)}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two models' weights."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
