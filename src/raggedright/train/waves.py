"""Which prompts a round samples and which of them it trains on: one wave, or with dynamic sampling as many as it takes.

A prompt has signal if the scores of its sessions differ. With dynamic sampling further prompts are sampled until
`batch_size` of them have signal, or until `most` were sampled; then the batch is filled up with others. Invariants:
everything here follows from the order of the prompts and their scores, so that all ranks, and a run that resumes,
choose the same; a batch always has `batch_size` prompts, so that the number of optimizer steps is the config's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from raggedright.advantages import prompts_with_signal
from raggedright.agents.session import Task
from raggedright.sessions import SessionTable

NO_SIGNAL, BATCH_FULL = "no signal", "batch full"  # why a prompt that was sampled is not trained on


@dataclass(slots=True)
class SampledPrompts:
    """The prompts that a round has sampled so far, in their order; `parts` has what this rank ran, wave by wave."""

    batch_size: int
    tasks: list[Task] = field(default_factory=list)
    parts: list[SessionTable] = field(default_factory=list)
    _with_signal: set[str] = field(default_factory=set)
    _finished: set[str] = field(default_factory=set)

    @property
    def own(self) -> SessionTable:
        """All that this rank ran."""
        return SessionTable.join(self.parts)

    def look_at(self, table: SessionTable, on_failure: str) -> None:
        """Take note of a wave's sessions, those of all ranks."""
        self._with_signal |= prompts_with_signal(table.scores(on_failure))
        self._finished |= {*table.prompt[~table.failed].tolist()}

    def next_wave(self, most: int) -> int:
        """How many prompts to sample next, from the share that had signal so far; a batch at most, 0 if done."""
        missing, num_sampled = self.batch_size - len(self._with_signal), len(self.tasks)
        if missing <= 0:
            return 0
        expected = ceil(missing * num_sampled / max(len(self._with_signal), 1)) if num_sampled else self.batch_size
        return min(expected, self.batch_size, most - num_sampled)

    def left_out(self) -> dict[str, str]:
        """Why each prompt that is not trained on is not: the batch takes those with signal first, then the others.

        Of the others, those with a finished session come before those without.
        """
        uids = [task.uid for task in self.tasks]
        rank = {uid: 0 if uid in self._with_signal else 1 if uid in self._finished else 2 for uid in uids}
        surplus = sorted(uids, key=rank.__getitem__)[self.batch_size :]
        return {uid: BATCH_FULL if uid in self._with_signal else NO_SIGNAL for uid in surplus}


def split_round(whole: SessionTable, left_out: dict[str, str]) -> tuple[SessionTable, dict[str, SessionTable]]:
    """The part of a round that is trained on, and by cause the parts that are not."""
    if not left_out:
        return whole, {}
    causes: Sequence[str] = sorted({*left_out.values()})
    skipped = {cause: whole.of_prompts({uid for uid in left_out if left_out[uid] == cause}) for cause in causes}
    return whole.of_prompts({*whole.prompt.tolist()} - left_out.keys()), skipped
