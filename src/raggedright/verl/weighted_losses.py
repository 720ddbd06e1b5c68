# pyright: reportMissingImports=false
"""The losses that verl's workers run: verl's own policy losses, with weights that were fixed before anything was cut.

They are passed to the workers with verl's `set_loss_fn` and called like its own: once per micro-batch, and the results
are averaged over ranks, hence the factor dp_size. A row's weight is a field of the row, so any cut adds up to the same
number. Rows without a loss token, such as padding rows, are removed before verl's function is called, so they are in no
mean and in no metric. Token metrics are sums weighted with (steps / loss tokens of the round), so that verl's mean over
steps is the exact mean over tokens; the same holds for metrics per row.

Note: a micro-batch of padding rows only still returns every metric, with zero counts, because verl stacks the metrics
of all ranks and requires equal numbers of them.
"""

import math

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from raggedright.errors import ConfigError
from raggedright.tensors.losses import TokenWeights, value_loss

ACTOR_WEIGHT = "raggedright_actor_weight"
CRITIC_WEIGHT = "raggedright_critic_weight"
TOKEN_SCALE = "raggedright_token_scale"  # optimizer steps / loss tokens of the round
ROW_SCALE = "raggedright_row_scale"  # optimizer steps / rows with loss tokens of the round

WEIGHT_BY_CORRECTION = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "dro", "cispo", "sapo")
"""Policy losses that multiply each token's loss with the rollout-correction weight, which then carries ours."""
WEIGHT_BY_ADVANTAGE = ("bypass_mode",)
"""Policy losses that are proportional to the advantage and set the correction weight themselves."""
REFUSED = {
    "clip_cov": "picks tokens by covariances over a micro-batch",
    "kl_cov": "picks tokens by covariances over a micro-batch",
    "geo_mean": "averages over the rows of a micro-batch",
}
_PER_ROW = {
    f"rollout_corr/{name}"
    for name in (
        "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff",
        "ppl_ratio", "chi2_seq",
    )
}  # fmt: skip


def check_policy_loss(mode: str) -> None:
    """Raise unless weights can be passed into this policy loss."""
    if mode in (*WEIGHT_BY_CORRECTION, *WEIGHT_BY_ADVANTAGE):
        return
    reason = REFUSED.get(mode, "is not one of verl's own, so it is unknown how it averages")
    raise ConfigError(
        f"actor.policy_loss.loss_mode {mode!r} {reason}, so weights that are fixed beforehand cannot be used; "
        "set trainer.v1.raggedright.losses='verl' to run it as verl does, with padding in its denominators"
    )


def weighted_policy_loss(config, model_output, data, dp_group=None) -> tuple[Tensor, dict[str, object]]:
    """verl's `ppo_loss` with weights: policy loss, entropy and KL as sums of weight x loss over real tokens."""
    del dp_group  # verl passes it to every loss
    dp_size = data["dp_size"]
    scales = {"token": data[TOKEN_SCALE] * dp_size, "row": data[ROW_SCALE] * dp_size}
    names = ["response_mask", "old_log_probs", "advantages", ACTOR_WEIGHT]
    names += [name for name in ("rollout_is_weights", "ref_log_prob") if name in data]
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    entropy = model_output.get("entropy", None)
    entropy = no_padding_2_padding(entropy, data) if entropy is not None else None
    padded = data.select(*names).to_padded_tensor()
    mask = padded["response_mask"].bool() & (padded[ACTOR_WEIGHT] > 0)
    keep = mask.any(dim=-1)
    counts = {"token": int(mask.sum()), "row": int(keep.sum())}
    if not counts["row"]:
        keep = torch.zeros_like(keep)
        keep[0] = True
    mask = mask[keep]

    def neutral(values: Tensor) -> Tensor:
        return torch.where(mask, values[keep], 0.0)

    log_prob, weight = neutral(log_prob), neutral(padded[ACTOR_WEIGHT].expand(log_prob.shape))
    pg_loss, pg_metrics = _policy_loss(
        config, log_prob, neutral(padded["old_log_probs"]), neutral(padded["advantages"]), mask, weight,
        neutral(padded["rollout_is_weights"]) if "rollout_is_weights" in padded else None, dp_size,
    )  # fmt: skip
    metrics: dict[str, object] = {name: _metric(name, value, counts, scales) for name, value in pg_metrics.items()}
    metrics["actor/pg_loss"] = _sum(pg_loss)
    loss = pg_loss
    if entropy is not None:
        entropy_loss = (weight * neutral(entropy)).sum() * dp_size
        metrics["actor/entropy_loss"] = _sum(entropy_loss)
        loss = loss - config.entropy_coeff * entropy_loss
    if config.use_kl_loss:
        kl = kl_penalty(logprob=log_prob, ref_logprob=neutral(padded["ref_log_prob"]), kl_penalty=config.kl_loss_type)
        kl_loss = (weight * kl).sum() * dp_size
        metrics |= {"kl_loss": _sum(kl_loss), "kl_coef": config.kl_loss_coef}
        loss = loss + config.kl_loss_coef * kl_loss
    return loss, metrics


def weighted_value_loss(config, model_output, data, dp_group=None) -> tuple[Tensor, dict[str, object]]:
    """verl's `value_loss` with weights."""
    del dp_group
    dp_size = data["dp_size"]
    values = no_padding_2_padding(model_output["values"], data)
    padded = data.select("values", "returns", "response_mask", CRITIC_WEIGHT).to_padded_tensor()
    mask = padded["response_mask"].bool() & (padded[CRITIC_WEIGHT] > 0)
    weight = padded[CRITIC_WEIGHT].expand(mask.shape)[mask]
    mean = torch.full_like(weight, data[TOKEN_SCALE], dtype=torch.float64)
    row = mask.nonzero()[:, 0]
    weights = TokenWeights(weight, mean, row, mask.sum(dim=-1), num_rows=len(mask))
    sums = value_loss(
        values[mask], padded["values"][mask], padded["returns"][mask], weights, clip=config.cliprange_value
    )
    return sums.loss * dp_size, {name: _sum(value * dp_size) for name, value in sums.metrics.items()}


def _policy_loss(
    config, log_prob: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weight: Tensor, correction: Tensor | None,
    dp_size: int,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """verl's own function for the configured policy loss, with its divisors set to 1 and our weights."""
    mode = config.policy_loss.get("loss_mode", "vanilla")
    config.global_batch_info.update(dp_size=dp_size, batch_num_tokens=1, global_batch_size=1, loss_scale_factor=None)
    if mode in WEIGHT_BY_ADVANTAGE:
        advantages = advantages * weight
    else:
        correction = weight if correction is None else weight * correction
        if mode == "sapo":  # it divides by a row's tokens in every mode
            correction = correction * mask.sum(dim=-1, keepdim=True)
    return get_policy_loss_fn(mode)(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=correction,
    )


def _metric(name: str, value: float, counts: dict[str, int], scales: dict[str, float]) -> Metric:
    """A micro-batch's share of a metric that verl's loss returned as a mean (or an extreme) over the micro-batch."""
    last = name.rsplit("/", 1)[-1]
    for extreme, kind, neutral in (("max", AggregationType.MAX, -math.inf), ("min", AggregationType.MIN, math.inf)):
        if extreme in last:
            return Metric(value=value if counts["row"] else neutral, aggregation=kind)
    level = "row" if name in _PER_ROW else "token"
    return Metric(value=float(value) * counts[level] * scales[level] if counts[level] else 0.0, aggregation="sum")


def _sum(value: Tensor) -> Metric:
    return Metric(value=value, aggregation=AggregationType.SUM)
