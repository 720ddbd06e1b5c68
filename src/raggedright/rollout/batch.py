"""Continuous batching without a clock: rows that decode together, one token a turn, and newcomers that join them.

A row leaves as soon as it stops, and nothing of it outlives the next pass; newcomers are read in as few passes as
their lengths allow and may join at any turn. Nothing here waits or knows of an event loop. Invariants: every job that
is given to `admit` is answered once, or its future was done before; a job whose future is done (cancelled, aborted)
leaves at the next turn.
"""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raggedright.rollout.cache import Forward, RowCache
from raggedright.rollout.engine import FinishReason, Generation, Sampling
from raggedright.rollout.noise import key_words
from raggedright.rollout.sampling import RowSettings, choose, uniforms
from raggedright.rollout.stops import TextStops
from raggedright.rollout.turn_cache import ID_BYTES, PastRow, TurnCache

# The most columns x rows of a pass over newcomers; and of one that also has rows below half the length of its longest.
_PREFILL_TOKENS = 16_384
_SMALL_TOKENS = 4_096


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request under way: what it has so far, and where its answer goes."""

    number: int
    context: bytes  # its ids, as the cache takes them
    key: bytes  # of its randomness
    sampling: Sampling
    texts: TextStops | None
    future: "asyncio.Future[Generation]"
    media: Mapping[str, Tensor] | None = None
    past: PastRow | None = None  # of an earlier generation of its trajectory, until the context is read
    version: int = -1  # of the weights that its context was read with
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    experts: list[NDArray[np.integer]] = field(default_factory=list)  # [positions, layers, topk] of each pass

    @property
    def num_new(self) -> int:
        """Tokens of the context that are to be read."""
        return (len(self.context) - (len(self.past.ids) if self.past else 0)) // ID_BYTES

    def finish(self, reason: FinishReason, version: int) -> None:
        """Answer with what there is, unless nobody waits any more."""
        if not self.future.done():
            experts = np.concatenate(self.experts) if self.experts else None
            self.future.set_result(Generation(self.ids, self.log_probs, reason, version, experts))

    def end(self) -> FinishReason | None:
        """Why the generation ends with its last token, if it does."""
        if self.ids[-1] in self.sampling.stop_ids or (self.texts is not None and self.texts.found(self.ids)):
            return "stop"
        return "length" if len(self.ids) == self.sampling.max_tokens else None


class _Group:
    """Rows whose cache is one tensor a layer."""

    def __init__(self, forward: Forward, jobs: list[Job], turn_cache: TurnCache) -> None:
        self.jobs = jobs
        self.cache = RowCache(forward)
        self._turn_cache = turn_cache
        self._device = forward.device
        self._rows_changed()

    def _rows_changed(self) -> None:
        self._draw: tuple[RowSettings, NDArray[np.uint64]] | None = None

    def _drawing(self) -> tuple[RowSettings, NDArray[np.uint64]]:
        """How tokens are drawn, made anew when rows have changed."""
        if self._draw is None:
            settings = RowSettings.of([job.sampling for job in self.jobs], self._device)
            self._draw = settings, key_words([job.key for job in self.jobs])
        return self._draw

    def prefill(self, version: int) -> None:
        """Read the contexts, and take the first token of each row."""
        jobs = self.jobs
        logits = self.cache.prefill([j.context for j in jobs], [j.media for j in jobs], [j.past for j in jobs])
        experts = self.cache.routed_experts()
        for job in jobs:
            job.version = version
            if job.past is not None and job.past.experts is not None and experts is not None:
                job.experts.append(job.past.experts[: max(len(job.context) // ID_BYTES - experts.shape[1], 0)])
            job.past = None
        self._take(logits, version)

    def decode(self, version: int) -> None:
        """Take one more token of each row."""
        ahead = max(job.sampling.max_tokens - len(job.ids) for job in self.jobs)
        self._take(self.cache.decode([job.ids[-1] for job in self.jobs], ahead=ahead), version)

    def _take(self, logits: Tensor, version: int) -> None:
        experts = self.cache.routed_experts()
        if experts is not None:
            for job, of_row in zip(self.jobs, experts, strict=True):
                job.experts.append(of_row[-(len(job.context) // ID_BYTES) :])
        settings, words = self._drawing()
        chosen = choose(logits, settings, uniforms(words, self.cache.lengths))
        for row, (job, token, log_prob) in enumerate(zip(self.jobs, *chosen, strict=True)):
            job.ids.append(token)
            job.log_probs.append(log_prob)
            if (reason := job.end()) is not None:
                self._keep(row, job, version)
                job.finish(reason, version)
        self.drop_done()

    def _keep(self, row: int, job: Job, version: int) -> None:
        """Keep what was computed of a row that ends, for the next generation of its trajectory."""
        num_tokens = int(self.cache.lengths[row])
        if job.media is not None or job.version != version or not self._turn_cache.wants(num_tokens):
            return
        fed = array("q", job.ids[:-1]).tobytes()
        experts = np.concatenate(job.experts) if job.experts else None
        self._turn_cache.put(job.key, PastRow(job.context + fed, self.cache.past(row), experts))

    def drop_done(self) -> None:
        """Let go of the rows that nobody waits for any more."""
        kept = [row for row, job in enumerate(self.jobs) if not job.future.done()]
        if len(kept) == len(self.jobs):
            return
        self.jobs = [self.jobs[row] for row in kept]
        if kept:
            self.cache.keep(np.array(kept))
            self._rows_changed()

    def join(self, other: "_Group") -> None:
        """Put another group's rows behind these."""
        self.jobs += other.jobs
        self.cache.join(other.cache)
        self._rows_changed()


