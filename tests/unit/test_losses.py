"""Losses against plain calculations, token by token, and their gradients against finite differences."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from raggedright import ConfigError
from raggedright.advantages import KlEstimator, PolicyLoss
from raggedright.tensors.losses import kl_loss, policy_loss, value_loss
from unit.loss_batch import LOSS_AGGS, all_losses, make_batch, total_loss, weights_from

torch.set_num_threads(1)


def plain_policy(flat, weights, kind, low, high, dual):
    """Loss, ppo_kl and both clip fractions in plain Python."""
    count = [float(w) for w in weights.loss]
    live = [i for i, w in enumerate(count) if w]
    lp, old, adv, row = (
        x.tolist() for x in (flat["log_probs"], flat["old_log_probs"], flat["advantages"], weights.row)
    )
    loss = kl = clipped = lower = 0.0
    for i in live:
        log_ratio = lp[i] - old[i]
        if kind == "gspo":
            same = [lp[j] - old[j] for j in live if row[j] == row[i]]
            log_ratio = sum(same) / len(same)
        ratio = math.exp(log_ratio)
        free, bounded = -adv[i] * ratio, -adv[i] * min(max(ratio, 1 - low), 1 + high)
        token = max(free, bounded)
        clipped += bounded > free
        if adv[i] < 0 and dual is not None:
            lower += token > -adv[i] * dual
            token = min(token, -adv[i] * dual)
        loss += count[i] * {"ppo": token, "gspo": token, "reinforce": -adv[i] * lp[i]}[kind]
        kl += old[i] - lp[i]
    return loss, kl / len(live), clipped / len(live), lower / len(live)


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
@pytest.mark.parametrize("kind", get_args(PolicyLoss))
@pytest.mark.parametrize("dual", [None, 1.5])
def test_policy_loss_is_the_plain_sum_over_tokens(kind, dual, loss_agg):
    batch = make_batch()
    flat, weights = batch.flat(), batch.weights(loss_agg)
    sums = policy_loss(flat["log_probs"], flat["old_log_probs"], flat["advantages"], weights, kind=kind, clip_low=0.1,
                       clip_high=0.3, dual_clip=dual)  # fmt: skip
    loss, kl, clipped, lower = plain_policy(flat, weights, kind, 0.1, 0.3, dual)
    assert sums.loss.item() == pytest.approx(loss, rel=1e-13)
    expected = {"actor/pg_loss": loss, "actor/ppo_kl": kl}
    if kind != "reinforce":
        expected |= {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": lower}
        assert clipped > 0
        assert (lower > 0) == (dual is not None)
    assert {name: value.item() for name, value in sums.metrics.items()} == pytest.approx(expected, rel=1e-12)
    assert not any(value.requires_grad for value in sums.metrics.values())


@pytest.mark.parametrize("kind", get_args(KlEstimator))
def test_kl_loss_is_the_plain_sum_over_tokens(kind):
    plain = {"k1": lambda r: r, "k2": lambda r: r * r / 2, "k3": lambda r: math.exp(-r) + r - 1}[kind]
    batch = make_batch()
    flat, weights = batch.flat(), batch.weights("session-mean")
    log_probs, ref = flat["log_probs"].tolist(), flat["ref_log_probs"].tolist()
    expected = sum(w * plain(log_probs[i] - ref[i]) for i, w in enumerate(weights.loss.tolist()) if w)
    sums = kl_loss(flat["log_probs"], flat["ref_log_probs"], weights, kind=kind)
    assert sums.loss.item() == pytest.approx(expected, rel=1e-13)
    assert sums.metrics["actor/kl_loss"].item() == pytest.approx(expected, rel=1e-13)


def test_value_loss_takes_the_worse_of_free_and_clipped_values():
    batch = make_batch()
    flat, weights = batch.flat(), batch.weights("prompt-mean")
    live = [i for i, w in enumerate(weights.loss.tolist()) if w]
    loss = clipped = mean = 0.0
    for i in live:
        value, old, target = (flat[name][i].item() for name in ("values", "old_values", "returns"))
        near = min(max(value, old - 0.5), old + 0.5)
        loss += weights.loss[i].item() * max((value - target) ** 2, (near - target) ** 2) / 2
        clipped += (near - target) ** 2 > (value - target) ** 2
        mean += value / len(live)
    sums = value_loss(flat["values"], flat["old_values"], flat["returns"], weights, clip=0.5)
    expected = {"critic/vf_loss": loss, "critic/vf_clipfrac": clipped / len(live), "critic/vpred_mean": mean}
    assert {name: value.item() for name, value in sums.metrics.items()} == pytest.approx(expected, rel=1e-12)
    assert sums.loss.item() == pytest.approx(loss, rel=1e-13)
    assert clipped > 0


@pytest.mark.parametrize("kind", [kind for kind in get_args(PolicyLoss) if kind != "gspo"])  # it detaches: next test
def test_gradients_are_those_of_finite_differences(kind):
    batch = make_batch(rubbish=False)
    flat, weights = batch.flat(), batch.weights("session-mean")
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, flat["old_log_probs"], flat["advantages"], weights, kind=kind).loss, flat["log_probs"]
    )
    for kl in get_args(KlEstimator):
        assert torch.autograd.gradcheck(
            lambda x, kl=kl: kl_loss(x, flat["ref_log_probs"], weights, kind=kl).loss, flat["log_probs"]
        )
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, flat["old_values"], flat["returns"], weights, clip=0.5).loss, flat["values"]
    )


def test_gspo_gives_the_gradient_of_the_sequence_ratio():
    batch = make_batch(rubbish=False)
    flat, weights = batch.flat(), batch.weights("seq-mean-token-mean")
    log_probs = flat["log_probs"]

    def by_sequence(log_probs: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(len(batch.rows)):
            live = (weights.row == i) & (weights.loss != 0)
            if live.any():
                ratio = (log_probs - flat["old_log_probs"])[live].mean().exp()
                advantage = flat["advantages"][live][0]
                total = total - torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.28)) / 7
        return total

    loss = policy_loss(log_probs, flat["old_log_probs"], flat["advantages"], weights, kind="gspo", clip_high=0.28).loss
    expected = by_sequence(log_probs)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    (gradient,), (plain,) = torch.autograd.grad(loss, log_probs), torch.autograd.grad(expected, log_probs)
    torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=1e-16)
    assert torch.autograd.gradcheck(by_sequence, log_probs)


def test_log_ratios_far_apart_stay_finite():
    weights = weights_from([torch.ones(2)], loss=[0.5], mean=[0.5])
    for sign in (1.0, -1.0):
        for kind in get_args(PolicyLoss):
            log_probs = torch.tensor([-120.0 * sign, -1.0], requires_grad=True)
            advantages = torch.tensor([-1.0, -1.0])
            sums = [policy_loss(log_probs, torch.zeros(2), advantages, weights, kind=kind)]
            sums += [kl_loss(log_probs, torch.zeros(2), weights, kind=kl) for kl in get_args(KlEstimator)]
            (gradient,) = torch.autograd.grad(total_loss(sums), log_probs)
            assert gradient.isfinite().all()
            assert all(part.loss.isfinite() for part in sums)


def test_log_ratios_are_clamped_where_verl_clamps_them():
    """Beyond a clamp the value stays and the gradient is zero."""
    weights = weights_from([torch.ones(1)], loss=[1.0], mean=[1.0])
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for loss, log_prob, limit in (
        (lambda x: policy_loss(x, zero, -one, weights, kind="ppo"), 21.0, math.exp(20)),
        (lambda x: policy_loss(x, zero, -one, weights, kind="gspo"), 11.0, math.exp(10)),
        (lambda x: kl_loss(x, zero, weights, kind="k3"), -2.7, 10.0),
    ):
        log_probs = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
        sums = loss(log_probs)
        assert sums.loss.item() == pytest.approx(limit, rel=1e-14)
        assert torch.autograd.grad(sums.loss, log_probs)[0].item() == 0
    far = torch.tensor([21.0], dtype=torch.float64)
    assert policy_loss(far, zero, one, weights, kind="ppo").metrics["actor/ppo_kl"].item() == -20
    assert policy_loss(far, zero, one, weights, kind="gspo").metrics["actor/ppo_kl"].item() == -21


def test_half_precision_is_raised_before_anything_is_computed():
    batch = make_batch(dtype=torch.bfloat16)
    half = batch.flat()
    full = {name: values.detach().double() for name, values in half.items()}
    for a, b in zip(all_losses(half, batch.weights()), all_losses(full, batch.weights()), strict=True):
        assert a.loss.item() == pytest.approx(b.loss.item(), abs=1e-6)


def test_an_unknown_kind_is_named():
    batch = make_batch()
    flat, weights = batch.flat(), batch.weights()
    with pytest.raises(ConfigError, match="'ppo2'; it takes one of ppo, gspo, reinforce"):
        all_losses(flat, weights, kind="ppo2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="'k4'; it takes one of k1, k2, k3"):
        all_losses(flat, weights, kl="k4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="dual_clip is 1; it takes a number above 1"):
        policy_loss(flat["log_probs"], flat["old_log_probs"], flat["advantages"], weights, dual_clip=1)


def test_weights_may_be_float32_as_a_stored_field_is():
    batch = make_batch(dtype=torch.float32)
    weights = batch.weights("session-mean")
    narrow = replace(weights, loss=weights.loss.float(), mean=weights.mean.float())
    for wide, other in zip(all_losses(batch.flat(), weights), all_losses(batch.flat(), narrow), strict=True):
        assert torch.allclose(other.loss.double(), wide.loss.double(), rtol=1e-6)
        assert other.metrics.keys() == wide.metrics.keys()
