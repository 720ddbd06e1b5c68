"""What each rank does for an exactness job: its own share of every step, summed over ranks, beside the plain way.

A job of dp 2 is run by the first two of the processes, as a group of its own: data-parallel size is not world size.
All jobs are first run together; then each process compares its part of them by itself, so that no core waits.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel.gradients import gather_gradients
from raggedright.check.cases import Case
from raggedright.check.check_inputs import DTYPES, load_model, make_up
from raggedright.check.compare import batch_of, largest_drift, relative_error, role_of, run_rank, run_reference
from raggedright.check.plain_losses import MadeUp
from raggedright.plan.cut import Step
from raggedright.tensors.parallel import shard, sum_gradients, sum_metrics
from raggedright.tensors.tensor_batch import TensorBatch

NUM_EXPERTS = 4  # of the tiny MoE
EXACT = ("replicated", "fsdp2")
WRONG = ("averaged", "loss x dp")  # what FSDP2 does unasked; and the loss scaled up to undo it


@dataclass(frozen=True, slots=True)
class Job:
    """A case on made-up rows, run in each of the modes."""

    case: Case
    num_prompts: int = 6
    seed: int = 0
    modes: tuple[str, ...] = EXACT


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far one step of a job, run in one mode, is from the plain way."""

    job: Job
    mode: str
    rel_error: float
    metric_drift: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a rank met in a job."""

    job: Job
    digest: str
    situations: tuple[str, ...]
    padding_gradient: tuple[str, ...]  # of each step in which it had padding only


def run_jobs(data: list[dict]) -> dict[str, list[dict]]:
    """The target of a launch: outcomes of this process's part of the jobs, and what it found in all that it ran."""
    jobs = [_job(item) for item in data]
    for dp in sorted({job.case.dp for job in jobs}):  # in the same order everywhere
        _group(dp)
    found, kept = [], []
    for number, job in enumerate(jobs):
        if dist.get_rank() >= job.case.dp:
            continue
        print(f"job {number}: {job}", flush=True)
        new, steps = _run(job)
        found.append(new)
        if number % job.case.dp == dist.get_rank():
            kept += steps
    print("all jobs ran", flush=True)
    outcomes = [outcome for step in kept for outcome in _compare(*step)]
    return {"outcomes": [asdict(o) for o in outcomes], "found": [asdict(f) for f in found]}


def read_answers(answers: list[dict[str, list[dict]]]) -> tuple[list[Outcome], list[list[Found]]]:
    """Outcomes of all ranks, and what each found."""
    outcomes = [Outcome(**{**o, "job": _job(o["job"])}) for answer in answers for o in answer["outcomes"]]
    found = [[Found(**{**f, "job": _job(f["job"])}) for f in answer["found"]] for answer in answers]
    return outcomes, found


def _job(item: dict) -> Job:
    return Job(**{**item, "case": Case(**item["case"]), "modes": tuple(item["modes"])})


@lru_cache
def _group(dp: int) -> dist.ProcessGroup | None:
    """The first `dp` processes; None stands for all."""
    return None if dp == dist.get_world_size() else dist.new_group(list(range(dp)))  # pyright: ignore


def _run(job: Job) -> tuple[Found, list]:
    """Run a job together with the other ranks: what was met, and the sums of each step."""
    dp_rank, (model, made_up) = dist.get_rank(), _load(job)
    batch = batch_of(job.case, made_up, model)
    situations, padding_gradient, steps = set(), [], []
    for step in batch.plan.steps(role_of(job.case)):  # pyright: ignore[reportArgumentType]
        if step.skipped:
            continue
        with _experts_used(model) as used:
            sums = {mode: _run_mode(mode, job, batch, step, padding_gradient) for mode in job.modes}
        situations |= _situations(batch, step, dp_rank, used)
        steps.append((job, batch, step, sums))
    return Found(job, batch.plan.digest(), tuple(sorted(situations)), tuple(padding_gradient)), steps


def _load(job: Job) -> tuple[nn.Module, MadeUp]:
    kind = _kind(job.case)
    return _model(*kind), _made_up(job.num_prompts, job.seed, *kind)


