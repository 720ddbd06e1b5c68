"""What is checked: every pair of choices at least once, or every combination.

The choices are those a user makes in a config, and a few that nobody makes on purpose: the cut into micro-batches and
the order in which rows arrive.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from random import Random
from typing import Literal, get_args

from raggedright.loss_names import KlEstimator, PolicyLoss
from raggedright.plan.layout import Align, Collate, Layout, LossAgg

_BASE = Layout(dp_size=1, batch_size=6, mini_batch_size=3, critic_mini_batch_size=2, rollout_n=3)
CUTS: Mapping[str, Layout] = {
    "one": replace(_BASE, micro_batch_tokens=4096),
    "tokens": replace(_BASE, micro_batch_tokens=24),
    "rows": replace(_BASE, micro_batch_tokens=None, micro_batch_rows=1),
    "pipeline": replace(_BASE, micro_batch_tokens=40, micro_batch_multiple=3),
    "context": replace(_BASE, micro_batch_tokens=48, min_row_tokens=16),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `cut` names a rule for micro-batches, `order` a shuffle of the rows.

    Experts route naturally, or as the rows recorded it; balanced: with the balance loss, too.
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

    @property
    def critic(self) -> bool:
        """Whether the value loss of a critic is checked, not a policy loss."""
        return self.loss == "value"


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
    }


def all_cases(
    options: Mapping[str, Sequence],
    *,
    with_critic: Iterable[str],
    with_experts: Sequence[str] = (),
    with_trees: Sequence[str] = (),
) -> Iterator[Case]:
    """Every combination that means something."""
    seen = set()
    options = _possible(options, with_experts, with_trees)
    for values in product(*options.values()):
        case = _sensible(Case(**dict(zip(options, values, strict=True))), with_critic, with_experts, with_trees)
        if case not in seen:
            seen.add(case)
            yield case


def covering_cases(
    options: Mapping[str, Sequence],
    *,
    with_critic: Iterable[str],
    with_experts: Sequence[str] = (),
    with_trees: Sequence[str] = (),
    seed: int = 0,
) -> list[Case]:
    """Few cases in which every pair of values of two fields occurs, if it can: greedy, the same for a seed."""
    random = Random(seed)
    with_critic = tuple(with_critic)
    options = _possible(options, with_experts, with_trees)
    missing = {((a, x), (b, y)) for a, b in combinations(options, 2) for x, y in product(options[a], options[b])}
    cases, idle = [], 0
    while missing and idle < 20:
        candidates = []
        for _ in range(40):
            values = {name: random.choice(list(values)) for name, values in options.items()}
            wanted = random.choice(sorted(missing, key=repr))
            candidates.append(_sensible(Case(**{**values, **dict(wanted)}), with_critic, with_experts, with_trees))
        best = max(candidates, key=lambda case: len(missing & _pairs(case, options)))
        gained = missing & _pairs(best, options)
        idle = 0 if gained else idle + 1
        if gained:
            missing -= gained
            cases.append(best)
    return cases


def _possible(
    options: Mapping[str, Sequence], with_experts: Sequence[str], with_trees: Sequence[str]
) -> dict[str, Sequence]:
    """The choices that some model has: pairs that never come would be looked for in vain."""
    possible = dict(options)
    if not with_experts:
        possible["experts"] = options["experts"][:1]
    if not with_trees:
        possible["collate"] = [how for how in options["collate"] if how != "tree"]
    return possible


def _pairs(case: Case, options: Mapping[str, Sequence]) -> set:
    return set(combinations([(name, getattr(case, name)) for name in options], 2))


def _sensible(case: Case, with_critic: Iterable[str], with_experts: Sequence[str], with_trees: Sequence[str]) -> Case:
    """A value loss has neither KL nor entropy, critics route naturally, and not every model can be all things."""
    if case.critic or case.model not in with_experts:
        case = replace(case, experts="natural")
    if case.critic:
        model = case.model if case.model in with_critic else next(iter(with_critic), None)
        case = replace(case, kl="none", entropy=False, model=model) if model else replace(case, loss="ppo")
    if case.collate == "tree" and case.model not in with_trees:
        case = replace(case, collate="packed")
    return case
