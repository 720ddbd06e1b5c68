"""Choosing one token per row of a batch of logits, and the log-prob it was chosen with.

A row's choice depends on its own logits, settings and uniform number: probabilities in float64 (after temperature,
then top-k, then top-p among what is left), and the first token, in the order of the vocabulary, whose cumulated
probability exceeds the uniform. Invariants: a token of probability zero is never chosen, whatever the rounding;
logits without a finite maximum (NaN, +inf, nothing but -inf) are an error, never a token.

The surprise: a greedy row (temperature 0) ignores top-k and top-p, and its log-prob is that of the plain softmax.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.rollout.engine import EngineError, Sampling
from raggedright.rollout.noise import noise_key, uniforms

__all__ = ["Cuts", "RowSettings", "choose", "noise_key", "uniforms"]

# Probabilities that are held in float64 at once: 128 MiB, whatever the vocabulary.
_CHUNK = 1 << 24


class Cuts(NamedTuple):
    """The rows that top-k or top-p cuts, and by how much; `top_k` is the vocabulary's size where it cuts nothing."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor


class RowSettings(NamedTuple):
    """The settings of a batch's rows, made once for as long as the rows stay together."""

    temperature: Tensor | float
    greedy: Tensor | None
    cuts: Cuts | None

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: torch.device) -> "RowSettings":
        """Settings of rows on a device; what all rows leave alone costs nothing later."""
        first = rows[0]
        if first.temperature > 0 and not first.top_k and first.top_p == 1 and all(row is first for row in rows):
            return cls(first.temperature, None, None)
        plain = [row.temperature or 1.0 for row in rows]
        temperature = (
            plain[0]
            if plain.count(plain[0]) == len(plain)
            else torch.tensor(plain, dtype=torch.float64, device=device)[:, None]
        )
        zero = [row.temperature == 0 for row in rows]
        cut = [i for i, row in enumerate(rows) if row.temperature > 0 and (row.top_k or row.top_p < 1)]
        cuts = None
        if cut:
            cuts = Cuts(
                torch.tensor(cut, device=device),
                torch.tensor([rows[i].top_k or torch.iinfo(torch.long).max for i in cut], device=device)[:, None],
                torch.tensor([rows[i].top_p for i in cut], dtype=torch.float64, device=device)[:, None],
            )
        return cls(temperature, torch.tensor(zero, device=device) if any(zero) else None, cuts)

    def part(self, start: int, stop: int) -> "RowSettings":
        """The settings of a range of rows."""
        temperature = self.temperature[start:stop] if isinstance(self.temperature, Tensor) else self.temperature
        cuts = None
        if self.cuts is not None:
            inside = (self.cuts.rows >= start) & (self.cuts.rows < stop)
            if bool(inside.any()):
                cuts = Cuts(self.cuts.rows[inside] - start, self.cuts.top_k[inside], self.cuts.top_p[inside])
        return RowSettings(temperature, None if self.greedy is None else self.greedy[start:stop], cuts)


def choose(logits: Tensor, settings: RowSettings, noise: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """A token id and its log-prob for each row of `logits` [B, V], by the rows' uniforms [B]."""
    if logits.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    u = torch.from_numpy(noise).to(logits.device)
    size = max(1, _CHUNK // logits.shape[1])
    if len(logits) <= size:
        return _choose(logits, settings, u)
    ids: list[int] = []
    log_probs: list[float] = []
    for start in range(0, len(logits), size):
        stop = min(start + size, len(logits))
        part = _choose(logits[start:stop], settings.part(start, stop), u[start:stop])
        ids += part[0]
        log_probs += part[1]
    return ids, log_probs


def _choose(logits: Tensor, settings: RowSettings, u: Tensor) -> tuple[list[int], list[float]]:
    best, arg_best = logits.max(-1, keepdim=True)
    scores = logits.to(torch.float64) - best
    if isinstance(settings.temperature, Tensor) or settings.temperature != 1.0:
        scores /= settings.temperature
    if settings.cuts is not None:
        scores = _cut(scores, settings.cuts)
    weights = torch.exp(scores)
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1:]
    chosen = torch.searchsorted(cumulated, u[:, None] * total, right=True).clamp_(max=logits.shape[1] - 1)
    if not bool((weights.gather(-1, chosen) > 0).all()):
        _refuse_bad(logits, best)
        chosen = _with_weight(chosen, weights)
    if settings.greedy is not None:
        chosen = torch.where(settings.greedy[:, None], arg_best, chosen)
    log_probs = scores.gather(-1, chosen) - total.log()
    return chosen[:, 0].tolist(), log_probs[:, 0].tolist()


def _cut(scores: Tensor, cuts: Cuts) -> Tensor:
    """Scores with -inf at what top-k and top-p leave out; the best token always stays. Ties go to the lower id."""
    part = scores[cuts.rows]
    ordered, order = part.sort(dim=-1, descending=True, stable=True)
    beyond = torch.arange(part.shape[1], device=part.device) >= cuts.top_k
    weights = torch.exp(ordered).masked_fill(beyond, 0.0)
    cumulated = weights.cumsum(-1)
    before = cumulated - weights
    out = beyond | (before >= cuts.top_p * cumulated[:, -1:]) & (cuts.top_p < 1)
    out[:, 0] = False
    dropped = torch.zeros_like(out).scatter(-1, order, out)
    return scores.index_copy(0, cuts.rows, part.masked_fill(dropped, -torch.inf))


def _with_weight(chosen: Tensor, weights: Tensor) -> Tensor:
    """The choice, or the nearest token below it that has a probability, where rounding led to one that has none."""
    ids = torch.arange(weights.shape[1], device=weights.device)
    possible = weights > 0
    below = torch.where(possible & (ids <= chosen), ids, -1).amax(-1, keepdim=True)
    return torch.where(below >= 0, below, possible.to(torch.int8).argmax(-1, keepdim=True))


def _refuse_bad(logits: Tensor, best: Tensor) -> None:
    finite = torch.isfinite(best)
    if bool(finite.all()):
        return
    row = int((~finite[:, 0]).to(torch.int8).argmax())
    bad = int((~torch.isfinite(logits[row])).sum())
    count = int((~finite).sum())
    raise EngineError(
        f"{count:,} of {len(logits):,} rows have logits that are no numbers to sample from (NaN, +inf, or all -inf; "
        f"{bad:,} of {logits.shape[1]:,} in the first such row); the weights have diverged: lower the learning rate, "
        "or clip gradients"
    )
