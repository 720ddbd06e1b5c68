"""Losses and off-policy metrics as weighted sums over the tokens of a micro-batch.

Every vector is flat: the response tokens of row 0, then those of row 1, and so on. The results add over micro-batches
and ranks to the step's number, for any cut and any padding: there is no batch denominator and no mean here. Two rules
ensure this. Where a token's weight is zero, its inputs are made neutral before anything else is done with them (0 x inf
is NaN, also in a gradient). The only divisor is a row's own count of loss tokens.

A micro-batch of padding rows only has the loss 0, with a graph, and gives zero gradients. Half precision is raised
to float32 on entry; metrics are float64.

Note: log-ratios are clamped where verl 0.9.1 clamps them, so that numbers carry over. Beyond a clamp a token has no
gradient: ppo's log-ratio (and its `actor/ppo_kl`) at +-20, gspo's at 10 from above, k3's log-ratio at +-20 and k3
itself at 10 (a token that is 2.6 nats less likely than under the reference gets no gradient).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from raggedright.advantages import KlEstimator, PolicyLoss
from raggedright.arrays import Ints
from raggedright.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
GSPO_LOG_RATIO_LIMIT = 10.0
K3_LIMIT = 10.0


class Sums(NamedTuple):
    """A micro-batch's share of a loss, with its graph, and of the metrics, detached."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """The weights of a micro-batch's response tokens: zero for tokens without loss and in padding rows.

    A forward-only pass has no objective: `loss` is zero there, and `mean` is not.
    """

    loss: Tensor  # [N] weight in the objective
    mean: Tensor  # [N] 1 / loss tokens of the step: sums weighted with it are exact token means
    row: Tensor  # [N] int64, the row of each token
    row_tokens: Tensor  # [num_rows] loss tokens of each row
    num_rows: int

    @classmethod
    def from_mask(
        cls, mask: Tensor, response_tokens: Sequence[int] | Ints, *, loss: ArrayLike, mean: ArrayLike
    ) -> "TokenWeights":
        """From the loss masks of all rows, one after another, and the per-token weights of each row.

        `loss` is the plan's weight of each row, `mean` that of token-mean (see `token_weights`).
        """
        counts = np.asarray(response_tokens, dtype=np.int64)
        row, carries_loss = np.repeat(np.arange(len(counts)), counts), mask.cpu().bool().numpy()
        row_tokens = np.bincount(row[carries_loss], minlength=len(counts))
        row_weights = (np.asarray(weight, dtype=np.float64) for weight in (loss, mean))
        token_weights = (np.where(carries_loss, weight[row], 0.0) for weight in row_weights)
        return cls(*map(torch.from_numpy, (*token_weights, row, row_tokens)), num_rows=len(counts))

    def to(self, device: torch.device | str) -> "TokenWeights":
        """These weights on another device."""
        tensors = (tensor.to(device) for tensor in (self.loss, self.mean, self.row, self.row_tokens))
        return TokenWeights(*tensors, num_rows=self.num_rows)

    def row_means(self, values: Tensor) -> Tensor:
        """Mean over each row's loss tokens, [num_rows]; zero for a row without any. `values` must be neutral."""
        sums = values.new_zeros(self.num_rows).index_add_(0, self.row, values)
        return sums / self.row_tokens.clamp(min=1)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: TokenWeights,
    *,
    kind: PolicyLoss = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Sums:
    """The policy's objective; ratios are clipped to [1 - clip_low, 1 + clip_high]; reinforce has no ratios.

    `dual_clip` (> 1) bounds the loss of a token of negative advantage at `dual_clip` times that advantage. Gspo uses
    one ratio per row, exp of the mean log-ratio of its loss tokens, and each of these tokens gets its gradient.
    """
    log_probs, old_log_probs, advantages = _neutral(weights, log_probs, old_log_probs, advantages)
    log_ratio = log_probs - old_log_probs
    match kind:
        case "reinforce":
            return _policy_sums(-advantages * log_probs, log_ratio, weights)
        case "ppo":
            log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            ratio = log_ratio.exp()
        case "gspo":
            row_log_ratio = weights.row_means(log_ratio.detach())[weights.row]
            ratio = (log_probs - log_probs.detach() + row_log_ratio).clamp(max=GSPO_LOG_RATIO_LIMIT).exp()
        case _:
            raise ConfigError(f"policy loss is {kind!r}; it takes one of {', '.join(get_args(PolicyLoss))}")
    losses, clipped, clipped_lower = _clip(ratio, advantages, clip_low, clip_high, dual_clip)
    return _policy_sums(losses, log_ratio, weights, pg_clipfrac=clipped, pg_clipfrac_lower=clipped_lower)


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, weights: TokenWeights, *, kind: KlEstimator = "k3") -> Sums:
    """KL(policy || reference), estimated per token: k1 = r, k2 = r^2 / 2, k3 = exp(-r) + r - 1, r the log-ratio."""
    log_probs, ref_log_probs = _neutral(weights, log_probs, ref_log_probs)
    losses = kl_estimate(log_probs - ref_log_probs, kind)
    return _sums("actor/kl_loss", losses, weights)


