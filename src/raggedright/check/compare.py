"""Run a case as planned and row by row, and compare the gradient of every step and every metric.

Ranks run one after another here and their gradients are added, as by a summed all-reduce. The error is the norm of the
difference relative to the norm of the reference, over all parameters (absolute if the reference is zero): the largest
of all steps.

Nothing is exact in bfloat16, so there the error is measured and compared with the error of rounding (`run_half`).
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from raggedright.check.cases import CUTS, Able, Case, Line, short_name
from raggedright.check.check_inputs import (
    ADAPTED,
    DTYPES,
    SHORT,
    Lengths,
    find_lengths,
    has_critic,
    load_model,
    make_up,
)
from raggedright.check.plain_losses import (
    BALANCE_COEF,
    CLIP_HIGH,
    CLIP_LOW,
    DUAL_CLIP,
    ENTROPY_COEF,
    KL_COEF,
    NORM_TOKENS,
    VALUE_CLIP,
    MadeUp,
    reference_batch,
    reference_step,
)
from raggedright.errors import ConfigError
from raggedright.metrics import row_metrics
from raggedright.plan.cut import Step
from raggedright.plan.planner import Role, make_plan
from raggedright.rollout.local_model import LocalModel
from raggedright.tensors.collate import Collator, MicroBatch
from raggedright.tensors.forward import check_tree, forward_log_probs, forward_values
from raggedright.tensors.images import has_vision, image_filler
from raggedright.tensors.losses import Sums, entropy_loss, kl_loss, off_policy_metrics, policy_loss, value_loss
from raggedright.tensors.routing import balance_loss, count_experts, find_routers, routings_of
from raggedright.tensors.row_independence import check_packs, rope_limits
from raggedright.tensors.row_schema import infer_schema
from raggedright.tensors.tensor_batch import TensorBatch
from raggedright.train.update import add_metrics

Gradient = dict[str, Tensor]

ACTOR_FIELDS = ("old_log_probs", "ref_log_probs", "advantages")
CRITIC_FIELDS = ("values", "returns")
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
HALF_TOLERANCE = 2.0  # times the error of rounding


@dataclass(frozen=True, slots=True)
class Result:
    """The errors of a case, compared with its rows run one by one."""

    case: Case
    padding_rows: int
    rel_error: float
    metric_drift: float

    @property
    def passed(self) -> bool:
        """Whether both are within the tolerance of the dtype."""
        return max(self.rel_error, self.metric_drift) <= self.tolerance

    @property
    def tolerance(self) -> float:
        """The tolerance of the dtype."""
        return TOLERANCE[self.case.dtype]


def run_case(case: Case, longest: int | None = None) -> Result:
    """Compare every step of the case's plan with the same rows run one by one; rows have at most `longest` tokens."""
    plain, made_up = load_case(case, longest)
    recomputes = case.passes == "recomputed"
    model = _load(case.model, case.dtype, case.critic, recompute=True) if recomputes else plain
    batch = batch_of(case, made_up, model)
    errors, drifts = [0.0], [0.0]
    for step in batch.plan.steps(role_of(case)):
        if step.skipped:
            continue
        metrics: dict[str, Tensor] = {}
        for dp_rank in range(case.dp):
            add_metrics(metrics, run_rank(model, batch, step, dp_rank, case))
        gradient = take_gradient(model)
        expected, expected_metrics = run_reference(plain, made_up, batch, step, case)
        errors.append(relative_error(gradient, expected))
        drifts.append(largest_drift(metrics, expected_metrics))
    drifts.append(largest_drift(batch_metrics(batch), reference_batch(made_up)))
    return Result(case, batch.plan.num_padding_rows, max(errors), max(drifts))


def role_of(case: Case) -> Role:
    """The role whose steps are compared."""
    return "critic" if case.critic else "actor"


@lru_cache(maxsize=16)
def _load(model: str, dtype: str, critic: bool, recompute: bool = False) -> nn.Module:
    return load_model(model, dtype, critic=critic, casts=dtype != "float64", recompute=recompute)


