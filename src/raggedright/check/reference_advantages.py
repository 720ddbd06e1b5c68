"""The plain way from scores to advantages, and from gradients to weights: loops over numbers, as the formulas read.

It shares nothing with `advantages.py`, `tensors/gae.py`, `train/advantages.py` or the optimizer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

Name = tuple[str, int]  # of a session: its prompt and its number


@dataclass(frozen=True, slots=True)
class PlainRow:
    """One row's numbers, one per response token, and the reward that the agent gave it."""

    session: Name
    mask: list[bool]
    old: list[float]
    ref: list[float]
    values: list[float]
    reward: float | None


def plain_kl(difference: float, kind: str) -> float:
    """The estimate for one token; k3 lies within 10."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    near = max(-20.0, min(20.0, difference))
    return max(-10.0, min(10.0, math.exp(-near) + near - 1))


def plain_penalties(rows: Sequence[PlainRow], kind: str | None, coef: float) -> list[list[float]]:
    """What is taken off the reward of each token; nothing without a KL."""
    return [
        [coef * plain_kl(old - ref, kind) if counts and kind else 0.0 for counts, old, ref in _tokens(row)]
        for row in rows
    ]


def _tokens(row: PlainRow) -> list[tuple[bool, float, float]]:
    return list(zip(row.mask, row.old, row.ref, strict=True))


def plain_session_advantages(
    scores: Mapping[Name, float], rows: Sequence[PlainRow], penalties: Sequence[list[float]], kind: str, *, std: bool
) -> list[list[float]]:
    """The advantage of each response token where a session has one."""
    net = dict(scores)
    for row, of_row in zip(rows, penalties, strict=True):
        net[row.session] -= math.fsum(of_row)
    groups: dict[str, list[Name]] = {}
    for name in net:
        groups.setdefault(name[0], []).append(name)
    of_session = {}
    for names in groups.values():
        mean = fmean(net[name] for name in names)
        for name in names:
            others = [net[other] for other in names if other != name]
            if not others:
                of_session[name] = 0.0
            elif kind == "rloo":
                of_session[name] = net[name] - fmean(others)
            elif kind == "grpo" and std:
                of_session[name] = (net[name] - mean) / (stdev([net[other] for other in names]) + 1e-6)
            else:
                of_session[name] = net[name] - mean
    if kind == "reinforce++":
        mean, spread = fmean(net.values()), stdev(net.values())
        of_session = {name: (score - mean) / spread for name, score in net.items()}
    if kind == "reinforce++-baseline":
        spread = stdev(of_session.values())
        of_session = {name: advantage / spread for name, advantage in of_session.items()}
    return [[of_session[row.session] if counts else 0.0 for counts in row.mask] for row in rows]


def plain_gae(
    scores: Mapping[Name, float], rows: Sequence[PlainRow], penalties: Sequence[list[float]], gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns: from the last loss token of a row to its first; others are not there."""
    advantages, returns = [], []
    for row, of_row in zip(rows, penalties, strict=True):
        advantage, back = [0.0] * len(row.mask), [0.0] * len(row.mask)
        reward, next_value, running = scores[row.session] if row.reward is None else row.reward, 0.0, 0.0
        for t in reversed(range(len(row.mask))):
            if row.mask[t]:
                delta = reward - of_row[t] + gamma * next_value - row.values[t]
                running = delta + gamma * lam * running
                advantage[t], back[t] = running, running + row.values[t]
                reward, next_value = 0.0, row.values[t]
        advantages.append(advantage)
        returns.append(back)
    return advantages, returns


def plain_whiten(advantages: Sequence[list[float]], rows: Sequence[PlainRow]) -> list[list[float]]:
    """Mean 0 and sample variance 1 over all loss tokens."""
    of_loss = [
        a for row, of_row in zip(rows, advantages, strict=True) for a, m in zip(of_row, row.mask, strict=True) if m
    ]
    mean = fmean(of_loss)
    variance = math.fsum((a - mean) ** 2 for a in of_loss) / (len(of_loss) - 1)
    return [
        [(a - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for a, m in zip(of_row, row.mask, strict=True)]
        for row, of_row in zip(rows, advantages, strict=True)
    ]


class PlainAdamW:
    """AdamW with decoupled weight decay and a clipped gradient norm, written out."""

    def __init__(
        self, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, grad_clip: float
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay, self.grad_clip = lr, betas, eps, weight_decay, grad_clip
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self, weights: dict[str, Tensor], gradient: Mapping[str, Tensor]) -> None:
        """Change the weights; one without a gradient has a gradient of zero."""
        self.steps += 1
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
        share = min(1.0, self.grad_clip / (norm + 1e-6))
        for name, weight in weights.items():
            g = gradient[name] * share if name in gradient else torch.zeros_like(weight)
            first = self.betas[0] * self.first.get(name, torch.zeros_like(weight)) + (1 - self.betas[0]) * g
            second = self.betas[1] * self.second.get(name, torch.zeros_like(weight)) + (1 - self.betas[1]) * g * g
            self.first[name], self.second[name] = first, second
            mean, square = first / (1 - self.betas[0] ** self.steps), second / (1 - self.betas[1] ** self.steps)
            weights[name] = weight * (1 - self.lr * self.weight_decay) - self.lr * mean / (square.sqrt() + self.eps)
