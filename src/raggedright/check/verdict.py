"""What the cases say of each model: which collations are right, and which setting is right where one is not.

A collation of a model is right if all of its cases are within their tolerance, in every dtype that was checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from raggedright.check.cases import Case
from raggedright.check.run import Result

if TYPE_CHECKING:
    from raggedright.check.advantages import AdvantageResult
    from raggedright.check.half import HalfResult
    from raggedright.check.ranks import StepResult

# Settings that may be right where others are not, the cheapest first, and the cases that have them.
_REMEDIES: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    ("train.collate = 'packed'", lambda case: case.collate == "packed"),
    ("train.collate = 'padded'", lambda case: case.collate == "padded"),
    ("train.collate = 'tree'", lambda case: case.collate == "tree"),
    ("model.activation_checkpointing = false", lambda case: case.passes == "plain"),
    ("experts.balance_coef = 0", lambda case: case.experts != "balanced"),
    ("experts.replay = false and experts.balance_coef = 0", lambda case: case.experts == "natural"),
    ("train.micro_batch_rows = 1", lambda case: case.cut == "rows"),
    ("rollout.max_row_tokens below the lengths in the model's config", lambda case: case.rows == "short"),
)
_FEWEST = 2  # cases that must have passed under a remedy


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table: all cases of a model, a dtype and a collation."""

    model: str
    dtype: str
    collate: str
    cases: int
    failed: int
    gradient: float
    metrics: float
    tolerance: float

    @property
    def right(self) -> bool:
        """Whether every case is within the tolerance."""
        return not self.failed

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "right": self.right}


def verdicts(results: Sequence[Result]) -> list[Verdict]:
    """By model in the order of the cases' names, then dtype, then collation."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.case.model, result.case.dtype, result.case.collate), []).append(result)
    return [
        Verdict(
            *key,
            cases=len(group),
            failed=sum(not result.passed for result in group),
            gradient=max(result.rel_error for result in group),
            metrics=max(result.metric_drift for result in group),
            tolerance=group[0].tolerance,
        )
        for key, group in sorted(groups.items())
    ]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of what is checked beside the cases: a largest error and what it may be."""

    section: str
    subject: str
    cases: int
    error: float
    tolerance: float
    passed: bool


def advantage_lines(results: "Sequence[AdvantageResult]") -> list[Line]:
    """By estimator."""
    from raggedright.check.advantages import TOLERANCE

    groups: dict[str, list[AdvantageResult]] = {}
    for result in results:
        groups.setdefault(result.case.kind, []).append(result)
    return [
        Line("advantages", kind, len(group), max(r.error for r in group), TOLERANCE, all(r.passed for r in group))
        for kind, group in groups.items()
    ]


def step_lines(results: "Sequence[StepResult]") -> list[Line]:
    """By case."""
    from raggedright.check.ranks import TOLERANCE

    return [
        Line(
            "weights after AdamW, two processes",
            f"{short_name(r.case.model)}, {r.case.collate}, {r.num_steps} steps{' of a critic' * r.case.critic}",
            1,
            r.error,
            TOLERANCE,
            r.passed,
        )
        for r in results
    ]


def half_lines(results: "Sequence[HalfResult]") -> list[Line]:
    """By model and collation; the tolerance is a multiple of the rounding."""
    from raggedright.check.half import MOST

    return [
        Line("bfloat16", f"{short_name(r.model)}, {r.collate}", 1, r.cut, MOST * r.rounding, r.passed) for r in results
    ]


def short_name(model: str) -> str:
    """A model directory by its last part."""
    return Path(model).name or model


def sentence_of(model: str, results: Sequence[Result]) -> str:
    """What is right for one model, what is not and by how much, and what to set."""
    of_model = [result for result in results if result.case.model == model]
    groups = {how: [r for r in of_model if r.case.collate == how] for how in ("packed", "padded", "tree")}
    groups = {how: group for how, group in groups.items() if group}
    right = [how for how, group in groups.items() if all(result.passed for result in group)]
    faults = ", ".join(f"{how} is not ({_fault(group)})" for how, group in groups.items() if how not in right)
    name = short_name(model)
    if not faults:
        return f"{name}: {_listed(right)} {'is' if len(right) == 1 else 'are'} right"
    remedies = _remedies(of_model)
    remedy = f"set {', or '.join(remedies)}" if remedies else f"the smallest failing case is {_smallest(of_model)}"
    if right:
        return f"{name}: {_listed(right)} {'is' if len(right) == 1 else 'are'} right, {faults}; {remedy}"
    return f"{name}: no collation is right, {faults}; {remedy}"


def _fault(group: Sequence[Result]) -> str:
    failed = [result for result in group if not result.passed]
    gradient, metrics = max(r.rel_error for r in failed), max(r.metric_drift for r in failed)
    return f"gradient off by {gradient:.1e}, metrics by {metrics:.1e}, in {len(failed)} of {len(group)} cases"


def _remedies(results: Sequence[Result]) -> list[str]:
    """The fewest settings under which every case passed; two sets of them at most."""
    for size in (1, 2):
        found = []
        for settings in combinations(_REMEDIES, size):
            kept = [result for result in results if all(has(result.case) for _, has in settings)]
            if len(kept) >= _FEWEST and all(result.passed for result in kept):
                found.append(" and ".join(name for name, _ in settings))
        if found:
            return found[:2]
    return []


def _smallest(results: Sequence[Result]) -> str:
    """The failing case with the fewest unusual settings."""
    plain = asdict(Case())
    unusual = [
        [f"{name} {value}" for name, value in asdict(result.case).items() if value != plain[name] and name != "model"]
        for result in results
        if not result.passed
    ]
    return ", ".join(min(unusual, key=len)) or "the plainest one"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
