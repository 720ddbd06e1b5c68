"""Generalised advantage estimation over ragged rows, and whitening over a batch.

The tokens of a row that carry no loss (an agent's observations, padding) are removed before anything is computed: time
passes only from loss token to loss token, and there is no discount for the tokens between, as in verl 0.9.1. Advantages
and returns are zero there. All computation is in float64; results have the dtype of the values.

Whitening computes mean and variance once, over all loss tokens of the batch; the sum over rows is rounded once, so
that neither the order of the rows nor padding changes a bit. Call it with the whole batch, not with a rank's share.

Note: a reward on a token that carries no loss is ignored, as in verl; put it on the loss token before it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from raggedright.arrays import ROUNDING
from raggedright.errors import RowsError

_EPS = 1e-8


@torch.no_grad()
def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], mask: Sequence[Tensor], *, gamma: float, lam: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Advantages and returns of each row; all arguments are one vector per row, over its response tokens."""
    _check_lengths(rewards=rewards, values=values, mask=mask)
    errors = []  # temporal-difference errors of each row's loss tokens, the last token first
    for reward, value, carries_loss in zip(rewards, values, (row.bool() for row in mask), strict=True):
        reward, value = reward.double()[carries_loss], value.double()[carries_loss]
        next_value = pad(value, (0, 1))[1:]
        errors.append((reward + gamma * next_value - value).flip(0))
    sums = pad_sequence(errors) if errors else torch.zeros(0, 0)  # [tokens, rows], all rows at once
    for t in range(1, len(sums)):
        sums[t] += gamma * lam * sums[t - 1]
    advantages, returns = [], []
    for i, (value, carries_loss) in enumerate(zip(values, (row.bool() for row in mask), strict=True)):
        advantage = torch.zeros_like(value, dtype=torch.float64)
        advantage[carries_loss] = sums[: int(carries_loss.sum()), i].flip(0)
        advantages.append(advantage.to(value.dtype))
        returns.append(torch.where(carries_loss, advantage + value.double(), 0.0).to(value.dtype))
    return advantages, returns


@torch.no_grad()
def whiten(advantages: Sequence[Tensor], mask: Sequence[Tensor]) -> list[Tensor]:
    """The advantages with mean 0 and sample variance 1 over the loss tokens of all rows, and zero elsewhere.

    With fewer than two loss tokens there is no variance, and all advantages are zero.
    """
    _check_lengths(advantages=advantages, mask=mask)
    kept = [a.double()[m.bool()] for a, m in zip(advantages, mask, strict=True)]
    num_tokens = sum(len(row) for row in kept)
    extremes = [extreme.item() for row in kept if len(row) for extreme in row.aminmax()]
    low, high = min(extremes, default=0.0), max(extremes, default=0.0)
    unit = 2.0 ** -max(0, math.frexp(max(-low, high))[1])  # an exact factor that keeps squares finite
    mean = math.fsum((row * unit).sum().item() for row in kept) / max(num_tokens, 1)
    variance = math.fsum((row * unit - mean).square().sum().item() for row in kept) / max(num_tokens - 1, 1)
    std = math.sqrt(variance + _EPS * unit * unit)
    all_equal = high * unit - low * unit <= ROUNDING * unit * max(-low, high)
    scale = 0.0 if all_equal else 1.0 / std
    return [
        torch.where(m.bool(), (a.double() * unit - mean) * scale, 0.0).to(a.dtype)
        for a, m in zip(advantages, mask, strict=True)
    ]


def _check_lengths(**vectors: Sequence[Tensor]) -> None:
    numbers = {len(rows) for rows in vectors.values()}
    if len(numbers) > 1:
        counts = ", ".join(f"{len(rows)} of {name}" for name, rows in vectors.items())
        raise RowsError(f"the number of rows differs: {counts}; give one vector per row in each")
    for i, row in enumerate(zip(*vectors.values(), strict=True)):
        if len({tuple(vector.shape) for vector in row}) > 1 or row[0].dim() != 1:
            shapes = ", ".join(f"{name} {list(v.shape)}" for name, v in zip(vectors, row, strict=True))
            raise RowsError(f"row {i}: shapes are {shapes}; give one number per response token in each")
