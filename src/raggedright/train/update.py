"""The update: each role takes its planned optimizer steps, and every metric is an exact mean.

A rank runs its micro-batches of a step; gradients and metrics are summed over micro-batches and ranks, never averaged.
Then the gradient is clipped and AdamW takes a step at the schedule's learning rate. A step without a loss token touches
neither model nor optimizer, and the schedule still advances.

The schedule is a function of the share of the run that is complete, so its length is the true number of optimizer steps
whatever the row counts are; under align lcm, where a round has as many steps as its rows need, it advances by the same
share every round. Routers of a mixture of experts replay what the rollout recorded, in the actor only: reference and
critic are other models and route as they are.

Note: a parameter without a gradient counts as one with a gradient of zero, on one rank as on many.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raggedright.config.schema import Config
from raggedright.config.sections import Experts, Model, Optimizer
from raggedright.errors import ConfigError
from raggedright.plan.cut import Step
from raggedright.plan.planner import Role
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.forward import TEMPERATURES, forward_log_probs, forward_values, temperature_of
from raggedright.tensors.losses import Sums, entropy_loss, kl_loss, policy_loss, value_loss
from raggedright.tensors.parallel import join_gradients
from raggedright.tensors.routing import Routers, balance_loss, count_experts, find_routers, load_metrics, routings_of
from raggedright.tensors.tensor_batch import TensorBatch
from raggedright.train.world import TrainError, World

Loss = Callable[[MicroBatch, float], Sums]  # of a micro-batch, at this fraction of the training run

# These metrics carry the objective's weights and are means over steps; all others are means over loss tokens.
OBJECTIVES = ("actor/pg_loss", "actor/kl_loss", "actor/entropy_loss", "actor/balance_loss", "critic/vf_loss")
NORM_PART = 2**22  # elements per sum of squares: over many more, float32 loses digits


class Learner:
    """A model and its optimizer. Accumulate gradients into the model, then call `step`."""

    def __init__(self, name: Role, model: nn.Module, settings: Optimizer, world: World) -> None:
        self.name: Role = name
        self.model, self.settings, self.world = model, settings, world
        self.num_steps = 0
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
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

    def step(self, progress: float) -> dict[str, float]:
        """Take a step with the accumulated gradients and clear them; `progress` is the share of the run after it."""
        vectors = join_gradients(self._parameters)
        for vector in vectors:
            self.world.sum(vector)
        norm = self._clip(vectors)
        if not math.isfinite(norm):
            raise TrainError(
                f"{self.name}, optimizer step {self.num_steps + 1}: the gradient's norm is {norm}, so the step was not "
                "taken; lower the learning rate, or look for a reward or a log-prob that is out of bounds"
            )
        lr = self.settings.lr * schedule(self.settings, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return {f"{self.name}/grad_norm": norm, f"{self.name}/lr": lr}

    def _clip(self, vectors: Sequence[Tensor]) -> float:
        """The gradient's norm before clipping; the gradients of a sharded model are in no vector."""
        limit = self.settings.grad_clip if self.settings.grad_clip is not None else math.inf
        if self.is_sharded:
            sharded_norm: Tensor = nn.utils.clip_grad_norm_(self._parameters, limit)
            return float(sharded_norm.full_tensor() if isinstance(sharded_norm, DTensor) else sharded_norm)
        norm = _norm(vectors)
        factor = limit / (norm + 1e-6)  # as in torch's clip_grad_norm_
        if factor < 1:
            for vector in vectors:
                vector.mul_(factor)
        return norm


def _norm(vectors: Sequence[Tensor]) -> float:
    norms = [
        float(torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)))
        for vector in vectors
        for part in vector.split(NORM_PART)
    ]
    return math.hypot(*norms)


def schedule(settings: Optimizer, progress: float) -> float:
    """The learning rate as a fraction of `lr`; `progress` is the share of the run after the step, above 0."""
    if progress < settings.warmup:
        return progress / settings.warmup
    left = (1 - progress) / (1 - settings.warmup) if settings.warmup < 1 else 1.0
    match settings.decay:
        case "none":
            return 1.0
        case "linear":
            return settings.final + (1 - settings.final) * left
        case "cosine":
            return settings.final + (1 - settings.final) * 0.5 * (1 - math.cos(math.pi * left))


def mixed_precision(model: Model, world: World) -> AbstractContextManager[object]:
    """Autocast to the dtype that the model computes in, if the config sets one."""
    if model.compute_dtype is None:
        return nullcontext()
    return torch.autocast(world.device.type, dtype=getattr(torch, model.compute_dtype))


def actor_loss(config: Config, learner: Learner) -> Loss:
    """The policy loss with its entropy bonus and KL, as configured."""
    algorithm, reference = config.algorithm, config.reference
    temperature, learns_entropy = config.rollout.temperature, algorithm.entropy_coef != 0

    def loss(micro: MicroBatch, progress: float) -> Sums:
        outputs = forward_log_probs(
            learner.model, micro, temperature=temperature_of(micro, temperature), entropy_graph=learns_entropy
        )
        policy = policy_loss(
            outputs.log_probs,
            micro.fields["old_log_probs"],
            micro.fields["advantages"],
            micro.weights,
            kind=algorithm.policy_loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
        )
        bonus = entropy_loss(outputs.entropy, micro.weights)
        total, metrics = policy.loss, policy.metrics | bonus.metrics
        if learns_entropy:
            total = total - algorithm.entropy_coef * schedule(config.optimizer, progress) * bonus.loss
        if reference.kl == "loss":
            kl = kl_loss(outputs.log_probs, micro.fields["ref_log_probs"], micro.weights, kind=reference.estimator)
            total, metrics = total + reference.coef * kl.loss, metrics | kl.metrics
        return Sums(total, metrics)

    return loss


