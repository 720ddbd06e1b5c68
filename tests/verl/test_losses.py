# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The plug-in's losses in verl's own update: for any cut and padding, the gradient is that of the rows one by one.

Ranks run one after another in float64, with verl's iterator, micro-batches and losses. Weights are float32 fields of
rows, so gradients agree to 1e-7.
"""

from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from ranks_in_turn import Model, Row, count_loss_tokens, make_batch, update
from torch import Tensor
from verl.trainer.ppo import core_algos as core
from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig

from raggedright import ConfigError, Layout, Rows, make_plan
from raggedright.plan.layout import LossAgg
from raggedright.verl import weighted_losses

pytestmark = pytest.mark.filterwarnings("ignore")

NORM_TOKENS = 30
MODES = (*get_args(LossAgg), "token-sum")


def make_rows(num_prompts: int = 4, seed: int = 3) -> Rows:
    """Sessions of one to four rows, of very different lengths."""
    generator = np.random.default_rng(seed)
    names = [
        (f"p{p}", s, t) for p in range(num_prompts) for s in range(2) for t in range(int(generator.integers(1, 5)))
    ]
    response = generator.integers(1, 19, size=len(names))
    return Rows.from_columns(
        prompt=[p for p, _, _ in names],
        session=[s for _, s, _ in names],
        trajectory=[t for _, _, t in names],
        prompt_tokens=generator.integers(1, 9, size=len(names)),
        response_tokens=response,
        loss_tokens=[count_loss_tokens(int(n)) for n in response],
    )


def actor_config(**settings: object) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28, entropy_coeff=0.01,
        use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="low_var_kl", **settings,
    )  # fmt: skip


def planned(rows: Rows, *, dp_size: int, mini_batch_size: int, loss_agg: str = "token-mean"):
    """The plan, all rows with their weights as a field, each rank's rows by step, and the settings of the batch."""
    layout = Layout(
        cut="equal-rows", dp_size=dp_size, batch_size=4, mini_batch_size=mini_batch_size, rollout_n=2,
        loss_agg="token-mean" if loss_agg == "token-sum" else loss_agg, loss_norm_tokens=NORM_TOKENS,
    )  # fmt: skip
    plan = make_plan(rows, layout)
    steps = plan.steps("actor")
    fields = make_batch(plan.padded_rows)
    weights = np.zeros(len(fields))
    for step in steps:
        weights[step.row] = step.weight > 0 if loss_agg == "token-sum" else step.weight
    for name in (weighted_losses.ACTOR_WEIGHT, weighted_losses.CRITIC_WEIGHT):
        for row, weight in zip(fields, weights.tolist(), strict=True):
            row[name] = torch.tensor([weight], dtype=torch.float32)
    ranks = [[fields[i] for step in steps for i in step.micro_batch(r, 0)] for r in range(dp_size)]
    num_tokens, num_rows = int(rows.loss_tokens.sum()), int((rows.loss_tokens > 0).sum())
    info = {weighted_losses.TOKEN_SCALE: len(steps) / num_tokens, weighted_losses.ROW_SCALE: len(steps) / num_rows}
    return plan, fields, ranks, info


def reference_gradient(model: Model, rows: list[Row], weights: list[float], of_row) -> Tensor:
    """The sum over rows of verl's mean loss of the row x its loss tokens x its weight."""
    model.zero_grad()
    for row, weight in zip(rows, weights, strict=True):
        if weight:
            output = {
                name: value.values()[-len(row["responses"]) - 1 : -1].unsqueeze(0)
                for name, value in model(torch.nested.as_nested_tensor([row["input_ids"]], layout=torch.jagged)).items()
            }
            (of_row(output, row) * int(row["response_mask"].sum()) * weight).backward()
    return model.gradient()


def actor_row_loss(config: ActorConfig):
    def of_row(output: dict[str, Tensor], row: Row) -> Tensor:
        one = {name: value.unsqueeze(0) for name, value in row.items()}
        alone = replace(config, loss_agg_mode="token-mean", global_batch_info={})
        mode = config.policy_loss.get("loss_mode", "vanilla")
        loss, _ = core.get_policy_loss_fn(mode)(
            one["old_log_probs"], output["log_probs"], one["advantages"], one["response_mask"], "token-mean", alone
        )
        loss = loss - config.entropy_coeff * core.agg_loss(output["entropy"], one["response_mask"], "token-mean")
        kl = core.kl_penalty(output["log_probs"], one["ref_log_prob"], config.kl_loss_type)
        return loss + config.kl_loss_coef * core.agg_loss(kl, one["response_mask"], "token-mean")

    return of_row


def error(gradient: Tensor, right: Tensor) -> float:
    return float((gradient - right).norm() / right.norm())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dp_size", "max_tokens"), [(1, 60), (2, 27), (4, 200)])
def test_the_actors_gradient_is_that_of_the_rows_one_by_one(mode, dp_size, max_tokens):
    """verl 0.9.1: gradient off by 0.375 with 20 real and 12 padding rows in sequence-mean modes."""
    rows = make_rows()
    plan, fields, ranks, info = planned(rows, dp_size=dp_size, mini_batch_size=2, loss_agg=mode)
    model, config = Model(), actor_config()
    gradients, _ = update(
        model,
        ranks,
        partial(weighted_losses.weighted_policy_loss, config),
        num_mini_batch=2,
        info=info,
        max_tokens=max_tokens,
    )
    assert len(gradients) == 2
    for gradient, step in zip(gradients, plan.steps("actor"), strict=True):
        weights = [float(fields[i][weighted_losses.ACTOR_WEIGHT]) for i in step.row]
        right = reference_gradient(model, [fields[i] for i in step.row], weights, actor_row_loss(config))
        assert error(gradient, right) < 1e-7