@lru_cache(maxsize=32)
def _made_up(model: str, dtype: str, critic: bool, long: bool, far: bool, longest: int | None) -> MadeUp:
    loaded, field_dtype = _load(model, dtype, critic), torch.promote_types(DTYPES[dtype], torch.float32)
    if not long:
        return make_up(loaded, field_dtype, far=far)
    row_tokens = _lengths_of(loaded, longest).row_tokens
    return make_up(loaded, field_dtype, far=far, num_prompts=3, row_tokens=row_tokens)


def _lengths_of(model: nn.Module, longest: int | None) -> Lengths:
    config = model.config
    assert isinstance(config, PretrainedConfig)
    return find_lengths(config, longest=longest)


def load_case(case: Case, longest: int | None = None) -> tuple[nn.Module, MadeUp]:
    """The model and the batch of a case, which are created once for all cases that share them."""
    kind = (case.model, case.dtype, case.critic)
    return _load(*kind), _made_up(*kind, case.rows == "long", case.ratios == "far", longest)


def batch_of(case: Case, made_up: MadeUp, model: nn.Module) -> TensorBatch:
    """The made-up rows in the case's order, planned and ready to run."""
    order = np.arange(len(made_up.rows))
    if case.order:
        order = np.random.default_rng(case.order).permutation(order)
    cut, longest = CUTS[case.cut], int(made_up.rows.tokens.max())
    if cut.micro_batch_tokens is not None and case.rows == "long":  # so that the longest row is not alone
        cut = replace(cut, micro_batch_tokens=longest + cut.micro_batch_tokens)
    layout = replace(
        cut,
        dp_size=case.dp,
        align=case.align,
        collate=case.collate,
        loss_agg=case.loss_agg,
        loss_norm_tokens=NORM_TOKENS,
    )
    rows, fields = made_up.rows.take(order), [made_up.fields[i] for i in order]
    plan = make_plan(rows, layout)
    vision = has_vision(model.config)
    collator = Collator(
        how=layout.collate,
        token_id=0,
        min_row_tokens=layout.min_row_tokens,
        mrope=vision,
        even_tokens=64 if case.order else 4_096,  # small trees, or one
        image_filler=image_filler(model.config) if vision else None,
    )
    return TensorBatch.of(plan, fields, infer_schema(rows, fields), collator)


