"""Advantages over sessions: one score per session in, one number per session out, broadcast to its rows.

A session counts once, however many rows it emitted, and also when it emitted none. Groups are prompts. A group of one,
and a group whose scores are equal, gets exactly zero. Everything is float64, in the order of (prompt, session)
names, so that the order of arrival changes no bit.

    grpo                  (score - group mean) / (group std + eps), or without the std
    rloo                  score - mean of the group's others
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

from raggedright.arrays import Floats, Ints, Strings
from raggedright.errors import ConfigError, RowsError
from raggedright.rows import Rows

Estimator = Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline"]


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
                "give one of each per session"
            )
        for i in np.flatnonzero(~np.isfinite(scores.score)):
            raise RowsError(
                f"session {scores.prompt[i]}/{scores.session[i]}: score is {scores.score[i]}; it takes a finite "
                "number: mend the reward, or report the session as failed"
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
    """Advantage of each session; `std` and `eps` are grpo's."""
    names = {name: i for i, name in enumerate(sorted(set(scores.prompt.tolist())))}
    prompt = np.array([names[name] for name in scores.prompt.tolist()], dtype=np.int64)
    by_name = np.lexsort((scores.session, prompt))
    group, score = prompt[by_name], scores.score[by_name]
    match estimator:
        case "grpo":
            sorted_advantages = _centre(score, group)
            if std:
                sorted_advantages /= _std(sorted_advantages, group) + eps
        case "rloo":
            size = np.bincount(group)[group]
            sorted_advantages = _centre(score, group) * size / np.maximum(size - 1, 1)
        case "reinforce++":
            sorted_advantages = _scale_over_batch(_centre(score, np.zeros_like(group)))
        case "reinforce++-baseline":
            sorted_advantages = _scale_over_batch(_centre(score, group))  # centred groups have a batch mean of 0
        case _:
            raise ConfigError(f"estimator is {estimator!r}; it takes one of {', '.join(get_args(Estimator))}")
    advantages = np.empty_like(sorted_advantages)
    advantages[by_name] = sorted_advantages
    return advantages


def broadcast_to_rows(advantages: Floats, scores: Scores, rows: Rows) -> Floats:
    """The advantage of each row's session; a padding row has zero."""
    advantage = dict(zip(_names(scores), advantages.tolist(), strict=True))
    real = np.flatnonzero(~rows.is_padding)
    names = zip(rows.prompt[real].tolist(), rows.session[real].tolist(), strict=True)
    found = [advantage.get(name) for name in names]
    if None in found:
        key = rows.key[real[found.index(None)]]
        raise RowsError(f"row {key}: its session has no score; give every session with rows one")
    of_row = np.zeros(len(rows))
    of_row[real] = found
    return of_row


def _names(scores: Scores) -> list[tuple[str, int]]:
    return [*zip(scores.prompt.tolist(), scores.session.tolist(), strict=True)]


def _centre(score: Floats, group: Ints) -> Floats:
    """Scores less their group's mean; exactly zero where all of a group are equal."""
    size = np.bincount(group)
    centred = score - (np.bincount(group, weights=score) / np.maximum(size, 1))[group]
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group, score)
    np.maximum.at(high, group, score)
    return np.where((low == high)[group], 0.0, centred)


def _std(centred: Floats, group: Ints) -> Floats:
    size = np.bincount(group)
    return np.sqrt(np.bincount(group, weights=centred**2) / np.maximum(size - 1, 1))[group]


def _scale_over_batch(centred: Floats) -> Floats:
    """Unit variance over the batch; zeros stay zero."""
    std = _std(centred, np.zeros(len(centred), dtype=np.int64))
    return np.divide(centred, std, out=np.zeros_like(centred), where=std > 0)