class Batch:
    """All rows that decode together."""

    def __init__(self, forward: Forward, turn_cache: TurnCache) -> None:
        self._forward, self._turn_cache = forward, turn_cache
        self._running: _Group | None = None

    @property
    def jobs(self) -> Sequence[Job]:
        """What is under way here."""
        return self._running.jobs if self._running else ()

    def admit(self, jobs: Sequence[Job], version: int) -> None:
        """Read newcomers' contexts and take their first tokens; those that go on decode with the others."""
        waiting = [job for job in jobs if not job.future.done()]
        if len(self._turn_cache):
            for job in waiting:
                job.past = self._turn_cache.take(job.key, job.context) if job.media is None else None
        for part in _by_length(waiting, padded=self._forward.reads_padded):
            group = _Group(self._forward, part, self._turn_cache)
            group.prefill(version)
            if not group.jobs:
                continue
            if self._running is None:
                self._running = group
            else:
                self._running.join(group)

    def turn(self, version: int) -> None:
        """One token for every row that somebody still waits for."""
        if self._running is not None:
            self._running.drop_done()
        if self._running is not None and self._running.jobs:
            self._running.decode(version)
        if not self.jobs:
            self._running = None

    def clear(self) -> None:
        """Forget all rows."""
        self._running = None


def _by_length(jobs: list[Job], *, padded: bool) -> list[list[Job]]:
    """Newcomers in passes that waste little (nothing, unless `padded`): longest first, within the token limits.

    A length is that of what is to be read. Of one length, first come first.
    """
    jobs = sorted(jobs, key=lambda job: job.num_new, reverse=True)
    parts: list[list[Job]] = []
    for job in jobs:
        if parts:
            first, own = parts[-1][0], job.num_new
            longest = first.num_new
            fits = padded or (own == longest and len(job.context) == len(first.context))
            small = 0 if job.past else _SMALL_TOKENS  # a row with a past would read again what it has
            if fits and longest * (len(parts[-1]) + 1) <= (_PREFILL_TOKENS if 2 * own >= longest else small):
                parts[-1].append(job)
                continue
        parts.append([job])
    return parts
