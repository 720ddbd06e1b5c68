"""How far bfloat16 depends on the cut: measured, because nothing in it is exact.

Each number is a relative error of the gradient. `cut`: of a plan from the same rows one by one, both in bfloat16.
`rounding`: of the rows one by one in bfloat16 from the same weights in float32. A cut is another order of rounding:
it must not be worse than the rounding that is there anyway.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raggedright.check.cases import Case
from raggedright.check.reference import MadeUp
from raggedright.check.run import (
    batch_of,
    load_case,
    relative_error,
    role_of,
    run_rank,
    run_reference,
    take_gradient,
)

MOST = 2.0  # times the rounding
_CUTS = ("one", "tokens")
Gradient = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class HalfResult:
    """The largest errors over the cuts and steps of a model and a collation."""

    model: str
    collate: str
    cut: float
    rounding: float

    @property
    def passed(self) -> bool:
        """Whether the cut is within a multiple of the rounding."""
        return self.cut <= MOST * self.rounding


def run_half(model: str, collates: Sequence[str], *, critic: bool = False) -> list[HalfResult]:
    """Measure a model, by collation."""
    alone: dict[tuple[str, ...], tuple[Gradient, Gradient]] = {}  # of steps, which have the same rows in every plan
    results = []
    for collate in collates:
        errors = [error for cut in _CUTS for error in _errors(_case(model, collate, cut, critic), alone)]
        results.append(HalfResult(model, collate, max(e[0] for e in errors), max(e[1] for e in errors)))
    return results


def _case(model: str, collate: str, cut: str, critic: bool) -> Case:
    loss = "value" if critic else "ppo"
    return Case(model=model, dtype="bfloat16", collate=collate, cut=cut, loss=loss)  # pyright: ignore[reportArgumentType]


def _errors(case: Case, alone: dict[tuple[str, ...], tuple[Gradient, Gradient]]) -> Iterator[tuple[float, float]]:
    """The errors of each step, of the cut and of the rounding."""
    model, made_up = load_case(case)
    batch, precise = batch_of(case, made_up, model), _in_float32(model)
    for step in batch.plan.steps(role_of(case)):
        if step.skipped:
            continue
        for dp_rank in range(case.dp):
            run_rank(model, batch, step, dp_rank, case)
        planned = take_gradient(model)
        keys = tuple(sorted(batch.rows.key[step.row].tolist()))
        if keys not in alone:
            in_half, _ = run_reference(model, made_up, batch, step, case)
            exact, _ = run_reference(precise, _precise_rows(made_up), batch, step, case)
            alone[keys] = in_half, exact
        in_half, exact = alone[keys]
        yield relative_error(planned, in_half), relative_error(in_half, exact)


def _in_float32(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(torch.float32)


def _precise_rows(made_up: MadeUp) -> MadeUp:
    """The same rows for a float32 model: pixels are in the model's type."""
    fields = []
    for row in made_up.fields:
        media = row.get("multi_modal_inputs")
        if isinstance(media, dict):
            raised = {name: x.float() if x.is_floating_point() else x for name, x in media.items()}
            row = {**row, "multi_modal_inputs": raised}
        fields.append(row)
    return MadeUp(made_up.rows, fields)
