"""One round: sessions run, their rows are sealed, planned, weighed and trained. It reads as the algorithm.

Invariants: what a rank does here follows from the sealed round and the config alone, so that all ranks make the same
plan (its digest is compared) and return the same result; every row that is sealed is in the ledger; old log-probs,
values and advantages are those of the weights before the round's first step; the engine has the new weights at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raggedright.advantages import Scores
from raggedright.agents.recorder import OnDone
from raggedright.agents.vision import IMAGE_FIELDS
from raggedright.arrays import Ints
from raggedright.ledger import Ledger, close_ledger
from raggedright.metrics import perf_metrics, row_metrics, score_metrics
from raggedright.plan.plan import Plan, Role, make_plan
from raggedright.ragged import Ragged
from raggedright.store.listing import Listing
from raggedright.store.protocol import RowEntry
from raggedright.tensors.batch import TensorBatch
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.forward import forward_chosen, forward_values
from raggedright.tensors.off_policy import off_policy_metrics
from raggedright.tensors.schema import Fields, Schema, infer_schema
from raggedright.train.advantages import TokenAdvantages, token_advantages
from raggedright.train.clock import Clock
from raggedright.train.experts import replaying
from raggedright.train.passes import Flat, TokenTable, computing, run_forward
from raggedright.train.sealed import SealedRound, seal_round
from raggedright.train.setup import Setup
from raggedright.train.update import RoleMetrics, actor_loss, critic_loss, train_role
from raggedright.train.world import TrainError, World

ROW_FIELDS = ("input_ids", "response_mask", "rollout_log_probs")


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """What became of a round."""

    sealed: SealedRound
    plan: Plan
    ledger: Ledger
    advantages: Flat
    metrics: dict[str, float]
    seconds: dict[str, float]


def run_sessions(setup: Setup, round: int, on_done: OnDone | None = None) -> Listing:
    """Run this rank's share of the round's sessions, but for those that the store has; what became of them.

    Shares are in the order of keys, as a listing is, so that listings of all ranks are joined without sorting rows.
    """
    config = setup.config
    tasks = sorted(setup.tasks.of_round(round, config.train.batch_size), key=lambda task: task.uid)
    sessions = [(task, session) for task in tasks for session in range(config.rollout.n)]
    share = setup.world.share(sessions)
    return setup.runner.run(setup.store, round=round, sessions=share, resume=True, on_done=on_done)


def train_round(setup: Setup, round: int, own: Listing, clock: Clock) -> RoundResult:
    """Train on the sessions that the ranks ran, each its `own`; the result is the same on every rank."""
    config, world = setup.config, setup.world
    with clock("store"):
        num_sessions = config.train.batch_size * config.rollout.n
        sealed = seal_round(world, round=round, own=own, num_sessions=num_sessions)
    check_any(sealed)
    scores = sealed.scores(config.rollout.on_failure)
    with clock("plan"):
        plan = make_plan(sealed.rows, config.layout(round))
        world.check_same(plan.digest(), f"the plan of round {round}")
        ledger = close_ledger(plan, sealed.failed)
    with clock("store"):
        batch = read_batch(setup, sealed, plan)
    with clock("forward"):
        tokens, off_policy = run_forward_passes(setup, batch)
    with clock("advantages"):
        advantages = token_advantages(config, sealed, scores, tokens)
        batch = _with_targets(batch, tokens, advantages)
    with clock("update"):
        trained = _add_up(setup.world, off_policy, train_roles(setup, batch, round))
        setup.publish_weights(version=round)
    metrics = _batch_metrics(sealed, scores, plan) | advantages.metrics | trained
    metrics["perf/tokens_per_second"] = metrics["perf/tokens"] / clock.total
    return RoundResult(sealed, plan, ledger, advantages.advantages, metrics, clock.seconds)


def check_any(sealed: SealedRound) -> None:
    """A TrainError where there is nothing to learn from."""
    if len(sealed.failed) == len(sealed.sessions):
        (prompt, session), cause = next(iter(sealed.failed.items()))
        raise TrainError(
            f"round {sealed.round}: all {len(sealed.sessions):,} sessions failed, so there is nothing to learn from; "
            f"the first, {prompt}/{session}: {cause}"
        )
    if not sealed.rows.loss_tokens.any():
        raise TrainError(
            f"round {sealed.round}: none of its {len(sealed.rows):,} rows has a token that was generated, so there is "
            "nothing to learn from; is an `await` missing before generate()?"
        )


def read_batch(setup: Setup, sealed: SealedRound, plan: Plan) -> TensorBatch:
    """This rank's rows, or all rows where these came with the list and are planned, and padding rows like them."""
    carried, fields = sealed.sessions.vectors, [{}] * len(sealed.rows)
    all_planned = not len(plan.dropped) and not sealed.rows.is_padding.any()
    if carried is not None and all_planned and not setup.vision and not setup.experts:
        joined = {name: carried[name] for name in ROW_FIELDS}
        schema = infer_schema(sealed.rows, fields, joined=joined)
    else:
        schema, fields, joined = _read_own(setup, sealed, own_positions(plan, setup.world.dp_rank))
    return TensorBatch.of(plan, fields, schema, setup.collator, joined=joined)


