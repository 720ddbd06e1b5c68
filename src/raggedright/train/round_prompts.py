"""Which prompts a round samples, and which of them it trains on.

A round samples one batch of prompts. With dynamic sampling it samples further prompts, wave by wave, until `batch_size`
of them have signal (the scores of their sessions differ) or until the limit is reached; then the batch is filled up
with other prompts. Invariants: everything here follows from the order of the prompts and their scores, so all ranks,
and a run that is resumed, choose the same prompts; a batch always has `batch_size` prompts, so the number of optimizer
steps is what the config says; the sources have enough tasks for every round and evaluation.
"""

from dataclasses import dataclass, field
from math import ceil

from raggedright.advantages import prompts_with_signal
from raggedright.agents.agent_session import Task
from raggedright.agents.task_sources import Tasks, load_tasks
from raggedright.config.schema import Config
from raggedright.sessions import SessionTable

NO_SIGNAL, BATCH_FULL = "no signal", "batch full"  # why a prompt that was sampled is not trained on


@dataclass(slots=True)
class PromptSequence:
    """The tasks to train on, in order, and how many of them all rounds so far have drawn (part of a checkpoint)."""

    tasks: Tasks
    config: Config
    num_drawn: int = 0

    @property
    def max_per_round(self) -> int:
        """The maximum number of tasks that one round may draw, never more than the source has."""
        batch_size, rollout = self.config.train.batch_size, self.config.rollout
        limit = batch_size * (rollout.max_sampled_batches if rollout.dynamic_sampling else 1)
        return min(limit, self.tasks.num_different or limit)

    def next(self, round: int, count: int, *, after: int) -> list[Task]:
        """`count` tasks of a round that has already drawn `after` others."""
        batch_size = self.config.train.batch_size
        if not self.config.rollout.dynamic_sampling:
            return self.tasks.of_round(round, batch_size)
        return self.tasks.draw(self.num_drawn + after, count, batch_size=batch_size, most=self.max_per_round)


def load_prompts(config: Config) -> tuple[PromptSequence, Tasks]:
    """The tasks to train on and those of evaluations, drawn with different seeds."""
    prompts = config.prompts
    tasks = load_tasks(prompts.source, options=prompts.options, seed=config.seed)
    tasks.check_enough(config.train.batch_size, "train.batch_size")
    source, options = prompts.eval_source, prompts.eval_options
    eval_tasks = load_tasks(
        prompts.source if source is None else source,
        options=(prompts.options if source is None else {}) if options is None else options,
        held_out=True,
        seed=config.seed + 1,
        key="prompts.source" if source is None else "prompts.eval_source",
        options_key="prompts.options" if source is options is None else "prompts.eval_options",
    )
    if config.eval.every:
        eval_tasks.check_enough(config.eval.prompts, "eval.prompts")
    return PromptSequence(tasks, config), eval_tasks


@dataclass(slots=True)
class SampledPrompts:
    """The prompts that a round has sampled so far, in order; `parts` has the sessions of this rank, by wave."""

    batch_size: int
    tasks: list[Task] = field(default_factory=list)
    parts: list[SessionTable] = field(default_factory=list)
    _with_signal: set[str] = field(default_factory=set)
    _finished: set[str] = field(default_factory=set)

    @property
    def rank_sessions(self) -> SessionTable:
        """All sessions that this rank ran."""
        return SessionTable.join(self.parts)

    def add_scores(self, table: SessionTable, on_failure: str) -> None:
        """Note which prompts of a wave have signal; `table` has the sessions of all ranks."""
        self._with_signal |= prompts_with_signal(table.scores(on_failure))
        self._finished |= {*table.prompt[~table.failed].tolist()}

    def next_wave(self, max_prompts: int) -> int:
        """How many prompts to sample next, estimated from the share with signal so far: 0 if done, at most a batch."""
        missing, num_sampled = self.batch_size - len(self._with_signal), len(self.tasks)
        if missing <= 0:
            return 0
        expected = ceil(missing * num_sampled / max(len(self._with_signal), 1)) if num_sampled else self.batch_size
        return min(expected, self.batch_size, max_prompts - num_sampled)

    def skipped_prompts(self) -> dict[str, str]:
        """The prompts that are not trained on, each with the reason.

        The batch takes prompts with signal first, then those with a finished session, then the others.
        """
        uids = [task.uid for task in self.tasks]
        rank = {uid: 0 if uid in self._with_signal else 1 if uid in self._finished else 2 for uid in uids}
        surplus = sorted(uids, key=rank.__getitem__)[self.batch_size :]
        return {uid: BATCH_FULL if uid in self._with_signal else NO_SIGNAL for uid in surplus}


def split_round(table: SessionTable, skipped: dict[str, str]) -> tuple[SessionTable, dict[str, SessionTable]]:
    """The sessions of a round that are trained on, and those that are not, by reason."""
    if not skipped:
        return table, {}
    reasons = sorted({*skipped.values()})
    by_reason = {reason: table.of_prompts({uid for uid in skipped if skipped[uid] == reason}) for reason in reasons}
    return table.of_prompts({*table.prompt.tolist()} - skipped.keys()), by_reason
