"""One round of training; it reads as the algorithm: sample sessions, plan their rows, forward passes, update.

Invariants: what a rank does here follows from the gathered round and the config alone, so all ranks make the same plan
(its digest is compared) and return the same result; every row that was sampled is in the ledger; old log-probs, values
and advantages come from the weights before the first step of the round; the engine has the new weights at the end.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from raggedright.agents.agent_session import Task
from raggedright.agents.runner import OnDone
from raggedright.config.schema import Config
from raggedright.ledger import Ledger, close_ledger
from raggedright.metrics import perf_metrics, row_metrics, score_metrics, session_metrics, signal_metrics
from raggedright.plan.planner import Plan, make_plan
from raggedright.sessions import SessionTable
from raggedright.tensors.tensor_batch import TensorBatch
from raggedright.train.passes import read_batch, run_forward_passes
from raggedright.train.round_prompts import SampledPrompts, split_round
from raggedright.train.setup import Setup
from raggedright.train.token_advantages import TokenAdvantages, TokenVector, token_advantages
from raggedright.train.update import actor_fields, actor_loss, critic_loss, train_role
from raggedright.train.world import TrainError, World


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """The outcome of a round, for the record."""

    tasks: Sequence[Task]  # all that were sampled
    sampled: SessionTable  # all sessions that ended
    table: SessionTable  # those that were trained on: with dynamic sampling a part of `sampled`
    plan: Plan
    ledger: Ledger
    advantages: TokenVector
    metrics: dict[str, float]
    seconds: dict[str, float]


class Clock:
    """Adds up the seconds of a round by part."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time inside as time of this part."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + perf_counter() - start

    @property
    def total(self) -> float:
        """Seconds since the start of the round."""
        return perf_counter() - self._start


def sample_round(
    setup: Setup, round: int, on_done: OnDone | None = None, *, is_stopped: Callable[[], bool] = lambda: False
) -> SampledPrompts | None:
    """Run the sessions of the round, wave by wave; None if any rank was asked to stop."""
    config, world, prompts = setup.config, setup.world, setup.prompts
    sampled = SampledPrompts(config.train.batch_size)
    while count := sampled.next_wave(prompts.max_per_round):
        tasks = prompts.next(round, count, after=len(sampled.tasks))
        part = None if is_stopped() else run_sessions(setup, round, tasks, on_done)
        if world.any(is_stopped()) or part is None:  # all ranks are done with their sessions after this
            return None
        sampled.tasks += tasks
        sampled.parts.append(part)
        if not config.rollout.dynamic_sampling:
            break
        sampled.add_scores(SessionTable.join(world.gather(part)), config.rollout.on_failure)
    return sampled


def run_sessions(setup: Setup, round: int, tasks: Sequence[Task], on_done: OnDone | None = None) -> SessionTable:
    """Run this rank's share of the sessions on these tasks, except those that the store has; the table of all of them.

    Shares follow the order of keys, so a rank runs sessions of the same prompts, whose contexts share a prefix.
    """
    in_order = sorted(tasks, key=lambda task: task.uid)
    sessions = [(task, session) for task in in_order for session in range(setup.config.rollout.n)]
    share = setup.world.share(sessions)
    return setup.runner.run(setup.store, round=round, sessions=share, resume=True, on_done=on_done)


