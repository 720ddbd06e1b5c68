"""Padding, cuts and the order of rows change no loss, metric or gradient: the claim itself, then peers' faults."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from raggedright import Rows, token_weights
from raggedright.advantages import KlEstimator, PolicyLoss
from raggedright.plan.layout import LossAgg
from raggedright.tensors.losses import TokenWeights, entropy_loss, kl_loss, policy_loss
from unit.loss_batch import LEARNED, LOSS_AGGS, NAMES, all_losses, make_batch, run, total_loss, weights_from

torch.set_num_threads(1)


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
@pytest.mark.parametrize("kind", get_args(PolicyLoss))
@pytest.mark.parametrize("kl", get_args(KlEstimator))
def test_cuts_order_and_padding_change_neither_losses_nor_metrics_nor_gradients(loss_agg, kind, kl):
    losses, metrics, gradients = run(make_batch(rubbish=False), [list(range(8))], loss_agg, kind=kind, kl=kl)
    cuts = [[13, 8], [7, 2, 9], [0], [10, 11, 12], [5, 1, 6, 4], [3]]
    cut_losses, cut_metrics, cut_gradients = run(make_batch(padding=6), cuts, loss_agg, kind=kind, kl=kl)
    torch.testing.assert_close(cut_losses, losses, rtol=1e-13, atol=1e-15)
    assert cut_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-15)
    for (row, name), gradient in cut_gradients.items():
        if row < 8:
            torch.testing.assert_close(gradient, gradients[row, name], rtol=1e-13, atol=1e-17)
        else:
            assert gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rubbish", [-120.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", get_args(PolicyLoss))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_padding_alone_gives_zero_loss_with_a_graph_and_zero_gradients(rubbish, kind, dtype):
    weights = weights_from([torch.zeros(2), torch.zeros(1)], loss=[0.0, 0.0], mean=[0.0, 0.0])
    flat = {name: torch.full((3,), rubbish, dtype=dtype, requires_grad=name in LEARNED) for name in NAMES}
    for kl in get_args(KlEstimator):
        sums = all_losses(flat, weights, kind=kind, kl=kl)
        assert all(part.loss.requires_grad and part.loss.item() == 0 for part in sums)
        assert all(value.item() == 0 for part in sums for value in part.metrics.values())
        total_loss(sums).backward()
    for name in LEARNED:
        gradient = flat[name].grad
        assert gradient is not None
        assert gradient.tolist() == [0, 0, 0]


def test_a_micro_batch_without_a_token_gives_zero_with_a_graph():
    weights = weights_from([], loss=[], mean=[])
    flat = {name: torch.zeros(0, requires_grad=name in LEARNED) for name in NAMES}
    total = total_loss(all_losses(flat, weights))
    total.backward()
    assert total.item() == 0


def simple_rows(tokens: list[int], padding: int = 0) -> Rows:
    """One session of one row per prompt; padding rows have one response token."""
    n = len(tokens)
    return Rows.from_columns(
        prompt=[f"p{i:02}" for i in range(n)], session=[0] * n, trajectory=[0] * n,
        prompt_tokens=[1] * n, response_tokens=tokens,
    ).with_padding(padding, 2)  # fmt: skip


def weights_of(rows: Rows, loss_agg: LossAgg = "token-mean", positions=None, norm: int | None = None) -> TokenWeights:
    at = np.arange(len(rows)) if positions is None else np.array(positions)
    masks = [torch.full((int(rows.response_tokens[i]),), not rows.is_padding[i]) for i in at]
    loss, mean = token_weights(rows, loss_agg, loss_norm_tokens=norm), token_weights(rows, "token-mean")
    return weights_from(masks, loss=loss[at], mean=mean[at])


def gradient_of(log_probs: Tensor, weights: TokenWeights) -> Tensor:
    """Gradient of reinforce with advantages of one: minus the weights."""
    log_probs = log_probs.clone().requires_grad_()
    loss = policy_loss(log_probs, log_probs.detach(), torch.ones_like(log_probs), weights, kind="reinforce").loss
    return torch.autograd.grad(loss, log_probs)[0]


def off_by(gradient: Tensor, reference: Tensor) -> float:
    return float((gradient - reference).norm() / reference.norm())


@pytest.mark.parametrize("loss_agg", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_padding_rows_do_not_shrink_a_sequence_mean(loss_agg):
    """verl 0.9.1 divides by rows that include padding: 20 real + 12 padding rows, gradient off by 0.375."""
    tokens = [1 + i % 7 for i in range(20)]
    real, padded = simple_rows(tokens), simple_rows(tokens, padding=12)
    reference = gradient_of(torch.zeros(sum(tokens)), weights_of(real, loss_agg))
    gradient = gradient_of(torch.zeros(sum(tokens) + 12), weights_of(padded, loss_agg))
    assert off_by(reference * 20 / 32, reference) == pytest.approx(0.375)
    assert off_by(gradient[: sum(tokens)], reference) == 0
    assert gradient[sum(tokens) :].tolist() == [0] * 12


def test_norm_mode_does_not_depend_on_the_cut():
    """verl 0.9.1 divides by the width of the micro-batch: gradient off by 0.434 without any padding."""
    tokens = [2, 3, 5, 16]
    rows = simple_rows(tokens)
    reference = gradient_of(torch.zeros(26), weights_of(rows, "seq-mean-token-sum-norm", norm=16))
    cuts = [[0, 1], [2], [3]]
    widths = torch.tensor([3.0] * 5 + [5.0] * 5 + [16.0] * 16)
    assert off_by(reference * 16 / widths, reference) > 0.434
    cut = [
        gradient_of(
            torch.zeros(sum(tokens[i] for i in at)), weights_of(rows, "seq-mean-token-sum-norm", positions=at, norm=16)
        )
        for at in cuts
    ]
    assert off_by(torch.cat(cut), reference) == 0


def test_clip_fraction_is_the_share_of_tokens_whatever_the_cut():
    """verl 0.9.1 takes unweighted means of micro-batches, padding-only ones included: 0.223 became 0.149."""
    clipped = [100, 123]
    rows = simple_rows([500, 500], padding=2)
    log_probs = [torch.tensor([1.0] * c + [0.0] * (500 - c)) for c in clipped] + [torch.zeros(1)] * 2

    def shares(cuts: list[list[int]]) -> list[float]:
        flats = [torch.cat([log_probs[i] for i in at]) for at in cuts]
        sums = [
            policy_loss(flat, torch.zeros_like(flat), torch.ones_like(flat), weights_of(rows, positions=at))
            for flat, at in zip(flats, cuts, strict=True)
        ]
        return [part.metrics["actor/pg_clipfrac"].item() for part in sums]

    for cuts in ([[0, 1]], [[0], [1], [2, 3]], [[3, 0], [2], [1]]):
        assert sum(shares(cuts)) == pytest.approx(0.223, rel=1e-14)
    assert round((100 / 500 + 123 / 500 + 0) / 3, 3) == 0.149, "what a mean of micro-batch means says"


def test_padding_tokens_are_in_no_denominator():
    """rLLM #508 left padding tokens in the token denominator: an effective learning rate about 40 % lower."""
    rows = simple_rows([25, 35], padding=40)
    gradient = gradient_of(torch.zeros(100), weights_of(rows))
    assert gradient.sum().item() == pytest.approx(-1, rel=1e-6)
    assert gradient[0].item() * 60 / 100 == pytest.approx(-0.01), "what dividing by all 100 tokens would give"