def actor_fields(config: Config, batch: TensorBatch) -> tuple[str, ...]:
    """The per-token fields that `actor_loss` reads."""
    reference = ("ref_log_probs",) if config.reference.kl == "loss" else ()
    return ("old_log_probs", "advantages", *reference, *temperature_fields(batch))


def temperature_fields(batch: TensorBatch) -> tuple[str, ...]:
    """The field that `temperature_of` reads; none if all tokens were sampled at the same temperature."""
    return (TEMPERATURES,) if batch.has(TEMPERATURES) else ()


def critic_loss(config: Config, learner: Learner) -> Loss:
    """The value loss."""

    def loss(micro: MicroBatch, progress: float) -> Sums:
        values = forward_values(learner.model, micro)
        old, returns = micro.fields["values"], micro.fields["returns"]
        return value_loss(values, old, returns, micro.weights, clip=config.critic.value_clip)

    return loss


@dataclass(frozen=True, slots=True, eq=False)
class ActorExperts:
    """The actor's routers and their settings; make one with `actor_experts`."""

    routers: Routers
    config: Experts

    def count(self, batch: TensorBatch, steps: Sequence[Step], world: World) -> Tensor:
        """How many choices each expert got in each step, [steps, layers, experts], over all ranks."""
        counts = torch.zeros(len(steps), self.routers.num_layers, self.routers.num_experts, dtype=torch.float64)
        for i, step in enumerate(steps):
            if not step.skipped:
                counts[i] = count_experts(routings_of(batch, step, world.dp_rank), self.routers)
        return world.sum(counts.to(world.device))

    def with_balance(self, sums: Sums, logits: Sequence[Tensor], micro: MicroBatch, counts: Tensor) -> Sums:
        """The loss with the balance loss, if it has a weight."""
        if not self.config.balance_coef:
            return sums
        balance = balance_loss(logits, micro, counts, self.routers)
        return Sums(sums.loss + self.config.balance_coef * balance.loss, sums.metrics | balance.metrics)


def actor_experts(model: nn.Module, config: Experts) -> ActorExperts | None:
    """None for a model without experts, or if the config asks for neither replay nor balance."""
    if not config.replay and not config.balance_coef:
        return None
    routers = find_routers(model)
    if routers is None and config.balance_coef:
        raise ConfigError(f"experts.balance_coef is {config.balance_coef:g} and the model has no experts; set it to 0")
    return None if routers is None else ActorExperts(routers, config)


@contextmanager
def replaying(experts: ActorExperts | None, micro: MicroBatch) -> Iterator[Sequence[Tensor]]:
    """Forward and backward passes inside choose the recorded experts; yields the routers' logits by layer."""
    if experts is None:
        yield ()
        return
    with experts.routers.replaying(micro.routing if experts.config.replay else None) as logits:
        yield logits


def train_role(
    learner: Learner,
    batch: TensorBatch,
    loss: Loss,
    fields: Sequence[str],
    *,
    config: Config,
    round: int,
    experts: ActorExperts | None = None,
) -> dict[str, float]:
    """Take the steps of the round that the plan has for this role; its metrics, the same on every rank."""
    world, steps = learner.world, batch.plan.steps(learner.name)
    rounds_before = config.critic.warmup_rounds if learner.name == "actor" else 0  # rounds without this role
    counts = experts.count(batch, steps, world) if experts else None
    step_sums: list[dict[str, Tensor]] = []
    step_tokens: list[int] = []
    optimizer_metrics: dict[str, list[float]] = {}
    for number, step in enumerate(steps, 1):
        if step.skipped:
            continue
        progress = (round - 1 - rounds_before + number / len(steps)) / (config.train.rounds - rounds_before)
        totals: dict[str, Tensor] = {}
        for _, micro in batch.micro_batches(step, world.dp_rank, fields):
            micro = micro.to(world.device)
            with replaying(experts, micro) as logits:
                with mixed_precision(config.model, world):
                    sums = loss(micro, progress)
                if experts and counts is not None:
                    sums = experts.with_balance(sums, logits, micro, counts[number - 1])
                sums.loss.backward()
            add_metrics(totals, sums.metrics)
        for name, value in learner.step(progress).items():
            optimizer_metrics.setdefault(name, []).append(value)
        step_sums.append(totals)
        step_tokens.append(int(batch.rows.loss_tokens[step.row].sum()))
    metrics: dict[str, float] = {}
    tokens = torch.tensor(step_tokens, dtype=torch.float64)
    for name, values in sum_metrics(world, step_sums).items():
        metrics[name] = float(values.mean() if name in OBJECTIVES else (values * tokens).sum() / tokens.sum())
    for name, numbers in optimizer_metrics.items():
        metrics[name] = numbers[-1] if name.endswith("/lr") else sum(numbers) / len(numbers)
    return metrics if counts is None else metrics | load_metrics(counts)


def add_metrics(totals: dict[str, Tensor], metrics: Mapping[str, Tensor]) -> None:
    """Add the metrics of a micro-batch to the totals."""
    for name, value in metrics.items():
        totals[name] = totals[name] + value if name in totals else value


def sum_metrics(world: World, steps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of each step summed over ranks, in float64: by name, one number per step."""
    names = sorted(steps[0]) if steps else []
    if not names:
        return {}
    table = torch.stack([torch.stack([step[name].double() for name in names]) for step in steps])
    return dict(zip(names, world.sum(table).cpu().T, strict=True))