def run_rank(model: nn.Module, batch: TensorBatch, step: Step, dp_rank: int, case: Case) -> dict[str, Tensor]:
    """Add one rank's share of a step's gradient to the model's, and return its share of the metrics."""
    totals: dict[str, Tensor] = {}
    names = CRITIC_FIELDS if case.critic else ACTOR_FIELDS
    routers = None if case.experts == "natural" else find_routers(model)
    counts = None
    if routers and case.experts == "balanced":  # counted over all ranks, as by an all-reduce
        routings = (experts for rank in range(step.dp_size) for experts in routings_of(batch, step, rank))
        counts = count_experts(routings, routers)
    for _, micro in batch.micro_batches(step, dp_rank, names):
        with routers.replaying(micro.routing) if routers else nullcontext(()) as logits:
            sums = _critic_loss(model, micro) if case.critic else _actor_loss(model, micro, case)
            if routers and counts is not None:
                balance = balance_loss(logits, micro, counts, routers)
                sums = Sums(sums.loss + BALANCE_COEF * balance.loss, {**sums.metrics, **balance.metrics})
            sums.loss.backward()
        add_metrics(totals, {**sums.metrics, "objective": sums.loss.detach()})
    return totals


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What can be checked of an actor or a critic, and what cannot."""

    model: str
    lengths: Lengths
    critic: bool
    experts: bool
    trees: bool
    recompute: bool
    parameters: int
    rope_limited: bool  # a run limits its rows, because frequencies follow the longest row of a micro-batch
    notes: tuple[str, ...]


def facts_of(name: str, dtype: str, *, only_critic: bool = False, longest: int | None = None) -> ModelFacts:
    """Load a model and find out what can be checked."""
    model = _load(name, dtype, only_critic)
    lengths = _lengths_of(model, longest)
    experts, notes = False, []
    try:
        experts = not only_critic and find_routers(model) is not None
    except ConfigError as error:
        notes.append(f"experts are routed naturally: {str(error).split(': ', 1)[-1]}")
    trees = False
    if has_vision(model.config) or experts:
        notes.append("tree is not possible with images or replayed experts")
    elif not only_critic:
        try:
            check_tree(model, max(lengths.row_tokens, default=SHORT))
            check_packs(model, Collator(how="tree", token_id=0), row_tokens=SHORT, micro_batch_tokens=4 * SHORT)
            trees = True
        except ConfigError as error:
            notes.append(f"tree is not possible: {str(error).rpartition(';')[0]}")
    if model.config._attn_implementation != "sdpa":  # pyright: ignore
        notes.append(f"it has no sdpa attention: set model.attention = '{model.config._attn_implementation}'")  # pyright: ignore
    critic = only_critic or has_critic(name)
    if not critic:
        cause = (
            "LoRA adapts the actor alone" if name in ADAPTED else "transformers has no token classifier of its family"
        )
        notes.append(f"no critic: {cause}")
    if not only_critic:
        try:
            LocalModel(model, pad_token_id=0)
        except ConfigError as error:
            notes.append(f"the verdict is about training alone: {str(error).rpartition(';')[0]}")
    recompute = any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rope_limited = bool(rope_limits(model))
    return ModelFacts(name, lengths, critic, experts, trees, recompute, parameters, rope_limited, tuple(notes))


def able(facts: Iterable[ModelFacts], only_critic: Sequence[str] = ()) -> Able:
    """The cases that make sense for these models."""
    facts = [*facts]

    def names(field: str) -> list[str]:
        return [each.model for each in facts if getattr(each, field)]

    return Able(names("critic"), only_critic, names("experts"), names("trees"), names("recompute"))


def batch_metrics(batch: TensorBatch) -> dict[str, float]:
    """Metrics of the whole batch from its forward pass: off-policy metrics of tokens and rows, and lengths of rows."""
    (step,) = batch.plan.steps("forward")
    counts = (batch.rows.loss_tokens > 0) & ~batch.rows.is_padding
    row_weights = torch.from_numpy(counts / max(counts.sum(), 1))
    totals: dict[str, Tensor] = {}
    for dp_rank in range(step.dp_size):
        for position, micro in batch.micro_batches(step, dp_rank, ("old_log_probs", "rollout_log_probs")):
            old, rollout = micro.fields["old_log_probs"], micro.fields["rollout_log_probs"]
            weights = row_weights[torch.from_numpy(position)]
            add_metrics(totals, off_policy_metrics(old, rollout, micro.weights, weights))
    return {**{name: float(value) for name, value in totals.items()}, **row_metrics(batch.rows)}


def _critic_loss(model: nn.Module, micro: MicroBatch) -> Sums:
    fields = micro.fields
    return value_loss(forward_values(model, micro), fields["values"], fields["returns"], micro.weights, clip=VALUE_CLIP)


def _actor_loss(model: nn.Module, micro: MicroBatch, case: Case) -> Sums:
    assert case.loss != "value"
    chunk_tokens = 7 if case.order else None  # logits in many chunks, or in one
    log_probs, entropy = forward_log_probs(model, micro, chunk_tokens=chunk_tokens)
    old, advantages, weights = micro.fields["old_log_probs"], micro.fields["advantages"], micro.weights
    clips = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "dual_clip": DUAL_CLIP if case.dual_clip else None}
    policy = policy_loss(log_probs, old, advantages, weights, kind=case.loss, **clips)
    bonus = entropy_loss(entropy, weights)
    loss, metrics = policy.loss, {**policy.metrics, **bonus.metrics}
    if case.entropy:
        loss = loss - ENTROPY_COEF * bonus.loss
    if case.kl != "none":
        penalty = kl_loss(log_probs, micro.fields["ref_log_probs"], weights, kind=case.kl)
        loss, metrics = loss + KL_COEF * penalty.loss, {**metrics, **penalty.metrics}
    return Sums(loss, metrics)


def run_reference(
    model: nn.Module, made_up: MadeUp, batch: TensorBatch, step: Step, case: Case
) -> tuple[Gradient, dict[str, float]]:
    """Gradient and metrics of the step's real rows, run one by one."""
    keys = {key: i for i, key in enumerate(made_up.rows.key)}
    real = step.row[step.row < len(batch.plan.rows)]
    objective, metrics = reference_step(model, made_up, [keys[key] for key in batch.plan.rows.key[real]], case)
    objective.backward()
    return take_gradient(model), metrics


