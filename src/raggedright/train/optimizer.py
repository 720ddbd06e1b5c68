"""One optimizer step of a model: gradients summed over ranks, clipped, AdamW at the schedule's learning rate.

The schedule is a function of the share of the run that is done, so that its length is the run's true number of
optimizer steps whatever the row counts are; under align lcm, where a round has as many steps as its rows ask for,
it advances by the same share every round.

The surprise: a parameter without a gradient has a gradient of zero, on one rank as on many.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raggedright.config.sections import Optimizer
from raggedright.tensors.parallel import join_gradients
from raggedright.train.world import TrainError, World

NORM_PART = 2**22  # numbers of one sum of squares: float32 loses digits over many more


def scale(settings: Optimizer, done: float) -> float:
    """The learning rate as a share of `lr` in a step after which `done` of the run is done (0 < done <= 1)."""
    if done < settings.warmup:
        return done / settings.warmup
    left = (1 - done) / (1 - settings.warmup) if settings.warmup < 1 else 1.0
    match settings.decay:
        case "none":
            return 1.0
        case "linear":
            return settings.final + (1 - settings.final) * left
        case "cosine":
            return settings.final + (1 - settings.final) * 0.5 * (1 - math.cos(math.pi * left))


class Learner:
    """A model and its optimizer. Accumulate gradients into the model, then `step`."""

    def __init__(self, name: str, model: nn.Module, settings: Optimizer, world: World) -> None:
        self.name, self.model, self.settings, self.world = name, model, settings, world
        self.num_steps = 0
        self._parameters = [*model.parameters()]
        self.is_sharded = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        self.kernel = {"foreach": self.is_sharded, "fused": not self.is_sharded}
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            **self.kernel,
        )

    def step(self, done: float) -> dict[str, float]:
        """Take a step with the gradients there are, and forget them; `done` is the share of the run done after it."""
        vectors = join_gradients(self._parameters)
        for vector in vectors:
            self.world.sum(vector)
        norm = self._clip(vectors)
        if not math.isfinite(norm):
            raise TrainError(
                f"{self.name}, optimizer step {self.num_steps + 1}: the gradient's norm is {norm}, so the step was not "
                "taken; lower the learning rate, or look for a reward or a log-prob that is out of bounds"
            )
        lr = self.settings.lr * scale(self.settings, done)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return {f"{self.name}/grad_norm": norm, f"{self.name}/lr": lr}

    def _clip(self, vectors: Sequence[Tensor]) -> float:
        """The gradient's norm before it is scaled down; a sharded model has its gradients in no vector."""
        limit = self.settings.grad_clip if self.settings.grad_clip is not None else math.inf
        if self.is_sharded:
            of_shards: Tensor = nn.utils.clip_grad_norm_(self._parameters, limit)
            return float(of_shards.full_tensor() if isinstance(of_shards, DTensor) else of_shards)
        norm = _norm(vectors)
        share = limit / (norm + 1e-6)  # as torch's clip_grad_norm_ has it
        if share < 1:
            for vector in vectors:
                vector.mul_(share)
        return norm


def _norm(vectors: Sequence[Tensor]) -> float:
    norms = [
        float(torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)))
        for vector in vectors
        for part in vector.split(NORM_PART)
    ]
    return math.hypot(*norms)
