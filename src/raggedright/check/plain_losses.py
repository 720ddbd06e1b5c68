"""The plain reference: every row alone through the model, and each loss and mean written out as its name says.

It shares no code with the plan, the collation, the weights or the losses that it is compared with: no packing, no
padding, no weights fixed beforehand. It is slow and simple on purpose. Only the hooks that replay experts are shared.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raggedright.check.cases import Case
from raggedright.rows import Rows
from raggedright.tensors.images import placeholder_ids
from raggedright.tensors.routing import Routers, find_routers

TokenFields = dict[str, object]

CLIP_LOW, CLIP_HIGH, VALUE_CLIP, KL_COEF, ENTROPY_COEF, NORM_TOKENS = 0.2, 0.28, 0.2, 0.1, 0.05, 16
DUAL_CLIP = 3.0
BALANCE_COEF = 0.5


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Rows of a made-up batch, and the fields of each row."""

    rows: Rows
    fields: list[TokenFields]


def row_outputs(model: nn.Module, rows: Rows, i: int, row: TokenFields) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the row's response tokens; for a critic, values instead of log-probs."""
    media = row.get("multi_modal_inputs") or {}
    assert isinstance(media, dict)
    assert isinstance(row["input_ids"], Tensor)
    ids = row["input_ids"][None]
    positions = row.get("position_ids")
    if isinstance(positions, Tensor):
        media = {**media, "position_ids": positions[:, None]}
    logits = model(input_ids=ids, use_cache=False, **media).logits[0]
    response = int(rows.response_tokens[i])
    logits = logits[len(logits) - response - 1 : len(logits) - 1]
    if logits.shape[-1] == 1:
        return logits[:, 0], logits[:, 0].detach()
    text = [token for token in range(logits.shape[-1]) if token not in placeholder_ids(model.config)]
    log_probs = logits - logits[:, text].logsumexp(-1, keepdim=True)
    labels = ids[0, len(ids[0]) - response :]
    return log_probs[torch.arange(response), labels], -(log_probs[:, text].exp() * log_probs[:, text]).sum(-1)


def reference_step(
    model: nn.Module, made_up: MadeUp, positions: Sequence[int], case: Case
) -> tuple[Tensor, dict[str, float]]:
    """The objective of a step over these rows, and its metrics."""
    losses: dict[str, dict[int, Tensor]] = {}
    metrics: dict[str, list[Tensor]] = {}
    routed: list[tuple[list[Tensor], object]] = []
    routers = None if case.experts == "natural" else find_routers(model)
    for i in positions:
        row = made_up.fields[i]
        mask = row["response_mask"]
        assert isinstance(mask, Tensor)
        if mask.sum() == 0 and case.experts != "balanced":
            continue
        with _replaying(routers, row) as logits:
            outputs, entropy = row_outputs(model, made_up.rows, i, row)
        routed.append((logits, row.get("routed_experts")))
        if mask.sum() == 0:
            continue
        tokens = _loss_tokens(row, mask)
        row_losses, row_metrics = _row_losses(outputs[mask.bool()], entropy[mask.bool()], tokens, case)
        for name, loss in row_losses.items():
            losses.setdefault(name, {})[i] = loss
        for name, value in row_metrics.items():
            metrics.setdefault(name, []).append(value.detach())
    sums = {name: _aggregate(by_row, made_up.rows, case.loss_agg) for name, by_row in losses.items()}
    objective = sums["objective"]
    if routers and case.experts == "balanced":
        balance = torch.stack(
            [_balance(routed, layer, routers.num_experts) for layer in range(routers.num_layers)]
        ).mean()
        objective = objective + BALANCE_COEF * balance
        sums["actor/balance_loss"] = balance
    return objective, {
        **{name: value.item() for name, value in {**sums, "objective": objective}.items()},
        **{name: torch.cat(values).mean().item() for name, values in metrics.items()},
    }


def _replaying(routers: Routers | None, row: TokenFields) -> AbstractContextManager[list[Tensor]]:
    experts = row.get("routed_experts")
    if routers is None or not isinstance(experts, Tensor):
        return nullcontext([])
    return routers.replaying(experts.long())


def _balance(routed: Sequence[tuple[list[Tensor], object]], layer: int, num_experts: int) -> Tensor:
    """Number of experts x the sum over experts of (share of the choices x mean probability), over all routed tokens."""
    logits, choices = [], []
    for logits_by_layer, experts in routed:
        if isinstance(experts, Tensor):
            has_record = experts[:, layer, 0] >= 0
            logits.append(logits_by_layer[layer][has_record])
            choices.append(experts[has_record, layer].long().flatten())
    if not choices:
        return torch.zeros((), dtype=torch.float64)  # nothing was recorded
    chosen = torch.cat(choices)
    share = torch.bincount(chosen, minlength=num_experts).double() / len(chosen)
    return num_experts * (share * torch.cat(logits).softmax(-1).mean(0)).sum()


def reference_batch(made_up: MadeUp) -> dict[str, float]:
    """Metrics of the whole batch: means over rows or loss tokens."""
    values: dict[str, list[Tensor]] = {}
    for row in made_up.fields:
        mask = row["response_mask"]
        assert isinstance(mask, Tensor)
        if mask.sum() > 0:
            tokens = _loss_tokens(row, mask)
            for name, value in _off_policy(tokens["old_log_probs"].double(), tokens["rollout_log_probs"].double()):
                values.setdefault(f"rollout_corr/{name}", []).append(value.reshape(-1))
    rows = made_up.rows
    sessions = Counter(zip(rows.prompt.tolist(), rows.session.tolist(), strict=True))
    counts = {
        "prompt_length": rows.prompt_tokens.tolist(),
        "response_length": rows.response_tokens.tolist(),
        "rows_per_session": list(sessions.values()),
    }
    metrics = {name: torch.cat(parts).mean().item() for name, parts in values.items()}
    metrics["rows/no_loss_ratio"] = sum(tokens == 0 for tokens in rows.loss_tokens.tolist()) / len(rows)
    for name, each in counts.items():
        metrics |= {f"{name}/mean": sum(each) / len(each), f"{name}/max": max(each), f"{name}/min": min(each)}
    return metrics


