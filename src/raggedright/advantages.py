"""Advantages over sessions: one score per session in, one number per session out, broadcast to its rows.

A session counts once, regardless of how many rows it emitted, even if it emitted none. Groups are prompts. A group of
one session, or of equal scores, gets exactly zero: it has no signal (`prompts_with_signal`). Scores count as equal if
they differ only by rounding, as 0.3 and 0.1 + 0.2 do: by at most 2**-48 of the largest of the group (of the batch in
reinforce++). Everything is float64, in the order of (prompt, session) names, so the order of arrival changes no bit.
Scores are divided by a power of two before they are squared, so advantages are correct for all finite scores.

    grpo                  (score - group mean) / (group std + eps), or without the std
    rloo                  score - mean of the other scores of the group
    reinforce++           (score - batch mean) / batch std
    reinforce++-baseline  (score - group mean), whitened over the batch's sessions

Standard deviations are those of a sample (n - 1). `gae` is computed per token, with a critic, elsewhere.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from raggedright.arrays import ROUNDING, Floats, Ints, Strings, exponents_by, number_names
from raggedright.errors import ConfigError, RowsError
from raggedright.rows import Rows

Estimator = Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline"]
# The losses of `tensors/losses.py`, here because a config names them without importing torch.
PolicyLoss = Literal["ppo", "gspo", "reinforce"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """One finite score for each session of a batch; make them with `from_columns`."""

    prompt: Strings
    session: Ints
    score: Floats

    @classmethod
    def from_columns(cls, *, prompt: Sequence[str] | Strings, session: ArrayLike, score: ArrayLike) -> "Scores":
        """Scores from one array or list per field."""
        scores = cls(np.array(prompt, dtype=object), np.array(session, dtype=np.int64), np.array(score, dtype=float))
        if not len(scores.prompt) == len(scores.session) == len(scores.score):
            raise RowsError(
                f"{len(scores.prompt)} prompts, {len(scores.session)} sessions and {len(scores.score)} scores; "
                "pass one of each per session"
            )
        for i in np.flatnonzero(~np.isfinite(scores.score)):
            raise RowsError(
                f"session {scores.prompt[i]}/{scores.session[i]}: score is {scores.score[i]}; it must be a "
                "finite number: fix the reward, or report the session as failed"
            )
        names = _names(scores)
        if len(set(names)) < len(names):
            (prompt_name, number), _ = Counter(names).most_common(1)[0]
            raise RowsError(f"session {prompt_name}/{number} has two scores; a session has one")
        return scores

    def __len__(self) -> int:
        return len(self.score)

    def __repr__(self) -> str:
        return f"Scores({len(self):,} sessions of {len(set(self.prompt.tolist())):,} prompts)"


def session_advantages(scores: Scores, estimator: Estimator, *, std: bool = True, eps: float = 1e-6) -> Floats:
    """Advantage of each session; `std` and `eps` are grpo's.

    With grpo, rloo and reinforce++-baseline a group of one session, or of equal scores, gets exactly zero.
    """
    prompt = number_names(scores.prompt)
    by_name = np.lexsort((scores.session, prompt))
    group = np.zeros_like(by_name) if estimator == "reinforce++" else prompt[by_name]
    exponent = exponents_by(group, scores.score[by_name])
    centred = _centre(np.ldexp(scores.score[by_name], -exponent), group)
    match estimator:
        case "grpo" if std:
            sorted_advantages = centred / (_std(centred, group) + np.ldexp(eps, -exponent))
        case "grpo":
            sorted_advantages = _unscale(centred, exponent)
        case "rloo":
            size = np.bincount(group)[group]
            sorted_advantages = _unscale(centred * size / np.maximum(size - 1, 1), exponent)
        case "reinforce++" | "reinforce++-baseline":
            sorted_advantages = _unit_variance(centred, exponent)  # centred groups have a batch mean of 0
        case _:
            raise ConfigError(f"estimator is {estimator!r}; it must be one of {', '.join(get_args(Estimator))}")
    advantages = np.empty_like(sorted_advantages)
    advantages[by_name] = sorted_advantages
    for i in np.flatnonzero(np.isinf(advantages)):
        raise RowsError(
            f"session {scores.prompt[i]}/{scores.session[i]}: score is {scores.score[i]:.3g}, and its advantage by "
            f"{estimator} is too large for a float64; divide the rewards, or use grpo with std"
        )
    return advantages


def prompts_with_signal(scores: Scores) -> set[str]:
    """The prompts whose scores differ; all other groups, such as those of one session, have advantages of zero."""
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for prompt, score in zip(scores.prompt.tolist(), scores.score.tolist(), strict=True):
        low[prompt] = min(score, low.get(prompt, score))
        high[prompt] = max(score, high.get(prompt, score))
    return {name for name in low if high[name] - low[name] > ROUNDING * max(abs(low[name]), abs(high[name]))}


def broadcast_to_rows(advantages: Floats, scores: Scores, rows: Rows) -> Floats:
    """The advantage of each row's session; a padding row has zero."""
    advantage = dict(zip(_names(scores), advantages.tolist(), strict=True))
    real = np.flatnonzero(~rows.is_padding)
    names = zip(rows.prompt[real].tolist(), rows.session[real].tolist(), strict=True)
    of_real = [advantage.get(name) for name in names]
    if None in of_real:
        key = rows.key[real[of_real.index(None)]]
        raise RowsError(f"row {key}: its session has no score; every session with rows needs one")
    of_row = np.zeros(len(rows))
    of_row[real] = of_real
    return of_row


def _names(scores: Scores) -> list[tuple[str, int]]:
    return [*zip(scores.prompt.tolist(), scores.session.tolist(), strict=True)]


def _centre(score: Floats, group: Ints) -> Floats:
    """Scores minus the mean of their group; exactly zero if all scores of a group are equal up to rounding."""
    size = np.bincount(group)
    centred = score - (np.bincount(group, weights=score) / np.maximum(size, 1))[group]
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group, score)
    np.maximum.at(high, group, score)
    equal = high - low <= ROUNDING * np.maximum(np.abs(low), np.abs(high))
    return np.where(equal[group], 0.0, centred)


def _std(centred: Floats, group: Ints) -> Floats:
    size = np.bincount(group)
    return np.sqrt(np.bincount(group, weights=centred**2) / np.maximum(size - 1, 1))[group]


def _unit_variance(centred: Floats, exponent: Ints) -> Floats:
    """Centred scores, each times 2**exponent, with unit variance over the batch; zeros stay zero."""
    moved = centred != 0
    if not moved.any():
        return centred
    top = (np.frexp(centred)[1] + exponent)[moved].max()
    centred = np.ldexp(centred, exponent - top)
    return centred / _std(centred, np.zeros(len(centred), dtype=np.int64))


def _unscale(centred: Floats, exponent: Ints) -> Floats:
    with np.errstate(over="ignore"):
        return np.ldexp(centred, exponent)
