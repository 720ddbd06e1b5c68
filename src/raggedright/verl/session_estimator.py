# pyright: reportMissingImports=false
"""Advantages over sessions in verl: its own estimators, called with one row a session.

The trainer lets verl compute its advantages as ever, but under the estimator registered here. That one folds the
rows of each session into one (its reward is that of the last trajectory, as verl has it; KL in the reward adds up over
all of its rows), calls the estimator that the config names, and gives every row its session's number. For
sessions of one row the numbers are verl's, but that whitening counts sessions where verl counts tokens.

A prompt with a single session tells nothing about it: zero, where verl passes the reward on. `gae` is by token and
stays verl's own. The surprise: verl hands an estimator rewards and prompts but no sessions, so those come by a
context variable, set around the call.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

from raggedright.arrays import Floats, Ints
from raggedright.errors import ConfigError
from raggedright.rows import Rows
from raggedright.verl.options import KEY, Config

NAME = "raggedright_sessions"
BY_TOKEN = ("gae",)
BY_GROUP = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline",
)  # fmt: skip
OVER_BATCH = ("reinforce_plus_plus",)
REFUSED: Mapping[str, str] = {
    "remax": "needs the reward of a greedy session, which verl's v1 trainer does not run",
    "gdpo": "needs each part of the reward, which verl's v1 trainer does not hand to it",
    "optimal_token_baseline": "needs sum_pi_squared, which verl's v1 trainer does not hand to it",
    "tir_optimal_token_baseline": "needs sum_pi_squared, which verl's v1 trainer does not hand to it",
}


@dataclass(frozen=True, slots=True, eq=False)
class SessionRows:
    """Which rows a batch's sessions have: rows of one session share a number, and one of them is its last."""

    estimator: str
    session: Ints  # [rows]
    prompt: np.ndarray  # [sessions] names
    last: Ints  # [sessions] position of the row with the highest trajectory number
    scores: Floats | None  # [rows] rewards before the KL penalty, where there is one

    @classmethod
    def of(cls, rows: Rows, estimator: str, scores: Floats | None = None) -> "SessionRows":
        """The sessions of rows without padding."""
        last = np.zeros(rows.num_sessions, dtype=np.int64)
        by_trajectory = np.argsort(rows.trajectory, kind="stable")
        last[rows.session_index[by_trajectory]] = by_trajectory
        return cls(estimator, rows.session_index, rows.prompt[last], last, scores)


_sessions: ContextVar[SessionRows] = ContextVar("sessions of the batch whose advantages are computed")


@contextmanager
def over_sessions(sessions: SessionRows) -> Iterator[None]:
    """While this lasts, the estimator `NAME` computes for these sessions."""
    token = _sessions.set(sessions)
    try:
        yield
    finally:
        _sessions.reset(token)


def check_estimator(name: str, gamma: float) -> None:
    """Raise unless this estimator of verl's can count a session once."""
    leave = f"set {KEY}.advantages='verl' to leave it to verl, by row"
    if name in OVER_BATCH and gamma != 1.0:
        raise ConfigError(
            f"algorithm.gamma is {gamma} and {name} over sessions has no discount; set it to 1, or {leave}"
        )
    if name in (*BY_TOKEN, *BY_GROUP, *OVER_BATCH):
        return
    why = REFUSED.get(name, "is not one of verl's own, so that nothing is known of how it counts rows")
    raise ConfigError(f"algorithm.adv_estimator {name!r} {why}; {leave}")


@register_adv_est(NAME)
def session_estimator(
    token_level_rewards: Tensor, response_mask: Tensor, config: Config | None = None, **unused: object
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token by its session, `[rows, tokens]`."""
    del unused
    sessions = _sessions.get()
    rewards = _session_rewards(token_level_rewards.double().sum(dim=-1), sessions)
    tokens = torch.zeros(len(rewards), dtype=torch.int64).index_add_(
        0, torch.from_numpy(sessions.session), response_mask.sum(dim=-1).long().cpu()
    )
    of_session = session_advantages(sessions.estimator, rewards, tokens, sessions.prompt, config)
    of_row = [values[torch.from_numpy(sessions.session)].to(token_level_rewards) for values in of_session]
    advantages, returns = (values.unsqueeze(-1) * response_mask for values in of_row)
    return advantages, returns


def session_advantages(
    estimator: str, rewards: Tensor, tokens: Tensor, prompt: np.ndarray, config: Config | None
) -> tuple[Tensor, Tensor]:
    """verl's estimator on one row a session: `[sessions]` each; zero where a group or the batch has one session."""
    _, group, size = np.unique(prompt.astype(str), return_inverse=True, return_counts=True)
    counted = np.full(len(prompt), len(prompt) > 1) if estimator in OVER_BATCH else size[group] > 1
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    if not counted.any():
        return advantages, returns
    at = torch.from_numpy(np.flatnonzero(counted))
    width = int(tokens[at].max().clamp(min=1)) if estimator == "opo" else 1  # opo weighs by length
    mask = (torch.arange(width) < tokens[at].clamp(min=1).unsqueeze(-1)).long()
    table = torch.zeros(len(at), width, dtype=rewards.dtype)
    table[:, 0] = rewards[at]
    options = {}
    if estimator == "grpo" and config is not None:  # verl passes it to grpo alone
        options["norm_adv_by_std_in_grpo"] = config.get("norm_adv_by_std_in_grpo", True)
    found = get_adv_estimator_fn(estimator)(
        token_level_rewards=table, response_mask=mask, index=prompt[counted], config=config, **options
    )
    advantages[at], returns[at] = (values[:, 0].to(rewards) for values in found)
    return advantages, returns


def _session_rewards(of_row: Tensor, sessions: SessionRows) -> Tensor:
    """The last trajectory's reward; where KL is in the rewards, its penalty over all rows of the session."""
    last, session = torch.tensor(sessions.last), torch.tensor(sessions.session)  # copies: these arrays are read-only
    rewards = of_row.cpu()
    if sessions.scores is None:
        return rewards[last]
    scores = torch.from_numpy(sessions.scores)
    return scores[last].index_add(0, session, rewards - scores)
