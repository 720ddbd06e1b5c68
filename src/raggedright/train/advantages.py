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
from raggedright.config.schema import Config
from raggedright.errors import RowsError
from raggedright.sessions import SessionTable
from raggedright.tensors.gae import gae, whiten
from raggedright.tensors.losses import kl_estimate
from raggedright.train.passes import Flat


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Per response token of the real rows; `returns` only with a critic."""

    advantages: Flat
    returns: Flat | None
    metrics: dict[str, float]


def token_advantages(
    config: Config, table: SessionTable, scores: Scores, tokens: Mapping[str, Flat]
) -> TokenAdvantages:
    """The advantages of a round; `tokens` has masks, old log-probs, and reference log-probs and values where used."""
    algorithm, mask = config.algorithm, tokens["response_mask"].bool()
    metrics: dict[str, float] = {}
    penalty: Flat | None = None
    if config.reference.kl == "reward":
        penalty = _penalty(config, tokens, mask)
        metrics["actor/reward_kl_penalty"] = float(penalty.sum()) / max(1, int(mask.sum()))
    if algorithm.advantages == "gae":
        lengths = table.rows.response_tokens.tolist()
        rewards = token_rewards(table, mask, penalty)
        given = (flat.split(lengths) for flat in (rewards, tokens["values"], mask))
        advantages, returns = map(_flat, gae(*given, gamma=algorithm.gamma, lam=algorithm.lam))
        _check_size(table, advantages, returns)
        metrics |= _token_means({"critic/advantages": advantages, "critic/returns": returns}, mask)
        if algorithm.whiten:
            advantages = _flat(whiten(advantages.split(lengths), mask.split(lengths)))
        return TokenAdvantages(advantages, returns, metrics)
    if penalty is not None:
        scores = _less_penalty(scores, table, penalty)
    of_session = session_advantages(scores, algorithm.advantages, std=algorithm.std)
    of_row = broadcast_to_rows(of_session, scores, table.rows)
    of_token = torch.from_numpy(np.repeat(of_row, table.rows.response_tokens)).to(tokens["old_log_probs"].dtype)
    advantages = torch.where(mask, of_token, 0.0)
    _check_size(table, advantages)
    return TokenAdvantages(advantages, None, metrics | _token_means({"critic/advantages": advantages}, mask))


def token_rewards(table: SessionTable, mask: Flat, penalty: Flat | None) -> Flat:
    """A row's reward, its own or its session's score, on its last loss token, less the penalty of each token."""
    own = table.row_columns["reward"]
    reward = np.where(np.isnan(own), table.score[table.session_of_row], own)
    rewards = torch.zeros(len(mask), dtype=torch.float64)
    start = 0
    for of_row, value in zip(mask.split(table.rows.response_tokens.tolist()), reward.tolist(), strict=True):
        if of_row.any():
            rewards[start + int(of_row.nonzero().max())] = value
        start += len(of_row)
    return rewards if penalty is None else rewards - penalty


def _penalty(config: Config, tokens: Mapping[str, Flat], mask: Flat) -> Flat:
    """coef x KL of each loss token, zero elsewhere."""
    log_ratio = torch.where(mask, tokens["old_log_probs"].double() - tokens["ref_log_probs"].double(), 0.0)
    return config.reference.coef * kl_estimate(log_ratio, config.reference.estimator)


def _less_penalty(scores: Scores, table: SessionTable, penalty: Flat) -> Scores:
    """Each session's score less the penalties of all its rows."""
    rows = table.rows
    of_token = np.repeat(rows.session_index, rows.response_tokens)
    by_session = np.bincount(of_token, weights=penalty.numpy(), minlength=rows.num_sessions)
    names = dict(zip(zip(rows.prompt.tolist(), rows.session.tolist(), strict=True), rows.session_index, strict=True))
    less = []
    for prompt, session, score in zip(scores.prompt, scores.session, scores.score, strict=True):
        index = names.get((prompt, int(session)))
        less.append(score - (0.0 if index is None else by_session[index]))
    return Scores.from_columns(prompt=scores.prompt, session=scores.session, score=less)


def _check_size(table: SessionTable, *flats: Flat) -> None:
    """Refuse advantages and returns that overflow float32, whose loss and gradient would be infinite."""
    for flat in flats:
        small = flat.abs() <= torch.finfo(torch.float32).max
        if not small.all():
            i = int(small.int().argmin())
            row = int(np.repeat(np.arange(len(table.rows)), table.rows.response_tokens)[i])
            raise RowsError(
                f"row {table.rows.key[row]}: its advantage or return is {flat[i]:.3g}, too large for float32; "
                "divide the rewards, or set algorithm.advantages to grpo with algorithm.std = true"
            )


def _token_means(named: Mapping[str, Flat], mask: Flat) -> dict[str, float]:
    """Mean over the loss tokens of the round."""
    num_tokens = max(1, int(mask.sum()))
    return {f"{name}/mean": float(flat.double()[mask].sum()) / num_tokens for name, flat in named.items()}


def _flat(rows: Sequence[Tensor]) -> Flat:
    """All rows' tokens, one row after another."""
    return torch.cat([*rows]) if rows else torch.zeros(0)
