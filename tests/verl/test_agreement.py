"""For sessions with one trajectory and without padding, our numbers equal those of verl 0.9.1's own functions.

Run by `make test-verl`, in an environment that has verl; skipped elsewhere. verl computes on [rows, length] rectangles
with a mask, we on flat tokens with weights. Both give the same numbers, in float64 (to 1e-12) and float32 (to 1e-6).
Masks are integers, as in verl: with a float64 mask its `mask.sum() + 1e-8` would differ in the tenth digit. Intended
differences are stated in the tests.
"""

from collections.abc import Mapping
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from raggedright import Rows, Scores, session_advantages, token_weights
from raggedright.advantages import KlEstimator
from raggedright.plan.layout import LossAgg
from raggedright.tensors.gae import gae, whiten
from raggedright.tensors.losses import TokenWeights, entropy_loss, kl_loss, off_policy_metrics, policy_loss, value_loss

# This folder is also called verl, and is imported instead where verl is not installed.
core = pytest.importorskip("verl.trainer.ppo.core_algos")
correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
config = pytest.importorskip("verl.workers.config")

VERL_MODES: tuple[LossAgg, ...] = (
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
)  # fmt: skip
DTYPES = [torch.float64, torch.float32]
ROWS, WIDTH = 12, 16
# 65 loss tokens: verl rounds its factor n / (n - 1) to float32, which is exact for 65 / 64.
LENGTHS = [1, 4, 3, 4, 5, 16, 7, 8, 9, 5, 6, 7]
pytestmark = pytest.mark.filterwarnings("ignore")


def make_mask() -> Tensor:
    """Responses of 1 to 16 tokens; every fifth is an observation, within the row and at its end."""
    mask = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
        mask[row, 4:length:5] = 0
    return mask


MASK = make_mask()


def draw(name: str, dtype: torch.dtype, scale: float = 0.5) -> Tensor:
    seed = sum(map(ord, name))
    drawn = scale * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_(name in ("log_prob", "vpreds", "entropy"))


def flat(rectangle: Tensor) -> Tensor:
    """The response tokens of the rows, one after another."""
    return torch.cat([rectangle[i, :length] for i, length in enumerate(LENGTHS)])


def weights_of(loss_agg: LossAgg) -> TokenWeights:
    rows = Rows.from_columns(
        prompt=[f"p{i:02}" for i in range(ROWS)], session=[0] * ROWS, trajectory=[0] * ROWS, prompt_tokens=[3] * ROWS,
        response_tokens=LENGTHS, loss_tokens=MASK.sum(-1).numpy(),
    )  # fmt: skip
    loss = token_weights(rows, loss_agg, loss_norm_tokens=WIDTH)
    return TokenWeights.from_mask(flat(MASK), LENGTHS, loss=loss, mean=token_weights(rows, "token-mean"))


def actor_config(loss_agg: LossAgg):
    return config.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=loss_agg,
        clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0,
    )  # fmt: skip


def check_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = (1e-12, 1e-13) if dtype == torch.float64 else (1e-6, 1e-6)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)


def check_loss(ours: Tensor, theirs: Tensor, learned: Tensor) -> None:
    """The same loss, and the same gradient."""
    check_close(ours, theirs, learned.dtype)
    (gradient,) = torch.autograd.grad(ours, learned)
    (expected,) = torch.autograd.grad(theirs, learned)
    assert expected.abs().max() > 0
    check_close(gradient, expected, learned.dtype)


