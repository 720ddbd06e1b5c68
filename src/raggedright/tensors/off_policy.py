"""How far the policy that is trained is from the one that produced the rollouts: verl's `rollout_corr/` metrics.

Token metrics (kl, k3_kl, chi2_token) are weighted with `weights.mean`, row metrics with `row_weights`: 1 / (real rows
with loss tokens in the batch), zero for padding rows and rows without loss tokens. All are float64 sums that add
over micro-batches and ranks to exact means over real tokens and rows.

The surprise: verl's `log_ppl_diff_max` and `_min` are missing, because extremes do not add. verl averages the row
metrics over all rows of a batch, padding included, where a row of padding has a perplexity of 1.
"""

import torch
from torch import Tensor

from raggedright.tensors.losses import LOG_RATIO_LIMIT, TokenWeights, weighted_sums


@torch.no_grad()
def off_policy_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, weights: TokenWeights, row_weights: Tensor
) -> dict[str, Tensor]:
    """A micro-batch's share of the metrics; log-probs are flat over response tokens, `row_weights` has one per row."""
    counts = weights.mean != 0
    training, rollout = (torch.where(counts, x.double(), 0.0) for x in (old_log_probs, rollout_log_probs))
    log_ratio = training - rollout
    by_token = {
        "kl": -log_ratio,
        "k3_kl": log_ratio.exp() - log_ratio - 1,
        "chi2_token": (2 * log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp() - 1,
    }
    training_log_ppl, rollout_log_ppl = -weights.row_means(training), -weights.row_means(rollout)
    log_ppl_diff = training_log_ppl - rollout_log_ppl
    log_ratio_of_row = log_ratio.new_zeros(weights.num_rows).index_add_(0, weights.row, log_ratio)
    by_row = {
        "training_ppl": training_log_ppl.exp(),
        "training_log_ppl": training_log_ppl,
        "rollout_ppl": rollout_log_ppl.exp(),
        "rollout_log_ppl": rollout_log_ppl,
        "log_ppl_diff": log_ppl_diff,
        "log_ppl_abs_diff": log_ppl_diff.abs(),
        "ppl_ratio": log_ppl_diff.exp(),
        "chi2_seq": (2 * log_ratio_of_row.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp() - 1,
    }
    sums = weighted_sums(by_token, weights.mean) | weighted_sums(by_row, row_weights)
    return {f"rollout_corr/{name}": value for name, value in sums.items()}