def _kind(case: Case) -> tuple[str, str, bool, bool]:
    return case.model, case.dtype, case.critic, case.collate != "tree"


@lru_cache
def _model(name: str, dtype: str, critic: bool, casts: bool) -> nn.Module:
    return load_model(name, dtype, critic=critic, casts=casts)


@lru_cache
def _sharded(dp: int, average: bool, name: str, dtype: str, critic: bool, casts: bool) -> nn.Module:
    model = shard(copy.deepcopy(_model(name, dtype, critic, casts)), _group(dp))
    for module in model.modules():
        if isinstance(module, FSDPModule) and average:
            module.set_gradient_divide_factor(float(dp))
    return model


@lru_cache
def _made_up(num_prompts: int, seed: int, name: str, dtype: str, critic: bool, casts: bool) -> MadeUp:
    return make_up(_model(name, dtype, critic, casts), DTYPES[dtype], num_prompts=num_prompts, seed=seed)


def _run_mode(
    mode: str, job: Job, batch: TensorBatch, step: Step, padding_gradient: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient and metrics of a step, summed over ranks."""
    case, dp_rank, group = job.case, dist.get_rank(), _group(job.case.dp)
    kind = _kind(case)
    model = _model(*kind) if mode == "replicated" else _sharded(case.dp, mode in WRONG, *kind)
    if mode == "loss x dp":
        step = replace(step, weight=step.weight * case.dp)
    metrics = run_rank(model, batch, step, dp_rank, case)
    if mode == "replicated" and _padding_only(batch, step, dp_rank):
        padding_gradient.append(_what_is(model))
    sum_gradients(model, group)
    gradient = gather_gradients(model)
    model.zero_grad(set_to_none=True)
    return gradient, sum_metrics(metrics, group)


def _compare(job: Job, batch: TensorBatch, step: Step, sums: dict) -> Iterator[Outcome]:
    model, made_up = _load(job)
    expected, expected_metrics = run_reference(model, made_up, batch, step, job.case)
    for mode, (gradient, metrics) in sums.items():
        yield Outcome(job, mode, relative_error(gradient, expected), largest_drift(metrics, expected_metrics))


def _positions(step: Step, dp_rank: int) -> list[np.ndarray]:
    return [step.micro_batch(dp_rank, slot) for slot in range(step.num_slots)]


def _padding_only(batch: TensorBatch, step: Step, dp_rank: int) -> bool:
    return all(batch.rows.is_padding[position].all() for position in _positions(step, dp_rank))


def _what_is(model: nn.Module) -> str:
    """`zero`, or which parameter's gradient is something else (NaN is something else)."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            return f"{name} has none"
        if parameter.grad.any():
            return f"{name} is not zero"
    return "zero"


def _situations(batch: TensorBatch, step: Step, dp_rank: int, used: list[set[int]]) -> set[str]:
    """The awkward things that a step asked of this rank."""
    ranks = [_positions(step, rank) for rank in range(step.dp_size)]
    images = np.array([[any(_has_image(batch, p) for p in position) for position in rank] for rank in ranks])
    checks = {
        "padding only": _padding_only(batch, step, dp_rank),
        "empty micro-batch": any(len(position) == 0 for position in ranks[dp_rank]),
        "no image beside images": (~images[dp_rank] & images.any(axis=0)).any(),
        "idle expert": any(len(experts) < NUM_EXPERTS for experts in used),
    }
    if checks["padding only"]:
        return {"padding only"}  # the rest would be no surprise
    return {name for name, is_so in checks.items() if is_so}


def _has_image(batch: TensorBatch, position: int) -> bool:
    return bool(batch.fields[position].get("multi_modal_inputs"))


@contextmanager
def _experts_used(model: nn.Module) -> Iterator[list[set[int]]]:
    """The experts of each layer that some token of this rank goes to; none for a model without experts."""
    used: list[set[int]] = []
    handles = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            used.append(set())
            handles.append(module.register_forward_hook(partial(_note_experts, used[-1])))
    yield used
    for handle in handles:
        handle.remove()


def _note_experts(used: set[int], _router: nn.Module, _inputs: object, outputs: tuple[Tensor, ...]) -> None:
    used.update(outputs[2].flatten().tolist())