def check_metrics(ours: Mapping[str, Tensor], theirs: Mapping[str, float], dtype: torch.dtype) -> None:
    """The same numbers; verl's clip fractions are always float32."""
    for name, value in theirs.items():
        exact = torch.float32 if "clipfrac" in name else dtype
        check_close(ours[name], torch.tensor(value, dtype=torch.float64), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_agg", VERL_MODES)
def test_weighted_sums_agree_with_agg_loss(loss_agg, dtype):
    entropy = draw("entropy", dtype)
    theirs = core.agg_loss(entropy, MASK, loss_agg)
    ours = entropy_loss(flat(entropy), weights_of(loss_agg))
    check_loss(ours.loss, theirs, entropy)
    check_metrics(ours.metrics, {"actor/entropy_loss": theirs.item()}, dtype)
    check_metrics(ours.metrics, {"actor/entropy": core.agg_loss(entropy, MASK, "token-mean").item()}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_agg", VERL_MODES)
@pytest.mark.parametrize("scale", [0.5, 30.0])
@pytest.mark.parametrize(("kind", "name", "dual"), [("ppo", "vanilla", 3.0), ("gspo", "gspo", None)])
def test_policy_losses_agree(kind, name, dual, scale, loss_agg, dtype):
    """At scale 30 log-ratios exceed the clamps, which are the same as verl's."""
    log_prob, old = draw("log_prob", dtype, scale), draw("old_log_prob", dtype, scale)
    advantages = draw("advantages", dtype)
    theirs, metrics = core.get_policy_loss_fn(name)(
        old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=MASK, loss_agg_mode=loss_agg,
        config=actor_config(loss_agg),
    )  # fmt: skip
    ours = policy_loss(
        flat(log_prob), flat(old), flat(advantages), weights_of(loss_agg), kind=kind, clip_high=0.28, dual_clip=dual
    )
    check_loss(ours.loss, theirs, log_prob)
    check_metrics(ours.metrics, {**metrics, "actor/pg_loss": theirs.item()}, dtype)
    assert metrics["actor/pg_clipfrac"] > 0
    assert (metrics["actor/pg_clipfrac_lower"] > 0) == (kind == "ppo")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_agg", VERL_MODES)
def test_reinforce_agrees(loss_agg, dtype):
    log_prob, old, advantages = draw("log_prob", dtype), draw("old_log_prob", dtype), draw("advantages", dtype)
    theirs, metrics = core.compute_policy_loss_reinforce(
        rollout_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=MASK, loss_agg_mode=loss_agg,
        config=actor_config(loss_agg),
    )  # fmt: skip
    ours = policy_loss(flat(log_prob), flat(old), flat(advantages), weights_of(loss_agg), kind="reinforce")
    check_loss(ours.loss, theirs, log_prob)
    check_metrics(ours.metrics, metrics, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.5, 30.0])
@pytest.mark.parametrize("kind", get_args(KlEstimator))
def test_kl_estimators_agree(kind, scale, dtype):
    """At scale 30 log-ratios exceed the clamps, which are the same as verl's."""
    log_prob, ref = draw("log_prob", dtype, scale), draw("ref_log_prob", dtype, scale)
    old_name = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}[kind]
    by_token = core.kl_penalty(log_prob, ref, kind)
    assert torch.equal(by_token, core.kl_penalty(log_prob, ref, old_name))
    theirs = core.agg_loss(by_token, MASK, "token-mean")
    ours = kl_loss(flat(log_prob), flat(ref), weights_of("token-mean"), kind=kind)
    check_loss(ours.loss, theirs, log_prob)
    check_metrics(ours.metrics, {"actor/kl_loss": theirs.item()}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_agg", VERL_MODES)
def test_value_losses_agree(loss_agg, dtype):
    vpreds, returns, values = draw("vpreds", dtype), draw("returns", dtype), draw("values", dtype)
    theirs, clipfrac = core.compute_value_loss(vpreds, returns, values, MASK, 0.3, loss_agg)
    ours = value_loss(flat(vpreds), flat(values), flat(returns), weights_of(loss_agg), clip=0.3)
    check_loss(ours.loss, theirs, vpreds)
    mean = vpreds[MASK.bool()].mean().item()
    check_metrics(
        ours.metrics,
        {"critic/vf_loss": theirs.item(), "critic/vf_clipfrac": clipfrac.item(), "critic/vpred_mean": mean}, dtype,
    )  # fmt: skip
    assert clipfrac > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gae_and_whitening_agree(dtype):
    """Every token has a reward, also observations, where neither of us counts it."""
    rewards, values = draw("rewards", dtype), draw("values", dtype)
    theirs, their_returns = core.compute_gae_advantage_return(rewards, values, MASK, gamma=0.97, lam=0.9)
    split = [[x[i, :length] for i, length in enumerate(LENGTHS)] for x in (rewards, values, MASK)]
    advantages, returns = gae(*split, gamma=0.97, lam=0.9)
    assert int(MASK.sum()) == 65
    counts = flat(MASK).bool()
    check_close(torch.cat(returns)[counts], flat(their_returns)[counts], dtype)
    check_close(torch.cat(whiten(advantages, split[2]))[counts], flat(theirs)[counts], dtype)


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_outcome_advantages_agree_except_for_a_group_of_one(estimator, std):
    """A single session has nothing to be compared with: its advantage is zero here; verl returns its score."""
    prompt = np.array(["a"] * 4 + ["b"] * 3 + ["c"] * 4 + ["d"])
    scores = draw("scores", torch.float64)[:, 0]
    rewards = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    rewards[:, 0] = scores
    options = {"norm_adv_by_std_in_grpo": std} if estimator == "grpo" else {}
    theirs, _ = core.get_adv_estimator_fn(estimator)(rewards.clone(), MASK, prompt, **options)
    sessions = Scores.from_columns(prompt=prompt.tolist(), session=list(range(ROWS)), score=scores.numpy())
    ours = session_advantages(sessions, estimator, std=std)
    np.testing.assert_allclose(ours[:-1], theirs[:-1, 0].numpy(), rtol=1e-12, atol=1e-14)
    assert ours[-1] == 0
    assert theirs[-1, 0].item() == pytest.approx(scores[-1].item(), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_off_policy_metrics_agree(dtype):
    """verl's maximum and minimum are not among our metrics: extremes cannot be summed over micro-batches."""
    old, rollout = draw("old_log_prob", dtype), draw("rollout_log_prob", dtype)
    theirs = correction.compute_rollout_corr_metrics_from_logprobs(old, rollout, MASK)
    row_weights = torch.full((ROWS,), 1 / ROWS, dtype=torch.float64)
    ours = off_policy_metrics(flat(old), flat(rollout), weights_of("token-mean"), row_weights)
    assert set(theirs) - set(ours) == {"rollout_corr/log_ppl_diff_max", "rollout_corr/log_ppl_diff_min"}
    check_metrics(ours, {name: theirs[name] for name in ours}, dtype)
