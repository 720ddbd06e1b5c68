"""What a run leaves behind and shows while it runs, all written by the first rank: events, TensorBoard, progress.

Invariants: a round is one line of events, whole or not there; after a resume the later line of a round is the one that
counts; nothing here alters what is learnt.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from math import ceil, nan
from pathlib import Path
from time import perf_counter

from raggedright.agents.recorder import OnDone
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
    SamplesEvent,
    StartEvent,
    WarningEvent,
    World,
    read_events,
)
from raggedright.report.no_gradient import (
    few_with_signal_words,
    has_few_with_signal,
    learned_nothing,
    no_gradient_words,
)
from raggedright.train.progress import Figures, Progress, shares_of
from raggedright.train.round import RoundResult
from raggedright.train.samples import sample_sessions
from raggedright.train.setup import Setup, run_id
from raggedright.train.streak import Streak
from raggedright.train.trackers import TrackedRun, Trackers

MOST_FAILED = 20  # causes written down a round


class RunRecorder:
    """Writes a run down; on ranks other than the first it does nothing."""

    def __init__(self, setup: Setup, *, first_round: int = 1, found: Mapping[int, int] | None = None) -> None:
        self.setup, self.config, self.found = setup, setup.config, found or {}
        self.began = perf_counter()
        self.rounds_done = first_round - 1
        if not setup.world.is_first:
            return
        before = _rounds_before(self.config.out / EVENTS_FILE, first_round)
        self.streaks = _streaks(self.config, before)
        self.has_warned_of_plan = False
        self.log = EventLog(self.config.out / EVENTS_FILE)
        self.progress = Progress(self.config.train.rounds, done=self.rounds_done)
        num_found = self.found.get(first_round, 0)
        if words := found_words(self.config, first_round, num_found):
            self.progress.say(words)
        self.log.write(
            StartEvent(
                time=_now(),
                version=version("raggedright"),
                config=self.config.model_dump(mode="json"),
                layout=self.config.layout(self.config.train.rounds),
                num_parameters=sum(p.numel() for p in setup.actor.model.parameters()),
                resumed_from=self.rounds_done,
                sessions_found=num_found,
                world=World(dp=setup.world.dp_size, device=setup.world.device.type),
            )
        )
        self._warn(_missing_rounds(before, first_round))
        self.trackers = Trackers(self.config, _tracked_run(self.config, first_round), self._warn_of_tracker)

    def session_done(self, round: int) -> OnDone | None:
        """What is to be told of sessions of this rank that end."""
        if not self.setup.world.is_first:
            return None
        train, dp_size = self.config.train, self.setup.world.dp_size
        total = ceil(train.batch_size * self.config.rollout.n / dp_size)
        done = self.found.get(round, 0) // dp_size

        def count(num_ended: int) -> None:
            nonlocal done
            done += num_ended
            if done > total and not self.config.rollout.dynamic_sampling:
                done = total
            self.progress.sessions(round, done, max(done, total))

        return count

    def round(self, round: int, result: RoundResult) -> None:
        """A round that has trained."""
        self.rounds_done = round
        if not self.setup.world.is_first:
            return
        event = round_event(round, result, self.found.get(round, 0))
        self.log.write(event)
        if self._is_sampled(round):
            self.log.write(RowsEvent(round=round, columns=result.table.rows, layout=result.plan.layout))
            sessions = sample_sessions(self.setup, result, self.config.logging.sample_sessions)
            self.log.write(SamplesEvent(round=round, sessions=sessions))
        self.trackers.log(result.metrics | {f"seconds/{part}": s for part, s in result.seconds.items()}, round)
        self.progress.round(round, figures_of(event))
        for streak in self.streaks:
            self._warn(streak.add(event))
        if result.plan.warnings and not self.has_warned_of_plan:
            self.has_warned_of_plan = True  # a later round's plan is much like this one
            for text in result.plan.warnings:
                self._warn(WarningEvent(round=round, first_round=round, kind="plan", text=f"round {round}: {text}"))

    def evaluation(self, round: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after a round."""
        if self.setup.world.is_first:
            self.log.write(EvalEvent(round=round, metrics=dict(metrics)))
            self.trackers.log(metrics, round)
            self.progress.evaluation(round, metrics)

    def sync(self) -> None:
        """Wait until the events are on disk."""
        if self.setup.world.is_first:
            self.log.sync()

    def end(self, reason: str) -> None:
        """The run's end: finished, interrupted or failed."""
        if self.setup.world.is_first:
            self.trackers.close()
            for streak in self.streaks:
                self._warn(streak.end(num_rounds=self.rounds_done))
            seconds = perf_counter() - self.began
            self.log.write(EndEvent(time=_now(), rounds=self.rounds_done, reason=reason, seconds=seconds))
            self.log.close()
            self.progress.close()

    def _warn(self, warning: WarningEvent | None) -> None:
        if warning is not None:
            self.log.write(warning)
            self.progress.warn(warning.text)

    def _warn_of_tracker(self, text: str) -> None:
        round = self.rounds_done
        self._warn(WarningEvent(round=round, first_round=round, kind="tracker", text=text))

    def _is_sampled(self, round: int) -> bool:
        every = self.config.logging.sample_every or max(1, self.config.train.rounds // 10)
        return round in (1, self.config.train.rounds) or round % every == 0


def _rounds_before(path: Path, first_round: int) -> list[RoundEvent]:
    """The recorded rounds of a run that is resumed; a damaged file is an error before anything is trained."""
    rounds = read_events(path).rounds if path.exists() else ()
    return [each for each in rounds if each.round < first_round]


def _missing_rounds(before: Sequence[RoundEvent], first_round: int) -> WarningEvent | None:
    """A warning where the checkpoint has rounds that the events do not have."""
    missing = sorted({*range(1, first_round)} - {each.round for each in before})
    if not missing:
        return None
    text = (
        f"{EVENTS_FILE} has {len(before):,} of the {first_round - 1:,} rounds that the checkpoint contains; it was "
        f"damaged or replaced, and the report has no figures of round {missing[0]:,}"
    )
    text += f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
    return WarningEvent(round=missing[-1], first_round=missing[0], kind="events", text=text)


def _streaks(config: Config, before: Sequence[RoundEvent]) -> list[Streak]:
    """What is to be warned of, with the rounds that a run which goes on has behind it."""

    def is_amiss(round: RoundEvent) -> bool:
        return learned_nothing(round, has_group_advantages=config.has_group_advantages)

    batch_size = config.train.batch_size
    streaks = [Streak("no gradient", config.logging.no_gradient_rounds, is_amiss, no_gradient_words)]
    if config.rollout.dynamic_sampling:
        few = partial(has_few_with_signal, batch_size=batch_size)
        most = config.rollout.max_sampled_batches
        words = partial(few_with_signal_words, batch_size=batch_size, max_sampled_batches=most)
        streaks.append(Streak("dynamic sampling", 1, few, words))
    for round in before:
        for streak in streaks:
            streak.add(round)
    return streaks


def figures_of(round: RoundEvent) -> Figures:
    """The numbers of a round that the terminal shows."""
    failed = sum(count for outcome, count in round.ledger.sessions.items() if outcome.startswith("failed"))
    return Figures(
        score=round.metrics.get("critic/score/mean", nan),
        rows=round.rows or 0,
        padding_rows=round.padding_rows or 0,
        failed=failed,
        tokens_per_second=round.metrics.get("perf/tokens_per_second", nan),
        first_failure=next((f"{each.prompt}/{each.session}: {each.cause}" for each in round.failed), ""),
        score_std=round.metrics.get("critic/score/std", nan),
        shares=shares_of(round.metrics),
    )


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
        failed=tuple(failed[:MOST_FAILED]),
        seconds=dict(result.seconds),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def found_words(config: Config, first_round: int, num_found: int) -> str:
    """What a run that goes on has found, and what comes next; nothing for one that begins."""
    if first_round == 1 and not num_found:
        return ""
    of_all = f" of {config.train.batch_size * config.rollout.n:,}" if not config.rollout.dynamic_sampling else ""
    checkpoint = f"the checkpoint of round {first_round - 1}" if first_round > 1 else "no checkpoint"
    left = max(0, config.train.rounds - first_round + 1)
    if not left:
        done = f"all {config.train.rounds:,} rounds are done; raise train.rounds for more"
        return f"{config.out}: found {checkpoint}, and {done}"
    return (
        f"resuming {config.out}: found {checkpoint} and {num_found:,}{of_all} sessions of round "
        f"{first_round}; {left:,} of {config.train.rounds:,} rounds to go"
    )


def _tracked_run(config: Config, first_round: int) -> TrackedRun:
    values = config.model_dump(mode="json")
    return TrackedRun(
        id=run_id(config.out), name=config.out.name, folder=config.out, config=values, first_round=first_round
    )