def test_token_means_are_not_means_of_micro_batch_means():
    """TRL #7206: 100 tokens at 2.0 and 900 at 0.5 were logged as 1.25; right is 0.65."""
    rows = simple_rows([100, 900])
    entropies = torch.full((100,), 2.0), torch.full((900,), 0.5)
    parts = [entropy_loss(entropies[i], weights_of(rows, positions=[i])).metrics["actor/entropy"] for i in (0, 1)]
    assert float(sum(parts)) == pytest.approx(0.65, rel=1e-14)
    assert float(entropies[0].mean() + entropies[1].mean()) / 2 == 1.25


def test_k3_of_a_padding_token_has_no_nan_gradient():
    """0 x inf: at a log-prob of -120 the plain k3 has a NaN gradient even at weight zero."""
    naive = torch.tensor([-120.0], requires_grad=True)
    ((torch.exp(-naive) + naive - 1) * 0.0).sum().backward()
    assert naive.grad is not None
    assert naive.grad.isnan().all()
    rows = simple_rows([2], padding=1)
    log_probs = torch.tensor([-1.0, -2.0, -120.0], requires_grad=True)
    loss = kl_loss(log_probs, torch.tensor([-1.5, -1.5, 0.0]), weights_of(rows), kind="k3").loss
    (gradient,) = torch.autograd.grad(loss, log_probs)
    expected = [(1 - math.exp(-0.5)) / 2, (1 - math.exp(0.5)) / 2, 0]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6)
