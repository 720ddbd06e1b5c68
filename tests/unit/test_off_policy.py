"""Off-policy metrics are exact means over real rows and tokens, whatever the cut and the padding."""

import math

import numpy as np
import pytest
import torch

from raggedright import token_weights
from raggedright.tensors.losses import off_policy_metrics
from unit.loss_batch import Batch, make_batch, weights_from

torch.set_num_threads(1)


def run_cuts(batch: Batch, cuts: list[list[int]]) -> dict[str, float]:
    real_rows = ((batch.rows.loss_tokens > 0) & ~batch.rows.is_padding).astype(float)
    row_weights = torch.from_numpy(real_rows / real_rows.sum())
    totals: dict[str, float] = {}
    for at in cuts:
        flat = batch.flat(at)
        sums = off_policy_metrics(flat["log_probs"], flat["old_log_probs"], batch.weights("token-mean", at),
                                  row_weights[at])  # fmt: skip
        assert not any(value.requires_grad for value in sums.values())
        totals = {name: totals.get(name, 0.0) + value.item() for name, value in sums.items()}
    return {name.removeprefix("rollout_corr/"): value for name, value in totals.items()}


def test_metrics_are_plain_means_over_rows_and_tokens():
    batch = make_batch()
    rows = [
        [(t, r) for t, r, m in zip(training.tolist(), rollout.tolist(), mask.tolist(), strict=True) if m]
        for training, rollout, mask in zip(
            batch.fields["log_probs"], batch.fields["old_log_probs"], batch.masks, strict=True
        )
    ]
    rows = [row for row in rows if row]
    tokens = [pair for row in rows for pair in row]
    training = np.array([np.mean([t for t, _ in row]) for row in rows])
    rollout = np.array([np.mean([r for _, r in row]) for row in rows])
    expected = {
        "kl": np.mean([r - t for t, r in tokens]),
        "k3_kl": np.mean([math.exp(t - r) - (t - r) - 1 for t, r in tokens]),
        "chi2_token": np.mean([math.exp(t - r) ** 2 for t, r in tokens]) - 1,
        "training_ppl": np.exp(-training).mean(),
        "training_log_ppl": -training.mean(),
        "rollout_ppl": np.exp(-rollout).mean(),
        "rollout_log_ppl": -rollout.mean(),
        "log_ppl_diff": (rollout - training).mean(),
        "log_ppl_abs_diff": np.abs(rollout - training).mean(),
        "ppl_ratio": np.exp(rollout - training).mean(),
        "chi2_seq": np.mean([math.prod(math.exp(t - r) for t, r in row) ** 2 for row in rows]) - 1,
    }
    assert run_cuts(batch, [list(range(8))]) == pytest.approx(expected, rel=1e-12)


def test_cuts_order_and_padding_change_no_off_policy_metric():
    reference = run_cuts(make_batch(rubbish=False), [list(range(8))])
    cut = run_cuts(make_batch(padding=6), [[13, 8], [7, 2, 9], [0], [10, 11, 12], [5, 1, 6, 4], [3]])
    assert cut == pytest.approx(reference, rel=1e-12)


def test_padding_rows_leave_perplexity_alone():
    """verl #7771: one sequence with 3 padding rows, training_ppl 7.39 -> 2.60."""
    naive = (math.exp(2) + 3 * math.exp(0)) / 4
    assert (round(math.exp(2), 2), round(naive, 2)) == (7.39, 2.60)
    masks = [torch.ones(5), *[torch.zeros(1)] * 3]
    weights = weights_from(masks, loss=[0.2, 0, 0, 0], mean=[0.2, 0, 0, 0])
    log_probs = torch.tensor([-2.0] * 5 + [0.0] * 3)
    metrics = off_policy_metrics(log_probs, log_probs - 0.5, weights, torch.tensor([1.0, 0, 0, 0]))
    assert metrics["rollout_corr/training_ppl"].item() == pytest.approx(math.exp(2))
    assert metrics["rollout_corr/rollout_ppl"].item() == pytest.approx(math.exp(2.5))
    assert metrics["rollout_corr/log_ppl_diff"].item() == pytest.approx(-0.5)
    assert metrics["rollout_corr/kl"].item() == pytest.approx(-0.5)


def test_token_weights_do_not_touch_row_metrics():
    batch = make_batch()
    by_token = run_cuts(batch, [list(range(8))])
    loss = token_weights(batch.rows, "session-mean")
    mean = token_weights(batch.rows, "token-mean")
    weights = weights_from(batch.masks, loss=loss, mean=mean)
    real_rows = torch.from_numpy(batch.rows.loss_tokens > 0)
    flat = batch.flat()
    metrics = off_policy_metrics(flat["log_probs"], flat["old_log_probs"], weights, real_rows / real_rows.sum())
    assert {name: metrics[f"rollout_corr/{name}"].item() for name in by_token} == pytest.approx(by_token, rel=1e-6)
