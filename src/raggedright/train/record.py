"""What a run records and shows while it runs, all written by the first rank: events, trackers, progress.

Invariants: a round is one line of events, complete or absent; after a resume the later line of a round counts; nothing
here changes what is learned. The sampled sessions are the same whenever the round has the same scores, and include
the lowest and the highest; their tokens, masks and log-probs are those of the store, as they were trained on.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from math import ceil, isnan
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from raggedright.agents.runner import OnDone
from raggedright.config.schema import Config
from raggedright.report.events import (
    EVENTS_FILE,
    EndEvent,
    EvalEvent,
    EventLog,
    Failure,
    LedgerCounts,
    RoundEvent,
    RowsEvent,
    SampledSession,
    SampledTrajectory,
    SamplesEvent,
    StartEvent,
    WarningEvent,
    WorldInfo,
    read_events,
)
from raggedright.report.run_numbers import (
    few_with_signal_words,
    has_few_with_signal,
    learned_nothing,
    no_gradient_words,
)
from raggedright.sessions import TOKEN_FIELDS, SessionTable
from raggedright.train.progress import Progress, resume_text
from raggedright.train.setup import Setup, run_id
from raggedright.train.trackers import TrackedRun, Trackers
from raggedright.train.train_round import RoundResult

MAX_FAILURES = 20  # recorded per round
MAX_TRAJECTORIES = 12  # of a sampled session
MAX_TASK_CHARACTERS = 400  # of each field of its task


class RunRecorder:
    """Records a run; on ranks other than the first it does nothing."""

    def __init__(self, setup: Setup, *, first_round: int = 1, sessions_found: Mapping[int, int] | None = None) -> None:
        self.setup, self.config, self.sessions_found = setup, setup.config, sessions_found or {}
        self.start = perf_counter()
        self.rounds_done = first_round - 1
        if not setup.world.is_first:
            return
        before = _rounds_before(self.config.out / EVENTS_FILE, first_round)
        self.streaks = _streaks(self.config, before)
        self.has_warned_of_plan = False
        self.log = EventLog(self.config.out / EVENTS_FILE)
        self.progress = Progress(self.config.train.rounds, done=self.rounds_done)
        try:
            self._record_start(before, first_round)
        except BaseException:
            self._close()
            raise

    def _record_start(self, before: Sequence[RoundEvent], first_round: int) -> None:
        """Record and show what is run, and start the trackers."""
        world, num_found = self.setup.world, self.sessions_found.get(first_round, 0)
        if text := resume_text(self.config, first_round, num_found):
            self.progress.say(text)
        sizes = [(p.numel(), p.requires_grad) for p in self.setup.actor.model.parameters()]
        num_parameters = sum(size for size, _ in sizes)
        if self.config.has_adapter:
            num_trained = sum(size for size, trains in sizes if trains)
            self.progress.say(f"LoRA: {num_trained:,} of {num_parameters:,} parameters train")
        values = self.config.model_dump(mode="json")
        self.log.write(
            StartEvent(
                time=_now(),
                version=version("raggedright"),
                config=values,
                layout=self.config.layout(self.config.train.rounds),
                num_parameters=num_parameters,
                resumed_from=self.rounds_done,
                sessions_found=num_found,
                world=WorldInfo(dp=world.dp_size, device=world.device.type),
            )
        )
        self._warn(_missing_rounds(before, first_round))
        folder = self.config.out
        run = TrackedRun(id=run_id(folder), name=folder.name, folder=folder, config=values, first_round=first_round)
        self.trackers = Trackers(self.config, run, self._warn_of_tracker)

    def session_done(self, round: int) -> OnDone | None:
        """The callback for sessions of this rank that end."""
        if not self.setup.world.is_first:
            return None
        dp_size = self.setup.world.dp_size
        total = ceil(self.config.train.batch_size * self.config.rollout.n / dp_size)
        done = self.sessions_found.get(round, 0) // dp_size

        def count(num_ended: int) -> None:
            nonlocal done
            done += num_ended
            if done > total and not self.config.rollout.dynamic_sampling:
                done = total
            self.progress.sessions(round, done, max(done, total))

        return count

    def round(self, round: int, result: RoundResult) -> None:
        """Record a round that has trained."""
        self.rounds_done = round
        if not self.setup.world.is_first:
            return
        event = round_event(round, result, self.sessions_found.get(round, 0))
        self._write(event)
        if self._is_sampled(round):
            self.log.write(RowsEvent(round=round, columns=result.table.rows, layout=result.plan.layout))
            sessions = sample_sessions(self.setup, result, self.config.logging.sample_sessions)
            self.log.write(SamplesEvent(round=round, sessions=sessions))
        self.trackers.log(result.metrics | {f"seconds/{part}": s for part, s in result.seconds.items()}, round)
        for streak in self.streaks:
            self._warn(streak.add(event))
        if result.plan.warnings and not self.has_warned_of_plan:
            self.has_warned_of_plan = True  # plans of later rounds are similar
            for text in result.plan.warnings:
                self._warn(WarningEvent(round=round, first_round=round, kind="plan", text=f"round {round}: {text}"))

    def evaluation(self, round: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation after a round."""
        if self.setup.world.is_first:
            self._write(EvalEvent(round=round, metrics=dict(metrics)))
            self.trackers.log(metrics, round)

    def sync(self) -> None:
        """Wait until the events are on disk."""
        if self.setup.world.is_first:
            self.log.sync()

    def end(self, reason: str) -> None:
        """Record the end of the run: finished, interrupted or failed."""
        if not self.setup.world.is_first:
            return
        try:
            self.trackers.close()
            for streak in self.streaks:
                self._warn(streak.end(num_rounds=self.rounds_done))
            seconds = perf_counter() - self.start
            self.log.write(EndEvent(time=_now(), rounds=self.rounds_done, reason=reason, seconds=seconds))
        finally:
            self._close()

    def _close(self) -> None:
        self.log.close()
        self.progress.close()

    def _write(self, event: RoundEvent | EvalEvent | WarningEvent) -> None:
        self.log.write(event)
        self.progress.show(event)

    def _warn(self, warning: WarningEvent | None) -> None:
        if warning is not None:
            self._write(warning)

    def _warn_of_tracker(self, text: str) -> None:
        round = self.rounds_done
        self._warn(WarningEvent(round=round, first_round=round, kind="tracker", text=text))

    def _is_sampled(self, round: int) -> bool:
        every = self.config.logging.sample_every or max(1, self.config.train.rounds // 10)
        return round in (1, self.config.train.rounds) or round % every == 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def round_event(round: int, result: RoundResult, num_reused: int) -> RoundEvent:
    """The event of a round; `num_reused` sessions were in the store when the run resumed."""
    plan = result.plan
    steps = [step for role in plan.trained_roles for step in plan.steps(role)]
    failed = [Failure(prompt=p, session=s, cause=cause) for (p, s), cause in result.sampled.causes.items()]
    return RoundEvent(
        round=round,
        metrics=dict(result.metrics),
        rows=len(result.table.rows),
        padding_rows=plan.num_padding_rows,
        sessions=len(result.sampled),
        optimizer_steps=sum(not step.skipped for step in steps),
        skipped_steps=sum(step.skipped for step in steps),
        ledger=LedgerCounts.model_validate({**result.ledger.to_dict(), "reused_sessions": num_reused}),
        failed=tuple(failed[:MAX_FAILURES]),
        seconds=dict(result.seconds),
    )


def _rounds_before(path: Path, first_round: int) -> list[RoundEvent]:
    """The recorded rounds of a run that is resumed; a damaged file is an error before anything is trained."""
    rounds = read_events(path).rounds if path.exists() else ()
    return [event for event in rounds if event.round < first_round]


def _missing_rounds(before: Sequence[RoundEvent], first_round: int) -> WarningEvent | None:
    """A warning if the checkpoint contains rounds that the events do not have."""
    missing = sorted({*range(1, first_round)} - {event.round for event in before})
    if not missing:
        return None
    text = (
        f"{EVENTS_FILE} has {len(before):,} of the {first_round - 1:,} rounds that the checkpoint contains; it was "
        f"damaged or replaced, and the report has no figures of round {missing[0]:,}"
    )
    text += f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
    return WarningEvent(round=missing[-1], first_round=missing[0], kind="events", text=text)


class Streak:
    """Counts consecutive rounds with the same problem, and decides when to warn about them.

    It warns after `patience` such rounds, again whenever their number has doubled, and when they end. So a long run
    repeats itself rarely, and the last warning of a streak says how long it was. `text` makes the warning from the
    first round of the streak and the events of its last rounds.
    """

    def __init__(
        self,
        kind: str,
        patience: int,
        has_problem: Callable[[RoundEvent], bool],
        text: Callable[[int, Sequence[RoundEvent]], str],
    ) -> None:
        self._kind, self._patience, self._has_problem, self._text = kind, patience, has_problem, text
        self._last: deque[RoundEvent] = deque(maxlen=patience)
        self.length = self._length_warned = 0

    def add(self, round: RoundEvent) -> WarningEvent | None:
        """Count a round; a warning if one is due."""
        if not self._has_problem(round):
            warning = self.end()
            self._last.clear()
            self.length = self._length_warned = 0
            return warning
        self._last.append(round)
        self.length += 1
        return self._warning() if self.length == max(self._patience, 2 * self._length_warned) else None

    def end(self, *, num_rounds: int | None = None) -> WarningEvent | None:
        """A warning if the streak grew since the last one, or if it spans all rounds of the run."""
        is_due = self.length >= self._patience or (self.length > 0 and self.length == num_rounds)
        return self._warning() if is_due and self.length > self._length_warned else None

    def _warning(self) -> WarningEvent:
        self._length_warned = self.length
        round = self._last[-1].round
        first_round = round - self.length + 1
        text = self._text(first_round, [*self._last])
        return WarningEvent(round=round, first_round=first_round, kind=self._kind, text=text)


def _streaks(config: Config, before: Sequence[RoundEvent]) -> list[Streak]:
    """The problems to warn about, with the rounds that a resumed run has already done."""
    batch_size = config.train.batch_size
    has_no_gradient = partial(
        learned_nothing, has_group_advantages=config.has_group_advantages, has_critic=config.has_critic
    )
    no_gradient_text = partial(no_gradient_words, other_terms=_terms_without_scores(config))
    streaks = [Streak("no gradient", config.logging.no_gradient_rounds, has_no_gradient, no_gradient_text)]
    if config.rollout.dynamic_sampling:
        has_few = partial(has_few_with_signal, batch_size=batch_size)
        limit = config.rollout.max_sampled_batches
        text = partial(few_with_signal_words, batch_size=batch_size, max_sampled_batches=limit)
        streaks.append(Streak("dynamic sampling", 1, has_few, text))
    for event in before:
        for streak in streaks:
            streak.add(event)
    return streaks


def _terms_without_scores(config: Config) -> list[str]:
    """The terms of the actor's loss that give a gradient whatever the scores are."""
    terms = {
        "the entropy bonus (algorithm.entropy_coef)": config.algorithm.entropy_coef,
        "the KL term (reference.coef)": config.reference.coef if config.reference.kl != "none" else 0,
        "the balance of experts (experts.balance_coef)": config.experts.balance_coef,
    }
    return [term for term, coef in terms.items() if coef]


def sample_sessions(setup: Setup, result: RoundResult, count: int) -> tuple[SampledSession, ...]:
    """`count` sessions from the lowest to the highest score, each with its first trajectories, token by token."""
    table = result.table
    advantages = result.advantages.split(table.rows.response_tokens.tolist())
    tasks = {task.uid: task.data for task in result.tasks}
    sampled = []
    for i in _spread(table, count):
        rows = np.flatnonzero(table.session_of_row == i)[:MAX_TRAJECTORIES]
        arrays = setup.store.read(table.row_keys(rows), TOKEN_FIELDS)
        trajectories = [
            _sampled_trajectory(setup, table, row, fields, advantages[row].tolist())
            for row, fields in zip(rows.tolist(), arrays, strict=True)
        ]
        key = table.session_key(i)
        sampled.append(
            SampledSession(
                prompt=key.prompt,
                session=key.session,
                score=float(table.score[i]),
                task={str(name): _task_value(value) for name, value in tasks[key.prompt].items()},
                trajectories=tuple(trajectories),
            )
        )
    return tuple(sampled)


def _spread(table: SessionTable, count: int) -> list[int]:
    """Positions of sessions at even distances in the order of their scores."""
    ranked = sorted(np.flatnonzero(table.num_rows).tolist(), key=lambda i: (table.score[i], table.session_key(i)))
    places = sorted({round(i * (len(ranked) - 1) / max(1, count - 1)) for i in range(min(count, len(ranked)))})
    return [ranked[place] for place in places]


def _task_value(value: object) -> object:
    """A field of a task; text that is cut if the field is long or cannot be JSON."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)[:MAX_TASK_CHARACTERS]
    return value if len(text) <= MAX_TASK_CHARACTERS else text[:MAX_TASK_CHARACTERS]


def _sampled_trajectory(
    setup: Setup, table: SessionTable, row: int, fields: Mapping[str, NDArray], advantages: list[float]
) -> SampledTrajectory:
    ids, mask, log_probs = (fields[name].tolist() for name in TOKEN_FIELDS)
    reward = float(table.row_columns["reward"][row])
    return SampledTrajectory(
        role=table.row_columns["role"][row],
        reward=None if isnan(reward) else reward,
        finish_reason=table.row_columns["finish_reason"][row],
        tokens=tuple(str(setup.tokenizer.decode([token])) for token in ids),
        prompt_tokens=int(table.row_columns["prompt_tokens"][row]),
        mask=mask,
        advantages=tuple(advantages),
        log_probs=log_probs,
    )
