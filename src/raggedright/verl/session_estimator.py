# pyright: reportMissingImports=false
"""Advantages over sessions in verl: its own estimators, called with one row per session.

verl computes its advantages as usual, but with the estimator registered here. That one combines the rows of each
session into one row (its reward is that of the last trajectory, as in verl; KL in the reward is summed over all of its
rows), calls the estimator that the config names, and gives every row the result of its session. For sessions of one
row the numbers are verl's, except that whitening counts sessions and verl counts tokens.

A prompt with a single session has nothing to compare it with: its advantage is zero here, while verl passes the reward
on. `gae` is per token and stays verl's own.

Note: verl passes rewards and prompts to an estimator but no sessions, so these are passed in a context variable.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

from raggedright.arrays import Floats, Ints
from raggedright.errors import ConfigError
from raggedright.rows import Rows
from raggedright.verl.options import KEY

NAME = "raggedright_sessions"
PER_TOKEN = ("gae",)
PER_GROUP = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline",
)  # fmt: skip
OVER_BATCH = ("reinforce_plus_plus",)
REFUSED: Mapping[str, str] = {
    "remax": "needs the reward of a greedy session, which verl's v1 trainer does not run",
    "gdpo": "needs each part of the reward, which verl's v1 trainer does not pass to it",
    "optimal_token_baseline": "needs sum_pi_squared, which verl's v1 trainer does not pass to it",
    "tir_optimal_token_baseline": "needs sum_pi_squared, which verl's v1 trainer does not pass to it",
}


@dataclass(frozen=True, slots=True, eq=False)
class SessionRows:
    """The sessions of the real rows of a batch."""

    session: Ints  # [rows] number of each row's session
    prompt: np.ndarray  # [sessions] names
    last: Ints  # [sessions] position of the row with the highest trajectory number

    @classmethod
    def of(cls, rows: Rows) -> "SessionRows":
        """The sessions of rows without padding."""
        last = np.zeros(rows.num_sessions, dtype=np.int64)
        by_trajectory = np.argsort(rows.trajectory, kind="stable")
        last[rows.session_index[by_trajectory]] = by_trajectory
        return cls(rows.session_index, rows.prompt[last], last)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What the estimator needs in addition to verl's arguments."""

    estimator: str  # verl's name
    sessions: SessionRows
    scores: Floats | None  # [rows] rewards before the KL penalty, if there is one


_call: ContextVar[_Call] = ContextVar("the batch whose advantages are computed")


def estimator_name(algorithm: DictConfig) -> str:
    """The name of the configured estimator, which may be an enum."""
    return str(getattr(algorithm.adv_estimator, "value", algorithm.adv_estimator))


@contextmanager
def over_sessions(algorithm: DictConfig, sessions: SessionRows, scores: Floats) -> Iterator[None]:
    """Inside this block verl's advantages are computed over sessions, unless the estimator is per token."""
    name = estimator_name(algorithm)
    if name in PER_TOKEN:
        yield
        return
    token = _call.set(_Call(name, sessions, scores if algorithm.use_kl_in_reward else None))
    try:
        algorithm.adv_estimator = NAME
        yield
    finally:
        algorithm.adv_estimator = name
        _call.reset(token)


def check_estimator(name: str, gamma: float) -> None:
    """Raise unless this estimator of verl can count each session once."""
    remedy = f"set {KEY}.advantages='verl' to use verl's advantages per row"
    if name in OVER_BATCH and gamma != 1.0:
        raise ConfigError(
            f"algorithm.gamma is {gamma} and {name} over sessions has no discount; set it to 1, or {remedy}"
        )
    if name not in (*PER_TOKEN, *PER_GROUP, *OVER_BATCH):
        reason = REFUSED.get(name, "is not one of verl's own, so it is unknown how it counts rows")
        raise ConfigError(f"algorithm.adv_estimator {name!r} {reason}; {remedy}")


@register_adv_est(NAME)
def session_estimator(
    token_level_rewards: Tensor, response_mask: Tensor, config: DictConfig | None = None, **unused: object
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token from its session, `[rows, tokens]`."""
    del unused
    call = _call.get()
    session = torch.tensor(call.sessions.session)  # a copy: the array is read-only
    rewards = _session_rewards(token_level_rewards.double().sum(dim=-1).cpu(), session, call)
    row_tokens = response_mask.sum(dim=-1).long().cpu()
    tokens = torch.zeros(len(rewards), dtype=torch.int64).index_add_(0, session, row_tokens)
    by_session = session_advantages(call.estimator, rewards, tokens, call.sessions.prompt, config)
    by_row = [values[session].to(token_level_rewards) for values in by_session]
    advantages, returns = (values.unsqueeze(-1) * response_mask for values in by_row)
    return advantages, returns


def _session_rewards(row_rewards: Tensor, session: Tensor, call: _Call) -> Tensor:
    """The last trajectory's reward; if KL is in the rewards, with the penalty of all rows of the session."""
    last = torch.tensor(call.sessions.last)
    if call.scores is None:
        return row_rewards[last]
    scores = torch.from_numpy(call.scores)
    return scores[last].index_add(0, session, row_rewards - scores)


def session_advantages(
    estimator: str, rewards: Tensor, tokens: Tensor, prompt: np.ndarray, config: DictConfig | None
) -> tuple[Tensor, Tensor]:
    """verl's estimator on one row per session, `[sessions]` each; zero if a group or the batch has one session."""
    _, group, size = np.unique(prompt.astype(str), return_inverse=True, return_counts=True)
    counted = np.full(len(prompt), len(prompt) > 1) if estimator in OVER_BATCH else size[group] > 1
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    if not counted.any():
        return advantages, returns
    positions = torch.from_numpy(np.flatnonzero(counted))
    width = int(tokens[positions].max().clamp(min=1)) if estimator == "opo" else 1  # opo weights by length
    mask = (torch.arange(width) < tokens[positions].clamp(min=1).unsqueeze(-1)).long()
    table = torch.zeros(len(positions), width, dtype=rewards.dtype)
    table[:, 0] = rewards[positions]
    options = {}
    if estimator == "grpo" and config is not None:  # verl passes it to grpo only
        options["norm_adv_by_std_in_grpo"] = config.get("norm_adv_by_std_in_grpo", True)
    results = get_adv_estimator_fn(estimator)(
        token_level_rewards=table, response_mask=mask, index=prompt[counted], config=config, **options
    )
    advantages[positions], returns[positions] = (values[:, 0].to(rewards) for values in results)
    return advantages, returns