def _off_policy(old: Tensor, rollout: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Metrics of one row's loss tokens: per token, then per row."""
    ratio = torch.exp(old - rollout)
    yield "kl", rollout - old
    yield "k3_kl", ratio - 1 - (old - rollout)
    yield "chi2_token", ratio**2 - 1
    yield "chi2_seq", ratio.prod() ** 2 - 1
    yield "training_log_ppl", -old.mean()
    yield "training_ppl", torch.exp(-old.mean())
    yield "rollout_log_ppl", -rollout.mean()
    yield "rollout_ppl", torch.exp(-rollout.mean())
    yield "log_ppl_diff", rollout.mean() - old.mean()
    yield "log_ppl_abs_diff", (rollout.mean() - old.mean()).abs()
    yield "ppl_ratio", torch.exp(-old.mean()) / torch.exp(-rollout.mean())


def _loss_tokens(row: TokenFields, mask: Tensor) -> dict[str, Tensor]:
    """The row's per-response-token fields, at its loss tokens."""
    fields = {name: value for name, value in row.items() if isinstance(value, Tensor) and value.shape == mask.shape}
    return {name: value[mask.bool()] for name, value in fields.items()}


def _row_losses(
    outputs: Tensor, entropy: Tensor, row: dict[str, Tensor], case: Case
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The objective and its parts for each loss token of a row, and values of metrics that are means over tokens."""
    if case.critic:
        old, returns = row["values"], row["returns"]
        clipped = torch.maximum(torch.minimum(outputs, old + VALUE_CLIP), old - VALUE_CLIP)
        plain, bounded = (outputs - returns) ** 2, (clipped - returns) ** 2
        loss = torch.maximum(plain, bounded) / 2
        metrics = {"critic/vf_clipfrac": (bounded > plain).double(), "critic/vpred_mean": outputs}
        return {"objective": loss, "critic/vf_loss": loss}, metrics
    policy, metrics = _policy(outputs, row["old_log_probs"], row["advantages"], case)
    metrics["actor/entropy"] = entropy
    losses = {"objective": policy, "actor/pg_loss": policy, "actor/entropy_loss": entropy}
    if case.kl != "none":
        losses["actor/kl_loss"] = plain_kl(outputs - row["ref_log_probs"], case.kl)
        losses["objective"] = losses["objective"] + KL_COEF * losses["actor/kl_loss"]
    if case.entropy:
        losses["objective"] = losses["objective"] - ENTROPY_COEF * entropy
    return losses, metrics


def _policy(log_probs: Tensor, old: Tensor, advantage: Tensor, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss of each token of a row, with verl's bounds on log-ratios."""
    log_ratio = log_probs - old
    if case.loss == "reinforce":
        return -advantage * log_probs, {"actor/ppo_kl": -log_ratio}
    if case.loss == "ppo":
        log_ratio = _bound(log_ratio, -20, 20)
        ratio = log_ratio.exp()
    elif case.loss == "gspo":
        ratio = _bound(log_probs - log_probs.detach() + log_ratio.mean().detach(), -float("inf"), 10).exp()
    else:
        raise KeyError(case.loss)
    plain, bounded = -advantage * ratio, -advantage * _bound(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    clipped = torch.where(bounded > plain, bounded, plain)
    too_much = (advantage < 0) & (clipped > -advantage * DUAL_CLIP) & case.dual_clip
    metrics = {
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac": (bounded > plain).double(),
        "actor/pg_clipfrac_lower": too_much.double(),
    }
    return torch.where(too_much, -advantage * DUAL_CLIP, clipped), metrics


def plain_kl(difference: Tensor, kind: str) -> Tensor:
    """The KL estimate of each token; k3 is at most 10."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        near = _bound(difference, -20, 20)
        return _bound(torch.exp(-near) - 1 + near, -10, 10)
    raise KeyError(kind)


def _bound(values: Tensor, low: float, high: float) -> Tensor:
    """The values clamped to two bounds; a value at or beyond a bound has no gradient."""
    is_inside = (values > low) & (values < high)
    return torch.where(is_inside, values, values.detach().clip(low, high))


def _aggregate(losses: dict[int, Tensor], rows: Rows, loss_agg: str) -> Tensor:
    """The mean of the mode, over rows that have loss tokens."""
    if loss_agg in ("session-mean", "prompt-mean"):
        group_of = rows.session_index if loss_agg == "session-mean" else rows.prompt_index
        groups: dict[int, list[Tensor]] = {}
        for i, loss in losses.items():
            groups.setdefault(int(group_of[i]), []).append(loss)
        return torch.stack([torch.cat(group).mean() for group in groups.values()]).mean()
    if loss_agg == "token-mean":
        return torch.cat(list(losses.values())).mean()
    if loss_agg == "seq-mean-token-mean":
        return torch.stack([loss.mean() for loss in losses.values()]).mean()
    norm = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": NORM_TOKENS}[loss_agg]
    return torch.stack([loss.sum() for loss in losses.values()]).mean() / norm
