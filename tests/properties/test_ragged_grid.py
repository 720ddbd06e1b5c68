"""The random steps that crash slime and miles (34-88 % of them): rows of 0.3-1 x the token budget on many ranks."""

from itertools import product

import numpy as np
import pytest

from properties.checks import check_plan
from raggedright import Layout, Plan, Rows, make_plan
from raggedright.plan.layout import Align, Collate

BUDGET = 8_192
ALIGNS: tuple[Align, ...] = ("steps", "lcm")
COLLATES: tuple[Collate, ...] = ("packed", "padded")


def ragged_plan(dp_size: int, multiple: int, align: Align, seed: int, collate: Collate = "packed") -> Plan:
    """One to forty prompts of one to eight sessions, each of one to three rows."""
    random = np.random.default_rng(seed)
    names = [
        (f"p{p}", s, t)
        for p in range(random.integers(1, 41))
        for s in range(random.integers(1, 9))
        for t in range(random.integers(1, 4))
    ]
    prompt, session, trajectory = zip(*names, strict=True)
    rows = Rows.from_columns(
        prompt=prompt,
        session=session,
        trajectory=trajectory,
        prompt_tokens=np.ones(len(names), dtype=np.int64),
        response_tokens=random.integers(int(0.3 * BUDGET), BUDGET, len(names)),
    )
    layout = Layout(
        dp_size=dp_size,
        batch_size=32,
        mini_batch_size=int(random.choice([4, 8, 16, 32])),
        rollout_n=8,
        align=align,
        collate=collate,
        micro_batch_tokens=BUDGET,
        micro_batch_multiple=multiple,
    )
    return make_plan(rows, layout)


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("dp_size", [8, 64])
def test_ragged_steps_are_planned_within_the_budget(dp_size: int, multiple: int, align: Align) -> None:
    for seed in range(3):
        check_plan(ragged_plan(dp_size, multiple, align, seed))


@pytest.mark.slow
@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("dp_size", [8, 64])
def test_many_ragged_steps_are_planned_within_the_budget(dp_size: int, align: Align) -> None:
    for multiple, collate, seed in product((1, 4), COLLATES, range(100, 130)):
        check_plan(ragged_plan(dp_size, multiple, align, seed, collate))
