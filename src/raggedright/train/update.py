"""Training on a planned round: each role takes its steps, and every metric is an exact mean.

A rank runs its micro-batches of a step; what they give is summed over micro-batches and ranks, never averaged. A step
without a loss token touches neither model nor optimizer, and the schedule still advances.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raggedright.config.schema import Config
from raggedright.plan.plan import Role
from raggedright.tensors.balance import load_metrics
from raggedright.tensors.batch import TensorBatch
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.forward import forward_log_probs, forward_values, temperature_of
from raggedright.tensors.losses import Sums, entropy_loss, kl_loss, policy_loss, value_loss
from raggedright.train.experts import ActorExperts, replaying
from raggedright.train.optimizer import Learner, scale
from raggedright.train.passes import computing
from raggedright.train.world import World

Loss = Callable[[MicroBatch, float], Sums]  # of a micro-batch, when this share of the run is done

# These carry the objective's weights and are means over steps; all others are means over loss tokens.
OBJECTIVES = ("actor/pg_loss", "actor/kl_loss", "actor/entropy_loss", "actor/balance_loss", "critic/vf_loss")


class RoleMetrics(NamedTuple):
    """A role's metrics of a round: this rank's share of those by step, and those that all ranks have."""

    names: list[str]
    table: Tensor  # [steps, names], to be summed over ranks
    num_tokens: list[int]  # of each step
    of_round: dict[str, float]

    def over_steps(self, table: Tensor) -> dict[str, float]:
        """The round's metrics, from the table's sum over ranks."""
        tokens = torch.tensor(self.num_tokens, dtype=torch.float64)
        means = {}
        for name, values in zip(self.names, table.T, strict=True):
            means[name] = float(values.mean() if name in OBJECTIVES else (values * tokens).sum() / tokens.sum())
        return means | self.of_round


def actor_loss(config: Config, learner: Learner) -> Loss:
    """The policy's loss with its entropy bonus and KL, as configured."""
    algorithm, reference = config.algorithm, config.reference
    temperature, learns_entropy = config.rollout.temperature, algorithm.entropy_coef != 0

    def loss(micro: MicroBatch, done: float) -> Sums:
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
            total = total - algorithm.entropy_coef * scale(config.optimizer, done) * bonus.loss
        if reference.kl == "loss":
            kl = kl_loss(outputs.log_probs, micro.fields["ref_log_probs"], micro.weights, kind=reference.estimator)
            total, metrics = total + reference.coef * kl.loss, metrics | kl.metrics
        return Sums(total, metrics)

    return loss


def critic_loss(config: Config, learner: Learner) -> Loss:
    """The value loss."""

    def loss(micro: MicroBatch, done: float) -> Sums:
        values = forward_values(learner.model, micro)
        old, returns = micro.fields["values"], micro.fields["returns"]
        return value_loss(values, old, returns, micro.weights, clip=config.critic.value_clip)

    return loss


def train_role(
    role: Role,
    batch: TensorBatch,
    learner: Learner,
    loss: Loss,
    fields: Sequence[str],
    *,
    config: Config,
    round: int,
    world: World,
    experts: ActorExperts | None = None,
) -> RoleMetrics:
    """Take a role's steps of the round."""
    steps = batch.plan.steps(role)
    first = config.critic.warmup_rounds if role == "actor" else 0  # rounds before this role's first one
    shares: list[dict[str, Tensor]] = []
    num_tokens: list[int] = []
    of_optimizer: dict[str, list[float]] = {}
    counts = experts.count(batch, steps, world) if experts else None
    for number, step in enumerate(steps, 1):
        if step.skipped:
            continue
        done = (round - 1 - first + number / len(steps)) / (config.train.rounds - first)
        totals: dict[str, Tensor] = {}
        for _, micro in batch.micro_batches(step, world.dp_rank, fields):
            here = micro.to(world.device)
            with replaying(experts, here) as logits:
                with computing(config.model, world):
                    sums = loss(here, done)
                if experts and counts is not None:
                    sums = experts.with_balance(sums, logits, here, counts[number - 1])
                sums.loss.backward()
            for name, value in sums.metrics.items():
                totals[name] = totals[name] + value if name in totals else value
        for name, value in learner.step(done).items():
            of_optimizer.setdefault(name, []).append(value)
        shares.append(totals)
        num_tokens.append(int(batch.rows.loss_tokens[step.row].sum()))
    names = sorted(shares[0]) if shares else []
    rows = [torch.stack([share[name].double() for name in names]) for share in shares]
    table = torch.stack(rows) if rows else torch.zeros(0, 0, dtype=torch.float64, device=world.device)
    of_round = {
        name: values[-1] if name.endswith("/lr") else sum(values) / len(values) for name, values in of_optimizer.items()
    }
    return RoleMetrics(names, table, num_tokens, of_round | ({} if counts is None else load_metrics(counts)))