def kl_estimate(log_ratio: Tensor, kind: KlEstimator) -> Tensor:
    """KL(policy || reference) of each token from differences of log-probs, bounded as in verl."""
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return ((-log_ratio).exp() + log_ratio - 1).clamp(-K3_LIMIT, K3_LIMIT)
        case _:
            raise ConfigError(f"KL estimator is {kind!r}; it takes one of {', '.join(get_args(KlEstimator))}")


def entropy_loss(entropy: Tensor, weights: TokenWeights) -> Sums:
    """The entropy in the objective's weights (subtract it, times a coefficient) and as a token mean."""
    (entropy,) = _neutral(weights, entropy)
    return _sums("actor/entropy_loss", entropy, weights, {"actor/entropy": entropy})


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: TokenWeights, *, clip: float) -> Sums:
    """Half the squared error of the values, or of the values clipped to `clip` around the old ones if that is more."""
    values, old_values, returns = _neutral(weights, values, old_values, returns)
    near = values.clamp(old_values - clip, old_values + clip)
    free, clipped = (values - returns).square(), (near - returns).square()
    losses = 0.5 * torch.maximum(free, clipped)
    return _sums("critic/vf_loss", losses, weights, {"critic/vf_clipfrac": clipped > free, "critic/vpred_mean": values})


@torch.no_grad()
def off_policy_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, weights: TokenWeights, row_weights: Tensor
) -> dict[str, Tensor]:
    """A micro-batch's share of verl's `rollout_corr/` metrics: how far the trained policy is from the rollout's policy.

    Log-probs are flat over response tokens. Token metrics (kl, k3_kl, chi2_token) are weighted with `weights.mean`, row
    metrics with `row_weights`: 1 / (real rows with loss tokens in the batch), zero for padding rows and rows without
    loss tokens. All are float64 sums that add over micro-batches and ranks to exact means over real tokens and rows.

    Note: verl's `log_ppl_diff_max` and `_min` are missing, because extremes do not add. verl averages the row metrics
    over all rows of a batch, including padding rows, which have a perplexity of 1.
    """
    has_weight = weights.mean != 0
    training, rollout = (torch.where(has_weight, x.double(), 0.0) for x in (old_log_probs, rollout_log_probs))
    log_ratio = training - rollout
    token_values = {
        "kl": -log_ratio,
        "k3_kl": log_ratio.exp() - log_ratio - 1,
        "chi2_token": (2 * log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp() - 1,
    }
    training_log_ppl, rollout_log_ppl = -weights.row_means(training), -weights.row_means(rollout)
    log_ppl_diff = training_log_ppl - rollout_log_ppl
    row_log_ratio = log_ratio.new_zeros(weights.num_rows).index_add_(0, weights.row, log_ratio)
    row_values = {
        "training_ppl": training_log_ppl.exp(),
        "training_log_ppl": training_log_ppl,
        "rollout_ppl": rollout_log_ppl.exp(),
        "rollout_log_ppl": rollout_log_ppl,
        "log_ppl_diff": log_ppl_diff,
        "log_ppl_abs_diff": log_ppl_diff.abs(),
        "ppl_ratio": log_ppl_diff.exp(),
        "chi2_seq": (2 * row_log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp() - 1,
    }
    sums = weighted_sums(token_values, weights.mean) | weighted_sums(row_values, row_weights)
    return {f"rollout_corr/{name}": value for name, value in sums.items()}


def _clip(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's loss, whether the clip raised it, and whether the dual clip lowered it."""
    costs = -advantages
    free, clipped = costs * ratio, costs * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(free, clipped)
    if dual is None:
        return losses, clipped > free, torch.zeros_like(losses)
    if dual <= 1:
        raise ConfigError(f"dual_clip is {dual}; it takes a number above 1, or None")
    bound = costs * dual
    bounded = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    return bounded, clipped > free, (advantages < 0) & (losses > bound)


def _policy_sums(losses: Tensor, log_ratio: Tensor, weights: TokenWeights, **shares: Tensor) -> Sums:
    means = {"actor/ppo_kl": -log_ratio, **{f"actor/{name}": share for name, share in shares.items()}}
    return _sums("actor/pg_loss", losses, weights, means)


def _neutral(weights: TokenWeights, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs, in float32 at least, with zero where the weight is zero, so that no gradient flows there."""
    has_weight = weights.loss != 0
    raised = (values.to(torch.promote_types(values.dtype, torch.float32)) for values in inputs)
    return tuple(torch.where(has_weight, values, 0.0) for values in raised)


def _sums(name: str, losses: Tensor, weights: TokenWeights, means: Mapping[str, Tensor] | None = None) -> Sums:
    """A loss, which is also the metric of this name, and token means of other values."""
    loss = torch.dot(weights.loss.double(), losses.double())  # a field of a stored row may be float32
    return Sums(loss, {name: loss.detach(), **weighted_sums(means or {}, weights.mean)})


@torch.no_grad()
def weighted_sums(named: Mapping[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """The weighted sum of each vector, in float64."""
    weight = weight.double()
    return {name: torch.dot(weight, values.double()) for name, values in named.items()}