def _read_own(setup: Setup, sealed: SealedRound, own: Ints) -> tuple[Schema, list[Fields], dict[str, Ragged]]:
    """A rank's rows among all, with their schema; a rank without a row looks at the first one."""
    if not len(own):
        own = np.arange(min(len(sealed.rows), 1))
    carried, keys = sealed.sessions.vectors, [sealed.keys[p] for p in own.tolist()]
    if carried is not None:
        vectors = {name: carried[name].rows(own) for name in ROW_FIELDS}
    else:
        vectors = setup.store.get_joined(keys, ROW_FIELDS)
    media: Sequence[Fields] = setup.store.get(keys, IMAGE_FIELDS) if setup.vision else [{}] * len(own)
    if setup.experts:
        media = _with_routing(setup, [sealed.entries[p] for p in own.tolist()], media)
    schema = infer_schema(sealed.rows.take(own), media, joined=vectors) if len(own) else Schema({})
    fields: list[Fields] = [{}] * len(sealed.rows)
    for p, row in zip(own.tolist(), media, strict=True):
        fields[p] = row
    return schema, fields, {name: ragged.spread(own, len(fields)) for name, ragged in vectors.items()}


def _with_routing(setup: Setup, entries: Sequence[RowEntry], found: Sequence[Fields]) -> list[Fields]:
    """Rows with their recorded experts, where they have any: one that never generated has none."""
    routed = [i for i, entry in enumerate(entries) if "routed_experts" in entry.field_names]
    rows = [*found]
    for i, more in zip(routed, setup.store.get([entries[i].key for i in routed], ("routed_experts",)), strict=True):
        rows[i] = {**found[i], **more}
    return rows


def own_positions(plan: Plan, dp_rank: int) -> Ints:
    """The real rows that a rank runs, in any role, in ascending order."""
    own = np.zeros(len(plan.padded_rows), dtype=bool)
    for steps in plan.roles.values():
        for step in steps:
            bounds = step.bounds[dp_rank * step.num_slots], step.bounds[(dp_rank + 1) * step.num_slots]
            own[step.row[slice(*bounds)]] = True
    return np.flatnonzero(own[: len(plan.rows)])


