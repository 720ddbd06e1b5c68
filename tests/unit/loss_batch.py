"""A made-up batch for loss tests, and all losses run over any cut of it."""

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from raggedright import Rows, token_weights
from raggedright.advantages import KlEstimator, PolicyLoss
from raggedright.plan.layout import LossAgg
from raggedright.tensors.losses import (
    Sums,
    TokenWeights,
    entropy_loss,
    kl_loss,
    policy_loss,
    value_loss,
)

LOSS_AGGS = get_args(LossAgg)
LEARNED = ("log_probs", "entropy", "values")
NAMES = (*LEARNED, "old_log_probs", "ref_log_probs", "advantages", "old_values", "returns")
RUBBISH = {"log_probs": -120.0, "old_log_probs": math.inf, "ref_log_probs": math.nan, "advantages": -math.inf,
           "entropy": math.nan, "values": 1e30, "old_values": math.inf, "returns": math.nan}  # fmt: skip


def weights_from(masks: list[Tensor], *, loss: ArrayLike, mean: ArrayLike) -> TokenWeights:
    flat = torch.cat(masks) if masks else torch.zeros(0)
    return TokenWeights.from_mask(flat, [mask.size(0) for mask in masks], loss=loss, mean=mean)


@dataclass
class Batch:
    rows: Rows
    masks: list[Tensor]
    fields: dict[str, list[Tensor]]

    def weights(self, loss_agg: LossAgg = "token-mean", positions=None) -> TokenWeights:
        positions = range(len(self.rows)) if positions is None else positions
        loss = token_weights(self.rows, loss_agg, loss_norm_tokens=16)
        mean = token_weights(self.rows, "token-mean")
        at = np.array(positions, dtype=int)
        return weights_from([self.masks[i] for i in positions], loss=loss[at], mean=mean[at])

    def flat(self, positions=None) -> dict[str, Tensor]:
        positions = range(len(self.rows)) if positions is None else positions
        flat = {name: torch.cat([rows[i] for i in positions]) for name, rows in self.fields.items()}
        return {name: flat[name].clone().requires_grad_(name in LEARNED) for name in flat}


def make_batch(padding: int = 0, *, rubbish: bool = True, dtype: torch.dtype = torch.float64) -> Batch:
    """Three prompts of sessions with one to three rows, observations inside, one row without loss tokens."""
    generator = torch.Generator().manual_seed(3)
    tokens = [5, 3, 9, 2, 7, 4, 6, 3]
    masks = [torch.tensor([i % 4 != 2 or n < 4 for i in range(n)]) for n in tokens]
    masks[-1][:] = False
    rows = Rows.from_columns(
        prompt=list("aaabbbcc"), session=[0, 0, 1, 0, 1, 1, 0, 1], trajectory=[0, 1, 0, 0, 0, 1, 0, 0],
        prompt_tokens=[2] * 8, response_tokens=tokens, loss_tokens=[int(mask.sum()) for mask in masks],
    ).with_padding(padding, 3)  # fmt: skip
    masks += [torch.zeros(2, dtype=torch.bool)] * padding
    fields = {}
    for name in NAMES:
        drawn = [0.7 * torch.randn(n, generator=generator, dtype=torch.float64) for n in tokens]
        if name == "advantages":
            drawn = [torch.full_like(values, float(values[0])) for values in drawn]
        drawn += [torch.zeros(2, dtype=torch.float64)] * padding
        neutral = RUBBISH[name] if rubbish else 0.0
        fields[name] = [torch.where(m, v, neutral).to(dtype) for v, m in zip(drawn, masks, strict=True)]
    return Batch(rows, masks, fields)


def all_losses(
    flat: dict[str, Tensor], weights: TokenWeights, kind: PolicyLoss = "gspo", kl: KlEstimator = "k3"
) -> list[Sums]:
    log_probs, old = flat["log_probs"], flat["old_log_probs"]
    return [
        policy_loss(log_probs, old, flat["advantages"], weights, kind=kind, clip_low=0.2, clip_high=0.28, dual_clip=3),
        kl_loss(log_probs, flat["ref_log_probs"], weights, kind=kl),
        entropy_loss(flat["entropy"], weights),
        value_loss(flat["values"], flat["old_values"], flat["returns"], weights, clip=0.5),
    ]


def total_loss(sums: list[Sums]) -> Tensor:
    return torch.stack([part.loss for part in sums]).sum()


def run(batch: Batch, cuts: list[list[int]], loss_agg: LossAgg, **kinds):
    """Sums over the cuts: losses, metrics, and the gradients of each row."""
    losses, metrics, gradients = torch.zeros(4, dtype=torch.float64), {}, {}
    for positions in cuts:
        flat, weights = batch.flat(positions), batch.weights(loss_agg, positions)
        sums = all_losses(flat, weights, **kinds)
        losses += torch.stack([part.loss.detach() for part in sums])
        total_loss(sums).backward()
        for part in sums:
            metrics |= {name: metrics.get(name, 0.0) + float(value) for name, value in part.metrics.items()}
        for name in LEARNED:
            gradient = flat[name].grad
            assert gradient is not None
            pieces = gradient.split([len(batch.masks[i]) for i in positions])
            gradients |= {(i, name): piece for i, piece in zip(positions, pieces, strict=True)}
    return losses, metrics, gradients
