"""From scores to the advantage of every token: computed on every rank over the whole round, in float64.

Without a critic a session has one advantage and each of its loss tokens gets it. With gae a row's reward, its own if
the agent gave it one and else its session's score, is on its last loss token. KL in the reward is taken off
the session's score as its sum over the session, and off each token's reward with gae.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raggedright.advantages import Scores, broadcast_to_rows, session_advantages
from raggedright.arrays import Ints
from raggedright.config.schema import Config
from raggedright.tensors.gae import gae, whiten
from raggedright.tensors.losses import kl_estimate
from raggedright.train.passes import PerRow
from raggedright.train.sealed import SealedRound


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Per response token of each real row; `returns` only with a critic."""

    advantages: PerRow
    returns: PerRow | None
    metrics: dict[str, float]


def token_advantages(
    config: Config, sealed: SealedRound, scores: Scores, tokens: Mapping[str, PerRow]
) -> TokenAdvantages:
    """The advantages of a round; `tokens` has masks, old log-probs, and reference log-probs and values where used."""
    lengths = sealed.rows.response_tokens
    masks = _rows_of(_flat(tokens["response_mask"]).bool(), lengths)
    metrics: dict[str, float] = {}
    penalty: PerRow | None = None
    if config.reference.kl == "reward":
        penalty = _penalty(config, tokens, masks)
        num_tokens = max(1, sum(int(mask.sum()) for mask in masks))
        metrics["actor/reward_kl_penalty"] = float(sum(float(row.sum()) for row in penalty)) / num_tokens
    algorithm = config.algorithm
    if algorithm.advantages == "gae":
        rewards = token_rewards(sealed, masks, penalty)
        advantages, returns = gae(rewards, tokens["values"], masks, gamma=algorithm.gamma, lam=algorithm.lam)
        metrics |= _token_means({"critic/advantages": advantages, "critic/returns": returns}, masks)
        return TokenAdvantages(whiten(advantages, masks) if algorithm.whiten else advantages, returns, metrics)
    if penalty is not None:
        scores = _less_penalty(scores, sealed, penalty)
    of_session = session_advantages(scores, algorithm.advantages, std=algorithm.std)
    of_row = broadcast_to_rows(of_session, scores, sealed.rows)
    dtype = tokens["old_log_probs"][0].dtype if masks else torch.float32
    of_token = torch.from_numpy(np.repeat(of_row, lengths)).to(dtype)
    advantages = _rows_of(torch.where(_flat(masks), of_token, 0.0), lengths)
    metrics |= _token_means({"critic/advantages": advantages}, masks)
    return TokenAdvantages(advantages, None, metrics)


def token_rewards(sealed: SealedRound, masks: Sequence[Tensor], penalty: PerRow | None) -> PerRow:
    """A row's reward on its last loss token, less the penalty of each token."""
    score = {session.key: session.score for session in sealed.sessions}
    rewards = []
    for i, (entry, mask) in enumerate(zip(sealed.entries, masks, strict=True)):
        own = entry.tags.get("reward")
        reward = score[entry.key.of_session] if own is None else own
        assert isinstance(reward, int | float)
        row = torch.zeros(len(mask), dtype=torch.float64)
        if mask.any():
            row[int(mask.nonzero().max())] = float(reward)
        rewards.append(row if penalty is None else row - penalty[i])
    return rewards


def _penalty(config: Config, tokens: Mapping[str, PerRow], masks: Sequence[Tensor]) -> PerRow:
    """coef x KL of each loss token, zero elsewhere."""
    penalty = []
    for old, reference, mask in zip(tokens["old_log_probs"], tokens["ref_log_probs"], masks, strict=True):
        log_ratio = torch.where(mask, old.double() - reference.double(), 0.0)
        penalty.append(config.reference.coef * kl_estimate(log_ratio, config.reference.estimator))
    return penalty


def _less_penalty(scores: Scores, sealed: SealedRound, penalty: PerRow) -> Scores:
    """Each session's score less the penalties of all its rows."""
    rows = sealed.rows
    of_row = np.array([float(row.sum()) for row in penalty])
    by_session = np.bincount(rows.session_index, weights=of_row, minlength=rows.num_sessions)
    names = dict(zip(zip(rows.prompt.tolist(), rows.session.tolist(), strict=True), rows.session_index, strict=True))
    less = []
    for prompt, session, score in zip(scores.prompt, scores.session, scores.score, strict=True):
        index = names.get((prompt, int(session)))
        less.append(score - (0.0 if index is None else by_session[index]))
    return Scores.from_columns(prompt=scores.prompt, session=scores.session, score=less)


def _token_means(named: Mapping[str, PerRow], masks: Sequence[Tensor]) -> dict[str, float]:
    """Mean over the loss tokens of the round."""
    mask = _flat(masks)
    num_tokens = max(1, int(mask.sum()))
    return {f"{name}/mean": float(_flat(rows).double()[mask].sum()) / num_tokens for name, rows in named.items()}


def _flat(rows: Sequence[Tensor]) -> Tensor:
    """All rows' tokens, one row after another."""
    return torch.cat([*rows]) if rows else torch.zeros(0)


def _rows_of(flat: Tensor, lengths: Ints) -> PerRow:
    """The rows of a flat vector."""
    return list(flat.split(lengths.tolist()))
