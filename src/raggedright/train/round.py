"""One round: sessions run, their rows are planned, weighed and trained. It reads as the algorithm.

Invariants: what a rank does here follows from the gathered round and the config alone, so that all ranks make the same
plan (its digest is compared) and return the same result; every row that was sampled is in the ledger; old log-probs,
values and advantages are those of the weights before the round's first step; the engine has the new weights at the end.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.agents.recorder import OnDone
from raggedright.agents.session import Task
from raggedright.agents.vision import MEDIA
from raggedright.arrays import Ints
from raggedright.config.schema import Config
from raggedright.ledger import Ledger, close_ledger
from raggedright.metrics import perf_metrics, row_metrics, score_metrics, session_metrics, signal_metrics
from raggedright.plan.plan import Plan, Role, make_plan
from raggedright.rows import Rows
from raggedright.sessions import TOKEN_FIELDS, SessionTable
from raggedright.tensors.batch import TensorBatch
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.forward import forward_chosen, forward_values, temperature_of
from raggedright.tensors.off_policy import off_policy_metrics
from raggedright.tensors.schema import Fields, infer_schema
from raggedright.train.advantages import TokenAdvantages, token_advantages
from raggedright.train.clock import Clock
from raggedright.train.experts import replaying
from raggedright.train.passes import Flat, TokenTable, computing, run_forward, temperature_fields
from raggedright.train.setup import Setup
from raggedright.train.update import RoleMetrics, actor_loss, critic_loss, train_role
from raggedright.train.waves import SampledPrompts, split_round
from raggedright.train.world import TrainError, World

MODEL_FIELDS = (*TOKEN_FIELDS, "position_ids", "routed_experts")  # what the model or the schema knows by name


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """What became of a round."""

    tasks: Sequence[Task]  # all that were sampled
    sampled: SessionTable  # all sessions that ended
    table: SessionTable  # those that were trained on: with dynamic sampling a part of those that were sampled
    plan: Plan
    ledger: Ledger
    advantages: Flat
    metrics: dict[str, float]
    seconds: dict[str, float]


def sample_round(
    setup: Setup, round: int, on_done: OnDone | None = None, *, is_stopped: Callable[[], bool] = lambda: False
) -> SampledPrompts | None:
    """Run the round's sessions, wave by wave; None where an end was asked for, on any rank."""
    config, world, prompts = setup.config, setup.world, setup.prompts
    sampled = SampledPrompts(config.train.batch_size)
    while count := sampled.next_wave(prompts.most):
        tasks = prompts.next(round, count, after=len(sampled.tasks))
        own = None if is_stopped() else run_sessions(setup, round, tasks, on_done)
        if world.any(is_stopped()) or own is None:  # all ranks are done with their sessions after this
            return None
        sampled.tasks += tasks
        sampled.parts.append(own)
        if not config.rollout.dynamic_sampling:
            break
        sampled.look_at(SessionTable.join(world.gather(own)), config.rollout.on_failure)
    return sampled


def run_sessions(setup: Setup, round: int, tasks: Sequence[Task], on_done: OnDone | None = None) -> SessionTable:
    """Run this rank's share of the sessions on these tasks, except those that the store has; the table of all of them.

    Shares are in the order of keys, so that a rank runs sessions of the same prompts, which share their contexts.
    """
    in_order = sorted(tasks, key=lambda task: task.uid)
    sessions = [(task, session) for task in in_order for session in range(setup.config.rollout.n)]
    share = setup.world.share(sessions)
    return setup.runner.run(setup.store, round=round, sessions=share, resume=True, on_done=on_done)


def train_round(setup: Setup, round: int, sampled: SampledPrompts, clock: Clock) -> RoundResult:
    """Train on the sessions that the ranks ran, each its own; the result is the same on every rank."""
    config, world = setup.config, setup.world
    with clock("store"):
        whole = gather_round(world, sampled.own, num_sessions=len(sampled.tasks) * config.rollout.n)
        table, skipped = split_round(whole, sampled.left_out())
    check_any(table)
    scores = table.scores(config.rollout.on_failure)
    with clock("plan"):
        plan = make_plan(table.rows, setup.layout(round))
        world.check_same(plan.digest(), f"the plan of round {round}")
        ledger = close_ledger(plan, whole.causes, {cause: part.rows for cause, part in skipped.items()})
    with clock("store"):
        batch = read_batch(setup, table, plan)
    with clock("forward"):
        tokens, off_policy = run_forward_passes(setup, batch)
    with clock("advantages"):
        advantages = token_advantages(config, table, scores, tokens)
        batch = _with_targets(batch, tokens, advantages)
    with clock("update"):
        trained = _add_up(setup.world, off_policy, train_roles(setup, batch, round))
        setup.publish_weights(version=round)
        setup.prompts.num_drawn += len(sampled.tasks)
    metrics = _batch_metrics(config, whole, plan) | advantages.metrics | trained
    metrics["perf/tokens_per_second"] = metrics["perf/tokens"] / clock.total
    return RoundResult(sampled.tasks, whole, table, plan, ledger, advantages.advantages, metrics, clock.seconds)


