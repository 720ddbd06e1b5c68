"""The cases of a check: every pair of choices at least once, or every combination.

The choices are those that a user makes in a config, and two that follow from the rows: the cut into micro-batches and
the order in which rows arrive.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Literal, get_args

import numpy as np

from raggedright.advantages import KlEstimator, PolicyLoss
from raggedright.plan.layout import Align, Collate, Layout, LossAgg
from raggedright.report.text import terminal_text

_BASE = Layout(dp_size=1, batch_size=6, mini_batch_size=3, critic_mini_batch_size=2, rollout_n=3)
CUTS: Mapping[str, Layout] = {
    "one": replace(_BASE, micro_batch_tokens=4096),
    "tokens": replace(_BASE, micro_batch_tokens=24),
    "rows": replace(_BASE, micro_batch_tokens=None, micro_batch_rows=1),
    "pipeline": replace(_BASE, micro_batch_tokens=40, micro_batch_multiple=3),
    "context": replace(_BASE, micro_batch_tokens=48, min_row_tokens=16),
}
_TRIES, _CANDIDATES = 60, 40  # draws before a pair counts as impossible; draws per case


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `cut` names a rule for micro-batches, `order` a shuffle of the rows.

    - `experts`: routed naturally, or replayed as recorded in the rows; balanced: replayed, with the balance loss.
    - `rows`: long rows exceed the lengths in the model's config (windows, chunks, positions).
    - `ratios`: far ratios are beyond every clamp of the losses.
    - `passes`: recomputed passes run in training mode with activation checkpointing.
    """

    model: str = "qwen3"
    dtype: str = "float64"
    dp: int = 2
    align: Align = "steps"
    collate: Collate = "packed"
    loss: PolicyLoss | Literal["value"] = "ppo"
    loss_agg: LossAgg = "token-mean"
    kl: KlEstimator | Literal["none"] = "none"
    entropy: bool = False
    cut: str = "tokens"
    order: int = 0
    experts: Literal["natural", "replayed", "balanced"] = "natural"
    rows: Literal["short", "long"] = "short"
    ratios: Literal["near", "far"] = "near"
    dual_clip: bool = False
    passes: Literal["plain", "recomputed"] = "plain"

    @property
    def critic(self) -> bool:
        """Whether the case checks the value loss of a critic, not a policy loss."""
        return self.loss == "value"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report about anything but the cases: a largest error and its tolerance."""

    section: str
    subject: str
    cases: int
    error: float
    tolerance: float
    passed: bool

    @classmethod
    def of(cls, section: str, subject: str, errors: Sequence[float], tolerance: float) -> "Line":
        """The line of some comparisons; an error that is NaN does not pass."""
        error = float(np.max(errors))
        return cls(section, subject, len(errors), error, tolerance, error <= tolerance)


@dataclass(frozen=True, slots=True)
class Able:
    """The models that can be a critic, can only be a critic, replay experts, run trees or recompute activations."""

    critic: Sequence[str] = ()
    only_critic: Sequence[str] = ()
    experts: Sequence[str] = ()
    trees: Sequence[str] = ()
    recompute: Sequence[str] = ()


def short_name(model: str) -> str:
    """The last part of a model directory's path, or the name of a built-in model, safe to print."""
    return terminal_text(Path(model).name or model)


def choices(models: Sequence[str], dp: Sequence[int], dtypes: Sequence[str]) -> dict[str, Sequence]:
    """Every value of every field of a case."""
    return {
        "model": models,
        "dtype": dtypes,
        "dp": dp,
        "align": get_args(Align),
        "collate": get_args(Collate),
        "loss": (*get_args(PolicyLoss), "value"),
        "loss_agg": get_args(LossAgg),
        "kl": ("none", *get_args(KlEstimator)),
        "entropy": (False, True),
        "cut": tuple(CUTS),
        "order": (0, 1),
        "experts": ("natural", "replayed", "balanced"),
        "rows": ("short", "long"),
        "ratios": ("near", "far"),
        "dual_clip": (False, True),
        "passes": ("plain", "recomputed"),
    }


def all_cases(options: Mapping[str, Sequence], able: Able) -> Iterator[Case]:
    """Every combination that makes sense."""
    seen = set()
    for values in product(*options.values()):
        case = _sensible(Case(**dict(zip(options, values, strict=True))), able)
        if case not in seen:
            seen.add(case)
            yield case


def covering_cases(options: Mapping[str, Sequence], able: Able, *, seed: int = 0) -> list[Case]:
    """A small set of cases that covers every possible pair of values of two fields: greedy, determined by the seed."""
    random = Random(seed)

    def draw(wanted: Iterable[tuple[str, object]]) -> Case:
        values = {name: random.choice(list(values)) for name, values in options.items()}
        return _sensible(Case(**{**values, **dict(wanted)}), able)

    pairs = [((a, x), (b, y)) for a, b in combinations(options, 2) for x, y in product(options[a], options[b])]
    missing = {pair for pair in pairs if any(pair in _pairs(draw(pair), options) for _ in range(_TRIES))}
    cases = []
    while missing:
        candidates = [draw(wanted) for wanted in random.choices(sorted(missing, key=repr), k=_CANDIDATES)]
        best = max(candidates, key=lambda case: len(missing & _pairs(case, options)))
        gained = missing & _pairs(best, options)
        if gained:
            missing -= gained
            cases.append(best)
    return cases


def _pairs(case: Case, options: Mapping[str, Sequence]) -> set:
    return set(combinations([(name, getattr(case, name)) for name in options], 2))


def _sensible(case: Case, able: Able) -> Case:
    """The nearest case that makes sense: not every model can do everything, and a value loss has no ratios."""
    if case.model in able.only_critic:
        case = replace(case, loss="value")
    if case.critic and case.model not in able.critic:
        case = replace(case, loss="ppo")
    if case.critic:
        case = replace(case, kl="none", entropy=False, ratios="near")
    if case.loss not in ("ppo", "gspo"):
        case = replace(case, dual_clip=False)
    if case.critic or case.model not in able.experts:
        case = replace(case, experts="natural")
    if case.collate == "tree" and case.model not in able.trees:
        case = replace(case, collate="packed")
    if case.model not in able.recompute or case.dtype == "float64":  # recomputation would not leave out its casts
        case = replace(case, passes="plain")
    return case
