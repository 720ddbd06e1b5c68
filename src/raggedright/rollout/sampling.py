"""Choosing tokens: the keyed noise of a trajectory, one token per row of a batch of logits, and texts to stop at.

A row's choice depends on its own logits, settings and uniform number: probabilities in float64 (after temperature,
then top-k, then top-p among the rest), and the first token, in the order of the vocabulary, whose cumulated probability
exceeds the uniform number. Invariants: a token with probability zero is never chosen, whatever the rounding; logits
without a finite maximum (NaN, +inf, or all -inf) are an error, never a token. A greedy row (temperature 0) ignores
top-k and top-p, and its log-prob is that of the plain softmax.

The uniform number is not drawn from a generator. It is a hash of the trajectory's noise key and the position, so it is
the same on every machine, in any order and in any batch.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.arrays import MIX64_STEP, mix64
from raggedright.rollout.engine import Decoder, EngineError, Sampling

KEY_BYTES = 16

# The most probabilities that are in memory in float64 at once: 128 MiB, whatever the size of the vocabulary.
_CHUNK = 1 << 24


def noise_key(*, seed: int, round: int, prompt: str, session: int, attempt: int, trajectory: int) -> bytes:
    """The 16 bytes that name a trajectory's randomness."""
    # The prompt comes last, after numbers that contain no separator, so no two lists of names give the same bytes.
    names = b"%d/%d/%d/%d/%d/%b" % (seed, round, session, attempt, trajectory, prompt.encode("utf-8", "surrogatepass"))
    return hashlib.blake2b(names, digest_size=KEY_BYTES).digest()


def as_key(noise: bytes) -> bytes:
    """A key as it is; names of any other length are hashed to one."""
    return noise if len(noise) == KEY_BYTES else hashlib.blake2b(noise, digest_size=KEY_BYTES).digest()


def uniforms(keys: Sequence[bytes], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, from the row's key and its position [N]; a 64-bit mixer (that of splitmix64)."""
    words = np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)
    mixed = mix64(words[:, 0] + MIX64_STEP * (positions.astype(np.uint64) + np.uint64(1)))
    return (mix64(mixed ^ words[:, 1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(logits: Tensor, rows: Sequence[Sampling], noise: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """A token id and its log-prob for each row of `logits` [B, V], by the settings and uniform numbers of the rows."""
    uniform = torch.from_numpy(noise).to(logits.device)
    size = max(1, _CHUNK // logits.shape[1])
    ids: list[int] = []
    log_probs: list[float] = []
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        chosen, chosen_log_probs = _choose(logits[part], rows[part], uniform[part])
        ids += chosen
        log_probs += chosen_log_probs
    return ids, log_probs


def _choose(logits: Tensor, rows: Sequence[Sampling], uniform: Tensor) -> tuple[list[int], list[float]]:
    device = logits.device
    best, best_ids = logits.max(-1, keepdim=True)
    greedy = torch.tensor([[row.temperature == 0] for row in rows], device=device)
    scores = logits.to(torch.float64) - best
    scores /= torch.tensor([[row.temperature or 1.0] for row in rows], dtype=torch.float64, device=device)
    scores = _mask_top_k_top_p(scores, rows)
    weights = torch.exp(scores)
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1:]
    chosen = torch.searchsorted(cumulated, uniform[:, None] * total, right=True).clamp_(max=logits.shape[1] - 1)
    if not bool((weights.gather(-1, chosen) > 0).all()):
        _refuse_bad(logits, best)
        chosen = _with_weight(chosen, weights)
    chosen = torch.where(greedy, best_ids, chosen)
    log_probs = scores.gather(-1, chosen) - total.log()
    return chosen[:, 0].tolist(), log_probs[:, 0].tolist()


def _mask_top_k_top_p(scores: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Scores with -inf at what top-k and top-p leave out; the best token always stays. Ties go to the lower id."""
    cut = [i for i, row in enumerate(rows) if row.temperature > 0 and (row.top_k or row.top_p < 1)]
    if not cut:
        return scores
    device, size = scores.device, scores.shape[1]
    index = torch.tensor(cut, device=device)
    top_k = torch.tensor([[rows[i].top_k or size] for i in cut], device=device)
    top_p = torch.tensor([[rows[i].top_p] for i in cut], dtype=torch.float64, device=device)
    part = scores[index]
    ordered, order = part.sort(dim=-1, descending=True, stable=True)
    beyond = torch.arange(size, device=device) >= top_k
    weights = torch.exp(ordered).masked_fill(beyond, 0.0)
    cumulated = weights.cumsum(-1)
    before = cumulated - weights
    dropped = beyond | (before >= top_p * cumulated[:, -1:]) & (top_p < 1)
    dropped[:, 0] = False
    dropped = torch.zeros_like(dropped).scatter(-1, order, dropped)
    return scores.index_copy(0, index, part.masked_fill(dropped, -torch.inf))


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
    num_bad = int((~torch.isfinite(logits[row])).sum())
    num_rows = int((~finite).sum())
    raise EngineError(
        f"{num_rows:,} of {len(logits):,} rows have logits that cannot be sampled from (NaN, +inf, or all -inf; "
        f"{num_bad:,} of {logits.shape[1]:,} in the first such row); the weights have diverged: lower the learning "
        "rate, or clip gradients"
    )


class TextStops:
    """The texts that one request stops at.

    Only the end of the generation is decoded, as many tokens as the longest text can span: a text that was there
    before has already stopped it. The end of the prompt does not count.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Decoder) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        # A token is one byte of text or more, except for a few (parts of a character, marks without text).
        self._window = 2 * max(len(text.encode()) for text in texts) + 8

    def reached(self, ids: list[int]) -> bool:
        """Whether the last token completed one of the texts."""
        decoded = self._tokenizer.decode(ids[-self._window :])
        return any(text in decoded for text in self._texts)