def train_round(setup: Setup, round: int, sampled: SampledPrompts, clock: Clock) -> RoundResult:
    """Train on the sessions that all ranks ran; the result is the same on every rank."""
    config, world = setup.config, setup.world
    with clock("store"):
        all_sessions = gather_round(world, sampled.rank_sessions, num_sessions=len(sampled.tasks) * config.rollout.n)
        table, skipped = split_round(all_sessions, sampled.skipped_prompts())
    check_learnable(table)
    with clock("plan"):
        plan = make_plan(table.rows, setup.layout(round))
        world.check_same(plan.digest(), f"the plan of round {round}")
        ledger = close_ledger(plan, all_sessions.causes, {reason: part.rows for reason, part in skipped.items()})
    with clock("store"):
        batch = read_batch(setup, table, plan)
    with clock("forward"):
        tokens, off_policy = run_forward_passes(setup, batch)
    with clock("advantages"):
        advantages = token_advantages(config, table, table.scores(config.rollout.on_failure), tokens)
        batch = _with_targets(batch, tokens, advantages)
    with clock("update"):
        trained = train_roles(setup, batch, round)
        setup.publish_weights(version=round)
        setup.prompts.num_drawn += len(sampled.tasks)
    metrics = _batch_metrics(config, all_sessions, plan) | advantages.metrics | off_policy | trained
    metrics["perf/tokens_per_second"] = metrics["perf/tokens"] / clock.total
    return RoundResult(sampled.tasks, all_sessions, table, plan, ledger, advantages.advantages, metrics, clock.seconds)


def gather_round(world: World, rank_sessions: SessionTable, *, num_sessions: int) -> SessionTable:
    """The sessions of the round from what each rank has run, the same on every rank.

    No rank asks the store, so a late writer cannot make two ranks see different rounds.
    """
    table = SessionTable.join(world.gather(rank_sessions))
    if len(table) != num_sessions:
        raise TrainError(
            f"round {table.round}: {len(table):,} of its {num_sessions:,} sessions have ended; "
            "please report this with the run folder"
        )
    return table


def check_learnable(table: SessionTable) -> None:
    """A TrainError if the round has nothing to learn from."""
    if table.failed.all():
        (prompt, session), first = next(iter(table.causes.items()))
        cause, count = Counter(table.causes.values()).most_common(1)[0]
        most_common = "" if cause == first else f"; the most common cause, of {count:,}: {cause}"
        raise TrainError(
            f"round {table.round}: all {len(table):,} sessions failed, so there is nothing to learn from; "
            f"the first, {prompt}/{session}: {first}{most_common}"
        )
    if not table.rows.loss_tokens.any():
        raise TrainError(
            f"round {table.round}: none of its {len(table.rows):,} rows has a token that was generated, so there is "
            "nothing to learn from; is an `await` missing before generate()?"
        )


def _with_targets(batch: TensorBatch, tokens: Mapping[str, TokenVector], advantages: TokenAdvantages) -> TensorBatch:
    """The batch with everything that the losses need."""
    targets = {name: flat for name, flat in tokens.items() if name != "response_mask"}
    targets["advantages"] = advantages.advantages
    if advantages.returns is not None:
        targets["returns"] = advantages.returns
    for name, flat in targets.items():
        batch = batch.with_responses(name, flat)
    return batch


def train_roles(setup: Setup, batch: TensorBatch, round: int) -> dict[str, float]:
    """Train the critic, then the actor, as planned; the metrics of both."""
    config, roles = setup.config, batch.plan.trained_roles
    metrics: dict[str, float] = {}
    if setup.critic and "critic" in roles:
        loss = critic_loss(config, setup.critic)
        metrics |= train_role(setup.critic, batch, loss, ("values", "returns"), config=config, round=round)
    if "actor" in roles:
        loss, fields = actor_loss(config, setup.actor), actor_fields(config, batch)
        metrics |= train_role(setup.actor, batch, loss, fields, config=config, round=round, experts=setup.experts)
    return metrics


def _batch_metrics(config: Config, sampled: SessionTable, plan: Plan) -> dict[str, float]:
    """Metrics of all sessions that were sampled, and of the plan."""
    scores, num_prompts = sampled.scores(config.rollout.on_failure), len({*sampled.prompt.tolist()})
    metrics = score_metrics(scores) | signal_metrics(scores, num_prompts)
    if config.rollout.dynamic_sampling:
        metrics["prompts/sampled"] = float(num_prompts)
    return metrics | session_metrics(sampled) | row_metrics(sampled.rows) | perf_metrics(plan)
