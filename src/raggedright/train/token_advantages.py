"""From scores to the advantage of every token: computed on every rank for all rows of the round, in float64.

Without a critic, a session has one advantage, and each of its loss tokens gets it. With gae, the last loss token of a
row gets the row's reward: the one that the agent set for the row, or else the score of its session. KL in the reward is
subtracted from the session's score as a sum over the session, and with gae from each token's reward.
"""

from collections.abc import Mapping
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

TokenVector = Tensor
"""One value per response token of a round's real rows: those of row 0, then those of row 1, and so on."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Per response token of the real rows; `returns` only with a critic."""

    advantages: TokenVector
    returns: TokenVector | None
    metrics: dict[str, float]


def token_advantages(
    config: Config, table: SessionTable, scores: Scores, tokens: Mapping[str, TokenVector]
) -> TokenAdvantages:
    """The advantages of a round; `tokens` has masks, old log-probs, and reference log-probs and values where used."""
    algorithm, mask = config.algorithm, tokens["response_mask"].bool()
    metrics: dict[str, float] = {}
    penalty: TokenVector | None = None
    if config.reference.kl == "reward":
        penalty = _penalty(config, tokens, mask)
        metrics["actor/reward_kl_penalty"] = float(penalty.sum()) / max(1, int(mask.sum()))
    if algorithm.advantages == "gae":
        lengths = table.rows.response_tokens.tolist()
        rewards = token_rewards(table, mask, penalty)
        by_row = (flat.split(lengths) for flat in (rewards, tokens["values"], mask))
        advantages, returns = map(torch.cat, gae(*by_row, gamma=algorithm.gamma, lam=algorithm.lam))
        _check_size(table, advantages, returns)
        metrics |= _token_means({"critic/advantages": advantages, "critic/returns": returns}, mask)
        if algorithm.whiten:
            advantages = torch.cat(whiten(advantages.split(lengths), mask.split(lengths)))
        return TokenAdvantages(advantages, returns, metrics)
    if penalty is not None:
        scores = _minus_penalty(scores, table, penalty)
    by_session = session_advantages(scores, algorithm.advantages, std=algorithm.std)
    by_row = np.repeat(broadcast_to_rows(by_session, scores, table.rows), table.rows.response_tokens)
    advantages = torch.where(mask, torch.from_numpy(by_row).to(tokens["old_log_probs"].dtype), 0.0)
    _check_size(table, advantages)
    return TokenAdvantages(advantages, None, metrics | _token_means({"critic/advantages": advantages}, mask))


def token_rewards(table: SessionTable, mask: TokenVector, penalty: TokenVector | None) -> TokenVector:
    """Each row's reward, or its session's score, on the last loss token of the row, minus the penalty of each token."""
    row_reward = table.row_columns["reward"]
    reward = np.where(np.isnan(row_reward), table.score[table.session_of_row], row_reward)
    rewards = torch.zeros(len(mask), dtype=torch.float64)
    start = 0
    for row_mask, value in zip(mask.split(table.rows.response_tokens.tolist()), reward.tolist(), strict=True):
        if row_mask.any():
            rewards[start + int(row_mask.nonzero().max())] = value
        start += len(row_mask)
    return rewards if penalty is None else rewards - penalty


def _penalty(config: Config, tokens: Mapping[str, TokenVector], mask: TokenVector) -> TokenVector:
    """coef x KL of each loss token, zero elsewhere."""
    log_ratio = torch.where(mask, tokens["old_log_probs"].double() - tokens["ref_log_probs"].double(), 0.0)
    return config.reference.coef * kl_estimate(log_ratio, config.reference.estimator)


def _minus_penalty(scores: Scores, table: SessionTable, penalty: TokenVector) -> Scores:
    """Each session's score minus the penalties of all its rows."""
    rows = table.rows
    session_of_token = np.repeat(rows.session_index, rows.response_tokens)
    by_session = np.bincount(session_of_token, weights=penalty.numpy(), minlength=rows.num_sessions)
    keys = zip(rows.prompt.tolist(), rows.session.tolist(), strict=True)
    penalties = {key: by_session[index] for key, index in zip(keys, rows.session_index, strict=True)}
    sessions = zip(scores.prompt, scores.session, scores.score, strict=True)
    reduced = [score - penalties.get((prompt, int(session)), 0.0) for prompt, session, score in sessions]
    return Scores.from_columns(prompt=scores.prompt, session=scores.session, score=reduced)


def _check_size(table: SessionTable, *flats: TokenVector) -> None:
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


def _token_means(named: Mapping[str, TokenVector], mask: TokenVector) -> dict[str, float]:
    """Mean over the loss tokens of the round."""
    num_tokens = max(1, int(mask.sum()))
    return {f"{name}/mean": float(flat.double()[mask].sum()) / num_tokens for name, flat in named.items()}