def take_gradient(model: nn.Module) -> Gradient:
    """The gradient of every parameter that has one; the model's gradients are cleared."""
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradient


def relative_error(gradient: Gradient, expected: Gradient) -> float:
    """Norm of the difference relative to that of the expected gradient; a missing gradient counts as zero."""
    difference = total = 0.0
    zero = torch.zeros((), dtype=torch.float64)
    for name in sorted(gradient.keys() | expected.keys()):
        actual, wanted = gradient.get(name, zero).double(), expected.get(name, zero).double()
        difference += float((actual - wanted).square().sum())
        total += float(wanted.square().sum())
    return (difference / total) ** 0.5 if total else difference**0.5


def largest_drift(metrics: Mapping[str, Tensor | float], expected: Mapping[str, float]) -> float:
    """The largest difference of a metric, relative to its expected value if that is above one."""
    unmatched = metrics.keys() ^ expected.keys()
    assert not unmatched, f"{', '.join(sorted(unmatched))}: only in the plan, or only in check/plain_losses.py"
    return max(abs(float(metrics[name]) - value) / max(1.0, abs(value)) for name, value in expected.items())


def run_half(model: str, collates: Sequence[str], *, critic: bool = False) -> list[Line]:
    """Measure how far bfloat16 gradients depend on the cut; one line per collation.

    The error is that of a plan relative to the same rows run one by one, both in bfloat16. The tolerance is a multiple
    of the error of rounding: that of the rows run one by one in bfloat16 relative to the same weights in float32. A cut
    only changes the order of rounding, so it must not be much worse.
    """
    references: dict[tuple[str, ...], tuple[Gradient, Gradient]] = {}  # by the rows of a step
    lines = []
    for collate in collates:
        errors, roundings = [], []
        for cut in ("one", "tokens"):
            loss = "value" if critic else "ppo"
            case = Case(model=model, dtype="bfloat16", collate=collate, cut=cut, loss=loss)  # pyright: ignore[reportArgumentType]
            for error, rounding in _half_errors(case, references):
                errors.append(error)
                roundings.append(rounding)
        subject = f"{short_name(model)}, {collate}"
        lines.append(Line.of("bfloat16", subject, [max(errors)], HALF_TOLERANCE * max(roundings)))
    return lines


def _half_errors(
    case: Case, references: dict[tuple[str, ...], tuple[Gradient, Gradient]]
) -> Iterator[tuple[float, float]]:
    """The errors of each step, of the cut and of the rounding."""
    model, made_up = load_case(case)
    batch, precise_model = batch_of(case, made_up, model), copy.deepcopy(model).to(torch.float32)
    for step in batch.plan.steps(role_of(case)):
        if step.skipped:
            continue
        for dp_rank in range(case.dp):
            run_rank(model, batch, step, dp_rank, case)
        planned = take_gradient(model)
        keys = tuple(sorted(batch.rows.key[step.row].tolist()))
        if keys not in references:
            in_half, _ = run_reference(model, made_up, batch, step, case)
            precise, _ = run_reference(precise_model, _in_float32(made_up), batch, step, case)
            references[keys] = in_half, precise
        in_half, precise = references[keys]
        yield relative_error(planned, in_half), relative_error(in_half, precise)


def _in_float32(made_up: MadeUp) -> MadeUp:
    """The same rows for a float32 model: pixels have the dtype of the model."""
    fields = []
    for row in made_up.fields:
        media = row.get("multi_modal_inputs")
        if isinstance(media, dict):
            raised = {name: x.float() if x.is_floating_point() else x for name, x in media.items()}
            row = {**row, "multi_modal_inputs": raised}
        fields.append(row)
    return MadeUp(made_up.rows, fields)
