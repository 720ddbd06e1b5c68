"""Advantages of a made-up round, as the trainer computes them, against the formulas written out.

Every estimator, KL in the reward, GAE and whitening, over sessions of which some failed and some left no row, and rows
of which some have a reward of their own, observations in the middle, or no loss token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import get_args

import numpy as np
import torch

from raggedright.advantages import Estimator
from raggedright.check.reference_advantages import (
    Name,
    PlainRow,
    plain_gae,
    plain_penalties,
    plain_session_advantages,
    plain_whiten,
)
from raggedright.config.load import make_config
from raggedright.config.schema import Config
from raggedright.loss_names import KlEstimator
from raggedright.sessions import Session, SessionKey, SessionTable, Trajectory
from raggedright.train.advantages import token_advantages

TOLERANCE = 1e-10
_COEF = 0.1
_DISCOUNTS = ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0))


@dataclass(frozen=True, slots=True)
class AdvantageCase:
    """One way to make advantages; `gamma`, `lam` and `whiten` are those of gae, `std` is grpo's."""

    estimator: str
    kl: str | None = None
    std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = False
    on_failure: str = "exclude"

    @property
    def kind(self) -> str:
        """What a line of the report is about."""
        return self.estimator + (", KL in the reward" if self.kl else "")


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """The largest difference of an advantage or a return, over max(1, the largest of them)."""

    case: AdvantageCase
    error: float

    @property
    def passed(self) -> bool:
        """Whether it is within the tolerance."""
        return self.error <= TOLERANCE


def advantage_cases() -> Iterator[AdvantageCase]:
    """All of them: they take milliseconds."""
    for kl, on_failure in product((None, *get_args(KlEstimator)), ("exclude", "zero")):
        for estimator in get_args(Estimator):
            yield AdvantageCase(estimator, kl, on_failure=on_failure)
        yield AdvantageCase("grpo", kl, std=False, on_failure=on_failure)
        for (gamma, lam), whiten in product(_DISCOUNTS, (False, True)):
            yield AdvantageCase("gae", kl, gamma=gamma, lam=lam, whiten=whiten, on_failure=on_failure)


def run_advantages(seed: int = 0) -> list[AdvantageResult]:
    """Every case on one made-up round."""
    made = MadeRound(seed)
    return [run_advantage_case(case, made) for case in advantage_cases()]


def run_advantage_case(case: AdvantageCase, made: "MadeRound") -> AdvantageResult:
    """The trainer's advantages and returns against the plain ones."""
    found = token_advantages(_config(case), made.table, made.table.scores(case.on_failure), made.tokens)
    advantages, returns = _plain(case, made)
    error = _difference(found.advantages, advantages)
    if found.returns is not None:
        error = max(error, _difference(found.returns, returns))
    return AdvantageResult(case, error)


class MadeRound:
    """Sessions of a few prompts, with scores, masks, log-probs and values."""

    def __init__(self, seed: int, *, num_prompts: int = 6) -> None:
        rng = np.random.default_rng(seed)
        self.sessions: list[Session] = []
        self.rows: list[PlainRow] = []
        for prompt, session in product(range(num_prompts), range(4)):
            key, failed = SessionKey(1, f"p{prompt}", session), rng.random() < 0.15
            rows = [] if failed else [self._row(rng, key) for _ in range(int(rng.integers(0, 4)))]
            score = None if failed else float(rng.choice([0.0, 1.0, rng.normal()]))
            cause = "raised" if failed else ""
            self.sessions.append(Session(key=key, cause=cause, score=score, trajectories=rows))

    def _row(self, rng: np.random.Generator, key: SessionKey) -> Trajectory:
        size = int(rng.integers(1, 9))
        mask = (rng.random(size) < rng.choice([0.0, 0.6, 1.0, 1.0])).tolist()
        old, ref, values = rng.normal(size=(3, size))
        reward = float(rng.normal()) if rng.random() < 0.3 else None
        self.rows.append(PlainRow(key[1:3], mask, old.tolist(), ref.tolist(), values.tolist(), reward))
        return Trajectory(
            input_ids=np.arange(2 + size),
            response_mask=np.array(mask, dtype=np.int64),
            rollout_log_probs=np.zeros(size, dtype=np.float32),
            reward=reward,
        )

    @cached_property
    def table(self) -> SessionTable:
        """As the trainer has it."""
        return SessionTable.of(1, self.sessions)

    @cached_property
    def tokens(self) -> dict[str, torch.Tensor]:
        """Flat over response tokens."""
        named = {"response_mask": "mask", "old_log_probs": "old", "ref_log_probs": "ref", "values": "values"}
        return {
            name: torch.tensor([float(x) for row in self.rows for x in getattr(row, field)], dtype=torch.float64)
            for name, field in named.items()
        }

    def scores(self, on_failure: str) -> dict[Name, float]:
        """Of each session that counts."""
        given = {session.key[1:3]: session.score for session in self.sessions}
        zero = {name: 0.0 if score is None else score for name, score in given.items()}
        return zero if on_failure == "zero" else {name: zero[name] for name in given if given[name] is not None}


def _plain(case: AdvantageCase, made: MadeRound) -> tuple[list[list[float]], list[list[float]]]:
    scores, penalties = made.scores(case.on_failure), plain_penalties(made.rows, case.kl, _COEF)
    if case.estimator != "gae":
        advantages = plain_session_advantages(scores, made.rows, penalties, case.estimator, std=case.std)
        return advantages, []
    advantages, returns = plain_gae(scores, made.rows, penalties, case.gamma, case.lam)
    return (plain_whiten(advantages, made.rows) if case.whiten else advantages), returns


def _difference(found: torch.Tensor, expected: Sequence[list[float]]) -> float:
    flat = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    return float((found - flat).abs().max() / flat.abs().max().clamp(min=1.0))


def _config(case: AdvantageCase) -> Config:
    gae = {"gamma": case.gamma, "lam": case.lam, "whiten": case.whiten} if case.estimator == "gae" else {}
    sections: dict[str, object] = {
        "model": {"made": {"model_type": "qwen3"}, "symbols": "01"},
        "prompts": {"source": "tasks.jsonl"},
        "agent": {"name": "compaction"},
        "train": {"rounds": 2, "batch_size": 6, "mini_batch_size": 3},
        "algorithm": {"advantages": case.estimator, "std": case.std, **gae},
    }
    if case.kl:
        sections["reference"] = {"kl": "reward", "coef": _COEF, "estimator": case.kl}
    if case.estimator == "gae":
        sections["critic"] = {"mini_batch_size": 2}
    return make_config(sections, source="check")
