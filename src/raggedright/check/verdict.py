"""The verdict on each model: which collations are right and, if one is not, which settings are.

A collation of a model is right if all of its cases are within their tolerance, in every dtype that was checked.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from raggedright.check.cases import Case, short_name
from raggedright.check.compare import Result

ONE_ROW = "train.micro_batch_rows = 1"
# Settings that may be right if others are not, the cheapest first, and the cases that have them.
_REMEDIES: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    ("train.collate = 'packed'", lambda case: case.collate == "packed"),
    ("train.collate = 'padded'", lambda case: case.collate == "padded"),
    ("train.collate = 'tree'", lambda case: case.collate == "tree"),
    ("model.activation_checkpointing = false", lambda case: case.passes == "plain"),
    ("experts.balance_coef = 0", lambda case: case.experts != "balanced"),
    ("experts.replay = false and experts.balance_coef = 0", lambda case: case.experts == "natural"),
    (ONE_ROW, lambda case: case.cut == "rows"),
    ("rollout.max_row_tokens below the lengths in the model's config", lambda case: case.rows == "short"),
)
_FEWEST = 2  # cases that must have passed with a remedy


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
        """The verdict for JSON."""
        return {**asdict(self), "right": self.right}


def verdicts(results: Sequence[Result]) -> list[Verdict]:
    """One verdict per model, dtype and collation, sorted."""
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


def sentence_of(model: str, results: Sequence[Result], *, refused: Collection[str] = ()) -> str:
    """Which collations are right for a model, which are not and by how much, and what to set.

    `refused` are settings of which a run refuses this model for another reason.
    """
    results = [result for result in results if result.case.model == model]
    groups = {how: [r for r in results if r.case.collate == how] for how in ("packed", "padded", "tree")}
    groups = {how: group for how, group in groups.items() if group}
    right = [how for how, group in groups.items() if all(result.passed for result in group)]
    faults = ", ".join(f"{how} is not ({_fault(group)})" for how, group in groups.items() if how not in right)
    name = short_name(model)
    if not faults:
        return f"{name}: {_listed(right)} {'is' if len(right) == 1 else 'are'} right"
    remedies = _remedies(results, refused)
    remedy = f"set {', or '.join(remedies)}" if remedies else f"the smallest failing case is {_smallest(results)}"
    if right:
        return f"{name}: {_listed(right)} {'is' if len(right) == 1 else 'are'} right, {faults}; {remedy}"
    return f"{name}: no collation is right, {faults}; {remedy}"


def _fault(group: Sequence[Result]) -> str:
    failed = [result for result in group if not result.passed]
    gradient, metrics = max(r.rel_error for r in failed), max(r.metric_drift for r in failed)
    return f"gradient off by {gradient:.1e}, metrics by {metrics:.1e}, in {len(failed)} of {len(group)} cases"


def _remedies(results: Sequence[Result], refused: Collection[str]) -> list[str]:
    """The smallest sets of settings with which every case passed; two sets at most."""
    for size in (1, 2):
        remedies = []
        for settings in combinations((remedy for remedy in _REMEDIES if remedy[0] not in refused), size):
            kept = [result for result in results if all(has(result.case) for _, has in settings)]
            if len(kept) >= _FEWEST and all(result.passed for result in kept):
                remedies.append(" and ".join(name for name, _ in settings))
        if remedies:
            return remedies[:2]
    return []


def _smallest(results: Sequence[Result]) -> str:
    """The unusual settings of the failing case that has the fewest."""
    usual = asdict(Case())
    unusual = [
        [f"{name} {value}" for name, value in asdict(result.case).items() if value != usual[name] and name != "model"]
        for result in results
        if not result.passed
    ]
    return ", ".join(min(unusual, key=len)) or "the plainest one"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
