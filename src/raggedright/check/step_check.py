"""Compare optimizer steps of the trainer in two real processes with torch's AdamW on plain gradients in one process.

Each process is a rank of a gloo group: `train_role` runs its micro-batches, `Learner` sums gradients over ranks, clips
them and steps. Weights are compared in float64, relative to how far they moved.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raggedright.check.cases import Case, Line, short_name
from raggedright.check.compare import ACTOR_FIELDS, CRITIC_FIELDS, batch_of, load_case, role_of, run_reference
from raggedright.check.plain_losses import CLIP_HIGH, CLIP_LOW, DUAL_CLIP, ENTROPY_COEF, KL_COEF, VALUE_CLIP
from raggedright.config.load import make_config
from raggedright.config.schema import Config
from raggedright.errors import RaggedRightError
from raggedright.train.update import Learner, actor_loss, critic_loss, train_role
from raggedright.train.world import World, loopback

TOLERANCE = 1e-10
NUM_RANKS = 2
_OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01, "grad_clip": 0.5}
_TIMEOUT = 300.0  # seconds


def step_cases(actors: Sequence[str], critics: Sequence[str]) -> list[Case]:
    """One case per actor, packed and padded in turn, and a packed one per critic, on two ranks."""
    cases = []
    for number, name in enumerate(actors):
        collate = "padded" if number % 2 else "packed"
        cases.append(Case(model=name, collate=collate, kl="k3", entropy=True, dual_clip=True, dp=NUM_RANKS))
    return cases + [Case(model=name, loss="value", dp=NUM_RANKS) for name in critics]


def run_steps(cases: Sequence[Case]) -> list[Line]:
    """Run all cases in one launch of real processes, and compare."""
    with TemporaryDirectory(prefix="raggedright-check-") as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
        _launch(folder)
        return [compare_weights(case, load_file(folder / f"{number}.safetensors")) for number, case in enumerate(cases)]


def _launch(folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
    with ExitStack() as stack:
        ranks = []
        for dp_rank in range(NUM_RANKS):
            log = stack.enter_context((folder / f"{dp_rank}.log").open("w"))
            command = [sys.executable, "-m", "raggedright.check.step_check", str(folder), str(dp_rank)]
            ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
            stack.callback(ranks[-1].kill)
        codes = [rank.wait(timeout=_TIMEOUT) for rank in ranks]
    for dp_rank, code in enumerate(codes):
        if code:
            lines = (folder / f"{dp_rank}.log").read_text(errors="replace").strip().splitlines()
            raise RaggedRightError(f"check: rank {dp_rank} of {NUM_RANKS} ended with {code} ({lines[-1:]})")


def _rank(folder: Path, dp_rank: int) -> None:
    """The program of each process."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=dp_rank, world_size=NUM_RANKS, timeout=timeout
    )
    world = World.of_group(torch.device("cpu"))
    for number, values in enumerate(json.loads((folder / "cases.json").read_text())):
        weights = train_case(Case(**values), world)
        if world.is_first:
            save_file(weights, folder / f"{number}.safetensors")
    dist.barrier()
    world.leave()


def train_case(case: Case, world: World) -> dict[str, Tensor]:
    """Take a role's steps with the trainer's code and return the weights; the model is left as it was."""
    model, made_up = load_case(case)
    before = _weights(model)
    batch, config, role = batch_of(case, made_up, model), _config(case), role_of(case)
    learner = Learner(role, model, config.critic if case.critic else config.optimizer, world)
    loss = (critic_loss if case.critic else actor_loss)(config, learner)
    names = CRITIC_FIELDS if case.critic else ACTOR_FIELDS
    train_role(learner, batch, loss, names, config=config, round=1)
    after = _weights(model)
    model.load_state_dict(before, strict=False)  # cases share the model
    return after


def compare_weights(case: Case, weights: dict[str, Tensor]) -> Line:
    """The difference from the same steps on plain gradients, relative to how far the weights moved."""
    model, made_up = load_case(case)
    batch, before = batch_of(case, made_up, model), _weights(model)
    settings = {name: value for name, value in _OPTIMIZER.items() if name != "grad_clip"}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **settings)
    steps = [step for step in batch.plan.steps(role_of(case)) if not step.skipped]
    for step in steps:
        gradient, _ = run_reference(model, made_up, batch, step, case)
        for name, parameter in trained.items():
            parameter.grad = gradient.get(name, torch.zeros_like(parameter))
        nn.utils.clip_grad_norm_(trained.values(), _OPTIMIZER["grad_clip"])
        optimizer.step()
        model.zero_grad(set_to_none=True)
    expected = _weights(model)
    model.load_state_dict(before, strict=False)
    apart = sum(float((weights[name] - expected[name]).square().sum()) for name in expected) ** 0.5
    moved = sum(float((before[name] - expected[name]).square().sum()) for name in expected) ** 0.5
    role = " of a critic" if case.critic else ""
    subject = f"{short_name(case.model)}, {case.collate}, {len(steps)} steps{role}"
    return Line.of("weights after AdamW, two processes", subject, [apart / moved], TOLERANCE)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _config(case: Case) -> Config:
    return make_config(
        {
            "model": {"made": {"model_type": "qwen3"}, "symbols": "01", "dtype": "float64"},
            "prompts": {"source": "tasks.jsonl"},
            "agent": {"name": "compaction"},
            "train": {"rounds": 2, "batch_size": 6, "mini_batch_size": 3},
            "algorithm": {
                "advantages": "gae" if case.critic else "grpo",
                "policy_loss": "ppo" if case.critic else case.loss,
                "clip_low": CLIP_LOW,
                "clip_high": CLIP_HIGH,
                "dual_clip": DUAL_CLIP,
                "entropy_coef": ENTROPY_COEF,
            },
            "reference": {"kl": "loss", "coef": KL_COEF, "estimator": "k3"},
            "optimizer": _OPTIMIZER,
            **({"critic": {**_OPTIMIZER, "mini_batch_size": 2, "value_clip": VALUE_CLIP}} if case.critic else {}),
            "parallel": {"dp": NUM_RANKS},
        },
        source="check",
    )


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]))