def run_forward_passes(setup: Setup, batch: TensorBatch) -> tuple[dict[str, Flat], dict[str, Tensor]]:
    """Masks, old and reference log-probs and values of all rows; and how far training is from the rollout, in shares.

    A rank without a micro-batch has no share, and then no rank has.
    """
    config, world, plan = setup.config, setup.world, batch.plan
    outputs = {"old_log_probs": setup.actor.model}
    if setup.reference is not None:
        outputs["ref_log_probs"] = setup.reference
    names = ["response_mask", *outputs, *(("values",) if setup.critic else ())]
    table = TokenTable(plan.rows, names, torch.float64 if config.model.dtype == "float64" else torch.float32)
    counts = (batch.rows.loss_tokens > 0) & ~batch.rows.is_padding
    row_weights = torch.from_numpy(counts / max(counts.sum(), 1))
    totals: dict[str, Tensor] = {}

    def log_probs(model: torch.nn.Module, micro: MicroBatch) -> Tensor:
        with replaying(setup.experts if model is setup.actor.model else None, micro):
            return forward_chosen(model, micro, temperature=config.rollout.temperature)

    with computing(config.model, world):
        of_model = {name: lambda micro, model=model: log_probs(model, micro) for name, model in outputs.items()}
        for position, micro, found in run_forward(batch, plan.steps("forward"), world, of_model):
            table.fill(position, micro, {**found, "response_mask": micro.weights.mean != 0})
            of_rows = row_weights[torch.from_numpy(position)].to(world.device)
            rollout = micro.fields["rollout_log_probs"]
            share = off_policy_metrics(found["old_log_probs"], rollout, micro.weights, of_rows)
            totals = {name: totals[name] + value if name in totals else value for name, value in share.items()}
        if setup.critic:
            critic = setup.critic.model
            first_epoch = [step for step in plan.steps("critic") if step.epoch == 0]
            of_critic = {"values": lambda micro: forward_values(critic, micro)}
            for position, micro, found in run_forward(batch, first_epoch, world, of_critic):
                table.fill(position, micro, found)
    return table.exchange(world), totals


def _with_targets(batch: TensorBatch, tokens: Mapping[str, Flat], found: TokenAdvantages) -> TensorBatch:
    """The batch with all that the losses need."""
    targets = {name: flat for name, flat in tokens.items() if name != "response_mask"}
    targets["advantages"] = found.advantages
    if found.returns is not None:
        targets["returns"] = found.returns
    for name, flat in targets.items():
        batch = batch.with_responses(name, flat)
    return batch


def train_roles(setup: Setup, batch: TensorBatch, round: int) -> list[RoleMetrics]:
    """Critic and actor follow their cuts; metrics of both."""
    config, world = setup.config, setup.world
    metrics = []
    roles: tuple[Role, ...] = batch.plan.trained_roles
    if setup.critic and "critic" in roles:
        loss = critic_loss(config, setup.critic)
        fields = ("values", "returns")
        metrics.append(train_role("critic", batch, setup.critic, loss, fields, config=config, round=round, world=world))
    if "actor" in roles:
        fields = ("old_log_probs", "advantages", *(("ref_log_probs",) if config.reference.kl == "loss" else ()))
        loss = actor_loss(config, setup.actor)
        of_actor = train_role(
            "actor", batch, setup.actor, loss, fields, config=config, round=round, world=world, experts=setup.experts
        )
        metrics.append(of_actor)
    return metrics


def _add_up(world: World, shares: Mapping[str, Tensor], roles: Sequence[RoleMetrics]) -> dict[str, float]:
    """All metrics that are sums over ranks, exchanged once."""
    parts = [*(share.double().view(1) for share in shares.values()), *(role.table.flatten() for role in roles)]
    if not parts:
        return {}
    sums = world.sum(torch.cat(parts)).cpu().split([len(part) for part in parts])
    metrics = {name: float(total) for name, total in zip(shares, sums, strict=False)}
    for role, total in zip(roles, sums[len(shares) :], strict=True):
        metrics |= role.over_steps(total.view(role.table.shape))
    return metrics


def _batch_metrics(sealed: SealedRound, scores: Scores, plan: Plan) -> dict[str, float]:
    return score_metrics(scores) | sealed.session_metrics() | row_metrics(sealed.rows) | perf_metrics(plan)
