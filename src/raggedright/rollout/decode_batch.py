"""Continuous batching without a clock: rows that decode together, one token per step, and new rows that join them.

A row leaves as soon as it stops, and its memory is released at the next step. New rows are read in as few passes as
their lengths allow and may join at any step. Nothing here waits or knows of an event loop. Invariants: every job that
is passed to `admit` is answered once, or its future was done before; a job whose future is done (cancelled, aborted)
leaves at the next step.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.rollout.engine import FinishReason, Generation, Media, Sampling
from raggedright.rollout.kv_cache import Ids, KeptRows, PastRow, RowCache
from raggedright.rollout.local_model import LocalModel
from raggedright.rollout.sampling import TextStops, choose, uniforms

# The most columns x rows of a pass that reads new rows, and of one that also has rows shorter than half its longest.
_PREFILL_TOKENS = 16_384
_SMALL_PREFILL_TOKENS = 4_096


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request under way: what it has so far, and where its answer goes."""

    number: int
    context: Ids
    key: bytes  # of its noise
    sampling: Sampling
    texts: TextStops | None
    future: "asyncio.Future[Generation]"
    media: Media | None = None
    past: PastRow | None = None  # from an earlier generation of its trajectory, until the context is read
    version: int = -1  # of the weights that its context was read with
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    experts: list[NDArray[np.integer]] = field(default_factory=list)  # [positions, layers, topk] of each pass

    @property
    def num_new(self) -> int:
        """Tokens of the context that have to be read."""
        return len(self.context) - (len(self.past.ids) if self.past else 0)

    def all_experts(self) -> NDArray[np.integer] | None:
        """The experts of all positions that were read; None if they are not recorded."""
        return np.concatenate(self.experts) if self.experts else None

    def finish(self, reason: FinishReason, version: int) -> None:
        """Answer with the tokens so far, unless the request was cancelled."""
        if not self.future.done():
            self.future.set_result(Generation(self.ids, self.log_probs, reason, version, self.all_experts()))

    def end(self) -> FinishReason | None:
        """Why the generation ends with its last token, if it does."""
        if self.ids[-1] in self.sampling.stop_ids or (self.texts is not None and self.texts.reached(self.ids)):
            return "stop"
        return "length" if len(self.ids) == self.sampling.max_tokens else None


class _Group(NamedTuple):
    """Jobs, and the rows that they have in a cache; after a prefill several jobs may have the same row."""

    jobs: list[Job]
    cache: RowCache
    rows: list[int]

    def unfinished(self) -> "_Group":
        """The jobs that still wait for tokens."""
        left = [i for i, job in enumerate(self.jobs) if not job.future.done()]
        return _Group([self.jobs[i] for i in left], self.cache, [self.rows[i] for i in left])


class Batch:
    """All rows that decode together."""

    def __init__(self, model: LocalModel, kept_rows: KeptRows) -> None:
        self._model, self._kept_rows = model, kept_rows
        self._groups: list[_Group] = []

    @property
    def jobs(self) -> list[Job]:
        """The jobs that still wait for tokens."""
        return [job for group in self._groups for job in group.jobs if not job.future.done()]

    def admit(self, jobs: Sequence[Job], version: int) -> None:
        """Read the contexts of new jobs and take their first tokens; afterwards they decode with the others."""
        for job in jobs:
            if job.media is None:
                job.past = self._kept_rows.take(job.key, job.context)
        for part in _by_length(jobs, padded=self._model.reads_padded):
            self._prefill(part, version)

    def decode_step(self, version: int) -> None:
        """Take one more token for every row that is not finished."""
        self._groups = [group for group in (each.unfinished() for each in self._groups) if group.jobs]
        if not self._groups:
            return
        jobs = self.jobs
        group = self._groups[0]
        rows = [*range(len(jobs))]
        if len(self._groups) > 1 or group.rows != rows or len(group.cache.lengths) > len(rows) or group.cache.is_full:
            cache = RowCache.join([(each.cache, each.rows) for each in self._groups])
            group = _Group(jobs, cache, rows)
            self._groups = [group]
        self._take(group, group.cache.decode([job.ids[-1] for job in jobs]), version)

    def clear(self) -> None:
        """Drop all rows."""
        self._groups = []

    def _prefill(self, jobs: list[Job], version: int) -> None:
        """Read contexts; a context that several jobs share, as the sessions of a prompt do, is read once."""
        row_of: dict[object, int] = {}
        rows: list[int] = []
        read: list[Job] = []
        for job in jobs:
            alone = job.media is not None or job.past is not None
            row = row_of.setdefault(job if alone else job.context.tobytes(), len(read))
            if row == len(read):
                read.append(job)
            rows.append(row)
        cache = RowCache(self._model)
        logits = cache.prefill([job.context for job in read], [job.media for job in read], [job.past for job in read])
        experts = self._model.routed_experts
        for job in jobs:
            job.version = version
            if job.past is not None and job.past.experts is not None and experts is not None:
                job.experts.append(job.past.experts[: max(len(job.context) - experts.shape[1], 0)])
            job.past = None
        group = _Group(jobs, cache, rows)
        self._groups.append(group)
        self._take(group, logits, version)

    def _take(self, group: _Group, logits: Tensor, version: int) -> None:
        """Choose a token for each job by the logits of its row."""
        jobs, cache, rows = group
        if self._model.routed_experts is not None:
            experts = self._model.routed_experts.numpy()
            for job, row in zip(jobs, rows, strict=True):
                job.experts.append(experts[row, -len(job.context) :])
        logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
        noise = uniforms([job.key for job in jobs], cache.lengths[rows])
        chosen = choose(logits, [job.sampling for job in jobs], noise)
        for job, row, token, log_prob in zip(jobs, rows, *chosen, strict=True):
            job.ids.append(token)
            job.log_probs.append(log_prob)
            if (reason := job.end()) is not None:
                self._keep(job, cache, row, version)
                job.finish(reason, version)

    def _keep(self, job: Job, cache: RowCache, row: int, version: int) -> None:
        """Keep what was computed for a row that ends, for the next generation of its trajectory."""
        if job.media is None and job.version == version and self._kept_rows.wants(int(cache.lengths[row])):
            ids = np.concatenate([job.context, np.array(job.ids[:-1], dtype=np.int64)])
            self._kept_rows.put(job.key, PastRow(ids, cache.past(row), job.all_experts()))


def _by_length(jobs: Sequence[Job], *, padded: bool) -> list[list[Job]]:
    """Jobs in passes that waste little (nothing, unless `padded`): longest first, within the token limits.

    The length of a job is the number of tokens to read; among equal lengths the order stays.
    """
    parts: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: job.num_new, reverse=True):
        if parts:
            first = parts[-1][0]
            longest = first.num_new
            fits = padded or (job.num_new == longest and len(job.context) == len(first.context))
            small = 0 if job.past else _SMALL_PREFILL_TOKENS  # a row with a past would read tokens again
            limit = _PREFILL_TOKENS if 2 * job.num_new >= longest else small
            if fits and longest * (len(parts[-1]) + 1) <= limit:
                parts[-1].append(job)
                continue
        parts.append([job])
    return parts