@pytest.mark.parametrize("loss_mode", ["dppo_tv", "dppo_kl", "gspo", "gpg", "dro", "cispo", "sapo"])
def test_every_policy_loss_of_verl_uses_the_weights(loss_mode):
    rows = make_rows()
    plan, fields, ranks, info = planned(rows, dp_size=2, mini_batch_size=2, loss_agg="session-mean")
    model, config = Model(), actor_config(policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.1))
    gradients, _ = update(
        model, ranks, partial(weighted_losses.weighted_policy_loss, config), num_mini_batch=2, info=info
    )
    for gradient, step in zip(gradients, plan.steps("actor"), strict=True):
        weights = [float(fields[i][weighted_losses.ACTOR_WEIGHT]) for i in step.row]
        right = reference_gradient(model, [fields[i] for i in step.row], weights, actor_row_loss(config))
        assert error(gradient, right) < 1e-7


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm", "session-mean"])
def test_the_critics_gradient_is_that_of_the_rows_one_by_one(mode):
    """verl 0.9.1: gradient off by 0.375 with 20 real and 12 padding rows in sequence-mean modes."""
    plan, fields, ranks, info = planned(make_rows(), dp_size=4, mini_batch_size=2, loss_agg=mode)
    config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, cliprange_value=0.5)
    model = Model()
    gradients, metrics = update(
        model, ranks, partial(weighted_losses.weighted_value_loss, config), num_mini_batch=2, info=info
    )

    def of_row(output: dict[str, Tensor], row: Row) -> Tensor:
        arguments = (output["values"], *(row[name].unsqueeze(0) for name in ("returns", "values", "response_mask")))
        return core.compute_value_loss(*arguments, 0.5)[0]

    for gradient, step in zip(gradients, plan.steps("actor"), strict=True):
        weights = [float(fields[i][weighted_losses.CRITIC_WEIGHT]) for i in step.row]
        right = reference_gradient(model, [fields[i] for i in step.row], weights, of_row)
        assert error(gradient, right) < 1e-7
    values = [
        model.values[row["input_ids"]][len(row["prompts"]) - 1 : -1][row["response_mask"].bool()] for row in fields
    ]
    assert metrics["critic/vpred_mean"] == pytest.approx(float(torch.cat(values).mean()), rel=1e-12)


@pytest.mark.parametrize("mini_batch_size", [4, 1])
def test_metrics_of_the_loss_are_means_over_real_tokens(mini_batch_size):
    """verl 0.9.1 averages over micro-batches regardless of their size: pg_clipfrac 0.223 -> 0.149."""
    plan, fields, ranks, info = planned(make_rows(), dp_size=4, mini_batch_size=mini_batch_size)
    model, config = Model(), actor_config()
    steps = len(plan.steps("actor"))
    loss = partial(weighted_losses.weighted_policy_loss, config)
    _, metrics = update(model, ranks, loss, num_mini_batch=steps, info=info, max_tokens=27)
    clipped, kl = [], []
    for row in fields:
        made = model(torch.nested.as_nested_tensor([row["input_ids"]], layout=torch.jagged))["log_probs"].values()
        mask = row["response_mask"].bool()
        log_ratio = (made[len(row["prompts"]) - 1 : -1] - row["old_log_probs"])[mask].detach()
        advantages = row["advantages"][mask]
        clipped.append(-advantages * log_ratio.exp().clamp(0.8, 1.28) > -advantages * log_ratio.exp())
        kl.append(-log_ratio)
    assert metrics["actor/ppo_kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-7)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(torch.cat(clipped).double().mean()), rel=1e-6)


def test_rollout_correction_weights_stay_in_the_loss():
    _, fields, ranks, info = planned(make_rows(), dp_size=2, mini_batch_size=4, loss_agg="seq-mean-token-mean")
    for row in fields:
        row["rollout_is_weights"] = 0.5 + row["values"].abs()
    model, config = Model(), actor_config()
    loss = partial(weighted_losses.weighted_policy_loss, config)
    (gradient,), _ = update(model, ranks, loss, num_mini_batch=1, info=info)
    corrected = [{**row, "advantages": row["advantages"] * row["rollout_is_weights"]} for row in fields]
    weights = [float(row[weighted_losses.ACTOR_WEIGHT]) for row in fields]
    assert error(gradient, reference_gradient(model, corrected, weights, actor_row_loss(config))) < 1e-7


def test_bypass_mode_is_weighted_through_the_advantage():
    """Its rollout correction is verl's own; without weights and rejection it is the clipped objective."""
    correction = {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": None, "rollout_rs": None}
    policy_loss = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)
    _, fields, ranks, info = planned(make_rows(), dp_size=2, mini_batch_size=4, loss_agg="session-mean")
    model = Model()
    loss = partial(weighted_losses.weighted_policy_loss, actor_config(policy_loss=policy_loss))
    (gradient,), metrics = update(model, ranks, loss, num_mini_batch=1, info=info)
    weights = [float(row[weighted_losses.ACTOR_WEIGHT]) for row in fields]
    right = reference_gradient(model, fields, weights, actor_row_loss(actor_config()))
    assert error(gradient, right) < 1e-7
    old = [-row["old_log_probs"][row["response_mask"].bool()].mean() for row in fields if row["response_mask"].any()]
    assert metrics["rollout_corr/rollout_log_ppl"] == pytest.approx(float(torch.stack(old).mean()), rel=1e-6)


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov", "geo_mean", "custom"])
def test_a_policy_loss_that_cannot_be_weighted_is_refused_by_name(loss_mode):
    with pytest.raises(ConfigError, match=f"loss_mode '?\"?{loss_mode}"):
        weighted_losses.check_policy_loss(loss_mode)