def gather_round(world: World, own: SessionTable, *, num_sessions: int) -> SessionTable:
    """The round's sessions from what each rank has run, the same on every rank.

    No rank asks the store, so that a late writer cannot make two ranks see two rounds.
    """
    table = SessionTable.join(world.gather(own))
    if len(table) != num_sessions:
        raise TrainError(
            f"round {table.round}: {len(table):,} of its {num_sessions:,} sessions have ended; "
            "please report this with the run folder"
        )
    return table


def check_any(table: SessionTable) -> None:
    """A TrainError where there is nothing to learn from."""
    if table.failed.all():
        (prompt, session), first = next(iter(table.causes.items()))
        cause, count = Counter(table.causes.values()).most_common(1)[0]
        often = "" if cause == first else f"; the most common cause, of {count:,}: {cause}"
        raise TrainError(
            f"round {table.round}: all {len(table):,} sessions failed, so there is nothing to learn from; "
            f"the first, {prompt}/{session}: {first}{often}"
        )
    if not table.rows.loss_tokens.any():
        raise TrainError(
            f"round {table.round}: none of its {len(table.rows):,} rows has a token that was generated, so there is "
            "nothing to learn from; is an `await` missing before generate()?"
        )


def read_batch(setup: Setup, table: SessionTable, plan: Plan) -> TensorBatch:
    """The tensors of this rank's rows, read from the store, and padding rows made after them."""
    rows, own = table.rows, own_positions(plan, setup.world.dp_rank)
    if not len(own):  # a rank without a row makes its padding rows after the first one
        own = np.arange(min(len(rows), 1))
    fields: list[Fields] = [{}] * len(rows)
    extra: dict[str, dict[int, Tensor]] = {name: {} for name in sorted(table.extra_fields) if _is_agents_own(name)}
    for p, arrays in zip(own.tolist(), setup.store.read(table.row_keys(own)), strict=True):
        fields[p] = model_fields(arrays, has_vision=setup.vision is not None)
        for name in extra.keys() & arrays.keys():
            extra[name][p] = torch.from_numpy(arrays[name])
    schema = infer_schema(rows.take(own), [fields[p] for p in own.tolist()])
    batch = TensorBatch.of(plan, fields, schema, setup.collator)
    for name, of_rows in extra.items():
        batch = batch.with_responses(name, _flat(rows, name, of_rows, setup.config))
    return batch


def model_fields(arrays: Mapping[str, NDArray], *, has_vision: bool) -> Fields:
    """The tensors of a row that the model or the schema takes; media are a mapping of their own."""
    fields: dict[str, object] = {n: torch.from_numpy(array) for n, array in arrays.items() if n in MODEL_FIELDS}
    if has_vision:
        start = f"{MEDIA}."
        media = {n.removeprefix(start): torch.from_numpy(a) for n, a in arrays.items() if n.startswith(start)}
        fields[MEDIA] = media
    return fields


def _is_agents_own(name: str) -> bool:
    """Whether an extra field has one number per response token: whatever neither model nor media take."""
    return name not in MODEL_FIELDS and not name.startswith(f"{MEDIA}.")


def _flat(rows: Rows, name: str, of_rows: Mapping[int, Tensor], config: Config) -> Flat:
    """A field over the response tokens of all rows; 0 where a row does not have it, or is another rank's."""
    flat = torch.zeros(int(rows.response_tokens.sum()), dtype=float_type(config))
    parts = flat.split(rows.response_tokens.tolist())
    for p, tensor in of_rows.items():
        if tensor.shape != parts[p].shape:
            raise TrainError(
                f"row {rows.key[p]}: field {name} has shape {tuple(tensor.shape)} and the response "
                f"{len(parts[p]):,} tokens; give one number per response token"
            )
        parts[p].copy_(tensor)
    return flat


def float_type(config: Config) -> torch.dtype:
    """The type that numbers of tokens have between the passes."""
    return torch.float64 if config.model.dtype == "float64" else torch.float32


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
    table = TokenTable(plan.rows, names, float_type(config))
    counts = (batch.rows.loss_tokens > 0) & ~batch.rows.is_padding
    row_weights = torch.from_numpy(counts / max(counts.sum(), 1))
    totals: dict[str, Tensor] = {}

    def log_probs(model: torch.nn.Module, micro: MicroBatch) -> Tensor:
        with replaying(setup.experts if model is setup.actor.model else None, micro):
            return forward_chosen(model, micro, temperature=temperature_of(micro, config.rollout.temperature))

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
        of_reference = ("ref_log_probs",) if config.reference.kl == "loss" else ()
        fields = ("old_log_probs", "advantages", *of_reference, *temperature_fields(batch))
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


def _batch_metrics(config: Config, sampled: SessionTable, plan: Plan) -> dict[str, float]:
    """Metrics of all that was sampled, and of what was planned."""
    scores, num_prompts = sampled.scores(config.rollout.on_failure), len({*sampled.prompt.tolist()})
    metrics = score_metrics(scores) | signal_metrics(scores, num_prompts)
    if config.rollout.dynamic_sampling:
        metrics["prompts/sampled"] = float(num_prompts)
    return metrics | session_metrics(sampled) | row_metrics(sampled.rows) | perf_metrics(plan)
