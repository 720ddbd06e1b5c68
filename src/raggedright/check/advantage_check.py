"""Compare the trainer's advantages of a made-up round with the formulas, written out as loops over numbers.

The cases are all estimators, KL in the reward, GAE and whitening. Some sessions failed, some have no row; some rows
have a reward of their own, observations in the middle, or no loss token. The plain formulas share no code with
`advantages.py`, `tensors/gae.py` or the trainer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean, stdev
from typing import get_args

import numpy as np
import torch

from raggedright.advantages import Estimator, KlEstimator
from raggedright.check.cases import Line
from raggedright.check.plain_losses import plain_kl
from raggedright.config.load import make_config
from raggedright.config.schema import Config
from raggedright.sessions import Session, SessionKey, SessionTable, Trajectory
from raggedright.train.token_advantages import token_advantages

Name = tuple[str, int]  # of a session: its prompt and its number

TOLERANCE = 1e-10
_COEF = 0.1
_DISCOUNTS = ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0))


@dataclass(frozen=True, slots=True)
class AdvantageCase:
    """One way to compute advantages; `gamma`, `lam` and `whiten` are settings of gae, `std` is one of grpo."""

    estimator: str
    kl: str | None = None
    std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = False
    on_failure: str = "exclude"

    @property
    def subject(self) -> str:
        """The line of the report that the case belongs to."""
        return self.estimator + (", KL in the reward" if self.kl else "")


def advantage_cases() -> Iterator[AdvantageCase]:
    """All cases; each takes milliseconds."""
    for kl, on_failure in product((None, *get_args(KlEstimator)), ("exclude", "zero")):
        for estimator in get_args(Estimator):
            yield AdvantageCase(estimator, kl, on_failure=on_failure)
        yield AdvantageCase("grpo", kl, std=False, on_failure=on_failure)
        for (gamma, lam), whiten in product(_DISCOUNTS, (False, True)):
            yield AdvantageCase("gae", kl, gamma=gamma, lam=lam, whiten=whiten, on_failure=on_failure)


def run_advantages(seed: int = 0) -> list[Line]:
    """Every case on one made-up round; one line per estimator, with the largest error of its cases."""
    made = MadeRound(seed)
    errors: dict[str, list[float]] = {}
    for case in advantage_cases():
        errors.setdefault(case.subject, []).append(_error(case, made))
    return [Line.of("advantages", subject, errors[subject], TOLERANCE) for subject in errors]


def _error(case: AdvantageCase, made: "MadeRound") -> float:
    """The largest difference of an advantage or a return, relative to max(1, the largest of them)."""
    computed = token_advantages(_config(case), made.table, made.table.scores(case.on_failure), made.tokens)
    scores, penalties = made.scores(case.on_failure), plain_penalties(made.rows, case.kl, _COEF)
    if case.estimator != "gae":
        advantages = plain_session_advantages(scores, made.rows, penalties, case.estimator, std=case.std)
        return _difference(computed.advantages, advantages)
    advantages, returns = plain_gae(scores, made.rows, penalties, case.gamma, case.lam)
    if case.whiten:
        advantages = plain_whiten(advantages, made.rows)
    assert computed.returns is not None
    return max(_difference(computed.advantages, advantages), _difference(computed.returns, returns))


def _difference(computed: torch.Tensor, expected: Sequence[list[float]]) -> float:
    flat = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    return float((computed - flat).abs().max() / flat.abs().max().clamp(min=1.0))


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
        """The sessions as the trainer has them."""
        return SessionTable.of(1, self.sessions)

    @cached_property
    def tokens(self) -> dict[str, torch.Tensor]:
        """The numbers of all response tokens, flat, by the trainer's names."""
        named = {"response_mask": "mask", "old_log_probs": "old", "ref_log_probs": "ref", "values": "values"}
        return {
            name: torch.tensor([float(x) for row in self.rows for x in getattr(row, field)], dtype=torch.float64)
            for name, field in named.items()
        }

    def scores(self, on_failure: str) -> dict[Name, float]:
        """The score of each session that counts."""
        scores = {session.key[1:3]: session.score for session in self.sessions}
        if on_failure == "zero":
            return {name: 0.0 if score is None else score for name, score in scores.items()}
        return {name: score for name, score in scores.items() if score is not None}


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


