"""Generalised advantage estimation over ragged rows, and whitening over a batch.

A row's tokens that carry no loss (observations of an agent, padding) are taken out before anything is computed: time
passes only from loss token to loss token, so they are crossed without a discount, as in verl 0.9.1. Advantages and
returns are zero there. Everything is float64 inside and in the values' type outside.

Whitening takes its mean and variance once, over all loss tokens of the batch; the sum over rows is rounded once, so
that neither their order nor padding changes a bit. Give it the whole batch, never a rank's share.

The surprise: a reward on a token that carries no loss counts nowhere, as in verl; put it on the loss token before it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from raggedright.arrays import ROUNDING
from raggedright.errors import RowsError

_EPS = 1e-8


@torch.no_grad()
def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], mask: Sequence[Tensor], *, gamma: float, lam: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Advantages and returns of each row; all arguments are one vector per row, over its response tokens."""
    _check_lengths(rewards=rewards, values=values, mask=mask)
    lengths = [len(row) for row in values]
    if not sum(lengths):
        return [torch.zeros_like(row) for row in values], [torch.zeros_like(row) for row in values]
    counts = torch.cat([row.bool() for row in mask])
    row = torch.repeat_interleave(torch.tensor(lengths, device=counts.device))[counts]
    value = torch.cat([row.double() for row in values])[counts]
    reward = torch.cat([row.double() for row in rewards])[counts]
    ends = torch.cat([row[1:] != row[:-1], row.new_ones(min(1, len(row)), dtype=torch.bool)])
    delta = reward + gamma * torch.where(ends, 0.0, value.roll(-1)) - value
    advantage = _discounted_sums(delta, row, len(lengths), gamma * lam)
    outputs = (_spread(kept, counts, lengths, values) for kept in (advantage, advantage + value))
    return next(outputs), next(outputs)


@torch.no_grad()
def whiten(advantages: Sequence[Tensor], mask: Sequence[Tensor]) -> list[Tensor]:
    """The advantages with mean 0 and sample variance 1 over the loss tokens of all rows, and zero elsewhere.

    Fewer than two loss tokens have no variance: they get zero.
    """
    _check_lengths(advantages=advantages, mask=mask)
    kept = [a.double()[m.bool()] for a, m in zip(advantages, mask, strict=True)]
    num_tokens = sum(len(row) for row in kept)
    ends = [end.item() for row in kept if len(row) for end in row.aminmax()]
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    down = 2.0 ** -max(0, math.frexp(max(-low, high))[1])  # exact, and keeps squares finite
    mean = math.fsum((row * down).sum().item() for row in kept) / max(num_tokens, 1)
    variance = math.fsum((row * down - mean).square().sum().item() for row in kept) / max(num_tokens - 1, 1)
    std = math.sqrt(variance + _EPS * down * down)
    equal = high * down - low * down <= ROUNDING * down * max(-low, high)
    scale = 0.0 if equal else 1.0 / std
    return [
        torch.where(m.bool(), (a.double() * down - mean) * scale, 0.0).to(a.dtype)
        for a, m in zip(advantages, mask, strict=True)
    ]


def _discounted_sums(delta: Tensor, row: Tensor, num_rows: int, discount: float) -> Tensor:
    """`sum_k discount^k delta[t + k]` within each row, one pass over time for all rows at once.

    Times count from a row's end. With longer rows first, the rows that have reached a time are the first ones of
    those that had reached the time before, so nothing has to be padded.
    """
    tokens = torch.bincount(row, minlength=num_rows)
    from_end = tokens.cumsum(0)[row] - 1 - torch.arange(len(row), device=row.device)
    place = torch.empty_like(tokens)
    place[torch.argsort(tokens, descending=True, stable=True)] = torch.arange(num_rows, device=row.device)
    by_time = torch.argsort(from_end * num_rows + place[row])
    running = delta.new_zeros(num_rows)
    sums = []
    for now in delta[by_time].split(torch.bincount(from_end).tolist()):
        running = now + discount * running[: len(now)]
        sums.append(running)
    discounted = torch.empty_like(delta)
    discounted[by_time] = torch.cat([delta.new_zeros(0), *sums])
    return discounted


def _spread(kept: Tensor, counts: Tensor, lengths: list[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Numbers of loss tokens back at their places, cut into rows."""
    flat = torch.zeros(len(counts), dtype=torch.float64, device=counts.device)
    flat[counts] = kept
    return [piece.to(row.dtype) for piece, row in zip(flat.split(lengths), like, strict=True)]


def _check_lengths(**vectors: Sequence[Tensor]) -> None:
    numbers = {len(rows) for rows in vectors.values()}
    if len(numbers) > 1:
        given = ", ".join(f"{len(rows)} of {name}" for name, rows in vectors.items())
        raise RowsError(f"the number of rows differs: {given}; give one vector a row in each")
    for i, row in enumerate(zip(*vectors.values(), strict=True)):
        if len({tuple(vector.shape) for vector in row}) > 1 or row[0].dim() != 1:
            given = ", ".join(f"{name} {list(v.shape)}" for name, v in zip(vectors, row, strict=True))
            raise RowsError(f"row {i}: shapes are {given}; give one number per response token in each")