@dataclass(frozen=True, slots=True)
class PlainRow:
    """The numbers of a row, one per response token, and the reward that the agent gave the row."""

    session: Name
    mask: list[bool]
    old: list[float]
    ref: list[float]
    values: list[float]
    reward: float | None


def plain_penalties(rows: Sequence[PlainRow], kind: str | None, coef: float) -> list[list[float]]:
    """The KL penalty that is subtracted from the reward of each token; zero without a KL."""
    penalties = []
    for row in rows:
        difference = torch.tensor(row.old, dtype=torch.float64) - torch.tensor(row.ref, dtype=torch.float64)
        kl = plain_kl(difference, kind).tolist() if kind else [0.0] * len(row.mask)
        penalties.append([coef * value if loss else 0.0 for loss, value in zip(row.mask, kl, strict=True)])
    return penalties


def plain_session_advantages(
    scores: Mapping[Name, float], rows: Sequence[PlainRow], penalties: Sequence[list[float]], kind: str, *, std: bool
) -> list[list[float]]:
    """The advantage of each response token, for the estimators that give one advantage to a session."""
    net = dict(scores)
    for row, row_penalties in zip(rows, penalties, strict=True):
        net[row.session] -= math.fsum(row_penalties)
    groups: dict[str, list[Name]] = {}
    for name in net:
        groups.setdefault(name[0], []).append(name)
    by_session = {}
    for names in groups.values():
        mean = fmean(net[name] for name in names)
        for name in names:
            others = [net[other] for other in names if other != name]
            if not others:
                by_session[name] = 0.0
            elif kind == "rloo":
                by_session[name] = net[name] - fmean(others)
            elif kind == "grpo" and std:
                by_session[name] = (net[name] - mean) / (stdev([net[other] for other in names]) + 1e-6)
            else:
                by_session[name] = net[name] - mean
    if kind == "reinforce++":
        mean, spread = fmean(net.values()), stdev(net.values())
        by_session = {name: (score - mean) / spread for name, score in net.items()}
    if kind == "reinforce++-baseline":
        spread = stdev(by_session.values())
        by_session = {name: advantage / spread for name, advantage in by_session.items()}
    return [[by_session[row.session] if loss else 0.0 for loss in row.mask] for row in rows]


def plain_gae(
    scores: Mapping[Name, float], rows: Sequence[PlainRow], penalties: Sequence[list[float]], gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns, from the last loss token of a row to its first; other tokens are left out."""
    advantages, returns = [], []
    for row, row_penalties in zip(rows, penalties, strict=True):
        advantage, back = [0.0] * len(row.mask), [0.0] * len(row.mask)
        reward, next_value, running = scores[row.session] if row.reward is None else row.reward, 0.0, 0.0
        for t in reversed(range(len(row.mask))):
            if row.mask[t]:
                delta = reward - row_penalties[t] + gamma * next_value - row.values[t]
                running = delta + gamma * lam * running
                advantage[t], back[t] = running, running + row.values[t]
                reward, next_value = 0.0, row.values[t]
        advantages.append(advantage)
        returns.append(back)
    return advantages, returns


def plain_whiten(advantages: Sequence[list[float]], rows: Sequence[PlainRow]) -> list[list[float]]:
    """Mean 0 and sample variance 1 over all loss tokens."""
    with_mask = [list(zip(values, row.mask, strict=True)) for row, values in zip(rows, advantages, strict=True)]
    loss_values = [value for row in with_mask for value, loss in row if loss]
    mean = fmean(loss_values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in loss_values) / (len(loss_values) - 1) + 1e-8)
    return [[(value - mean) / std if loss else 0.0 for value, loss in row] for row in with_mask]
