"""The cases of `bench_plan.py`: rows of every size and shape under the layouts that have goals.

Seconds are the best of three calls of `make_plan`, including the actor's cut and the forward pass; rows are made
beforehand. Lengths are lognormal (sigma 1, mean 2,000) unless a shape is named, clipped at the budget of 16,384 tokens.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from raggedright import Layout, Plan, Rows, make_plan, measure_imbalance
from raggedright.arrays import Ints
from raggedright.plan.micro_batches import row_costs
from raggedright.plan.packing import count_bins, first_fit_decreasing

CAP = 16_384
REPEAT = 3
SIZES = {360: (8, 64), 4_000: (8, 64), 32_000: (8, 64), 256_000: (8, 64), 1_000_000: (8, 64, 1_024)}
ROWS_PER_PROMPT = 16  # 8 sessions of 2 trajectories
PROGRESS = Console(stderr=True)

Draw = Callable[[np.random.Generator, int], Any]
SHAPES: dict[str, Draw] = {
    "lognormal": lambda rng, n: rng.lognormal(np.log(2_000) - 0.5, 1.0, n),
    "uniform": lambda rng, n: rng.integers(2, CAP + 1, n),
    "uniform to 12,000": lambda rng, n: rng.integers(2, 12_001, n),  # so tight that levelling packs the rows again
    "all equal (2,000)": lambda rng, n: np.full(n, 2_000),
    "bimodal (200, 12,000)": lambda rng, n: np.where(rng.random(n) < 0.7, 200, 12_000) * rng.uniform(0.8, 1.2, n),
    "0.3-1.0 x budget": lambda rng, n: rng.uniform(0.3, 1.0, n) * CAP,
    "0.2-0.4 x budget": lambda rng, n: rng.uniform(0.2, 0.4, n) * CAP,
    "just over a half": lambda rng, n: CAP // 2 + rng.integers(1, 64, n),
    "many tiny (2-64)": lambda rng, n: rng.integers(2, 65, n),
    "tiny and whole": lambda rng, n: np.where(rng.random(n) < 0.05, CAP, rng.integers(2, 65, n)),
    "geometric": lambda rng, n: rng.geometric(1 / 2_000, n),
    "heavy tail (Pareto 1.1)": lambda rng, n: 200 * (1 + rng.pareto(1.1, n)),
}


@dataclass(frozen=True, slots=True)
class VerlResult:
    """Seconds of verl's call (None: not finished in time) and the imbalance of its ranks by verl's workload."""

    seconds: float | None
    limit: float
    rank: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """One set of rows under one layout. Bounds are None where they do not apply (padded collation, align lcm)."""

    table: str
    name: str
    num_rows: int
    dp_size: int
    num_steps: int
    seconds: float
    micro_batches: int
    fewest: int | None  # sum over steps of ceil(tokens / budget)
    first_fit: int | None  # first-fit-decreasing's count
    padding_rows: int
    rank: float
    slot: float
    as_promised: bool | None  # m * ceil(B / m) micro-batches with B <= first_fit, and padding where rows are too few
    verl: VerlResult | None = None


@dataclass(frozen=True, slots=True)
class Slots:
    """Slot imbalance over seeds, the bound that the longest rows impose, and the gap between them."""

    num_rows: int
    dp_size: int
    num_seeds: int
    median: float
    max: float
    bound_median: float
    bound_max: float
    gap_median: float
    gap_max: float


@contextmanager
def working_on(what: str) -> Iterator[None]:
    """A spinner on a terminal, a line elsewhere."""
    if PROGRESS.is_terminal:
        with PROGRESS.status(what):
            yield
    else:
        PROGRESS.print(f"... {what}", highlight=False)
        yield


@dataclass(frozen=True, slots=True)
class Verl:
    """The environment that has verl, the maximum number of rows for it, and its seconds for a case."""

    python: Path
    max_rows: int
    limit: float

    def time(self, rows: Rows, dp_size: int) -> VerlResult:
        script = Path(__file__).with_name("verl_partitions.py")
        options = {"--dp": dp_size, "--repeat": REPEAT, "--limit": self.limit}
        command = [str(self.python), str(script), *(str(part) for option in options.items() for part in option)]
        lengths = json.dumps(rows.tokens.tolist())
        with working_on(f"verl: {len(rows):,} rows, dp {dp_size:,}, at most {self.limit:g} s"):
            try:
                done = subprocess.run(command, input=lengths, capture_output=True, text=True, timeout=self.limit + 120)
            except subprocess.TimeoutExpired:  # its own alarm did not stop it
                return VerlResult(None, self.limit, None)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        answer = json.loads(done.stdout.splitlines()[-1])
        return VerlResult(min(answer["seconds"], default=None), self.limit, answer["rank"])


def draw_rows(num_rows: int, seed: int = 0, shape: str = "lognormal", prompt_tokens: int = 1) -> Rows:
    tokens = SHAPES[shape](np.random.default_rng(seed), num_rows)
    tokens = np.clip(tokens, prompt_tokens + 1, CAP).astype(np.int64)
    number = np.arange(num_rows)
    return Rows.from_columns(
        prompt=[f"p{i // ROWS_PER_PROMPT}" for i in range(num_rows)],
        session=number // 2 % 8,
        trajectory=number % 2,
        prompt_tokens=np.full(num_rows, prompt_tokens),
        response_tokens=tokens - prompt_tokens,
    )


def one_step(rows: Rows, dp_size: int) -> Layout:
    return Layout(
        dp_size=dp_size,
        batch_size=rows.num_prompts,
        mini_batch_size=rows.num_prompts,
        rollout_n=8,
        micro_batch_tokens=CAP,
    )


def measure(table: str, name: str, rows: Rows, layout: Layout) -> Case:
    with working_on(f"{table}: {name}, {len(rows):,} rows, dp {layout.dp_size:,}"):
        seconds, plan = min((_timed_plan(rows, layout) for _ in range(REPEAT)), key=lambda timed: timed[0])
    steps, imbalance = plan.steps("actor"), measure_imbalance(plan)
    micro_batches = sum(step.num_micro_batches for step in steps)
    fewest = first_fit = as_promised = None
    if layout.align == "steps" and layout.collate == "packed" and layout.micro_batch_tokens:
        real = [np.sort(plan.lengths[step.row[step.row < len(rows)]])[::-1] for step in steps]
        counts = [count_bins(first_fit_decreasing(sizes, CAP)) for sizes in real]
        fewest, first_fit = sum(-(-int(sizes.sum()) // CAP) for sizes in real), sum(counts)
        as_promised = all(
            step.num_slots <= -(-count // layout.dp_size)
            and len(step.row) - len(sizes) == max(0, step.num_micro_batches - len(sizes))
            for step, sizes, count in zip(steps, real, counts, strict=True)
        )
    return Case(
        table, name, len(rows), layout.dp_size, len(steps), seconds, micro_batches, fewest, first_fit,
        plan.num_padding_rows, imbalance.rank, imbalance.slot, as_promised,
    )  # fmt: skip


def _timed_plan(rows: Rows, layout: Layout) -> tuple[float, Plan]:
    start = time.perf_counter()
    plan = make_plan(rows, layout)
    return time.perf_counter() - start, plan


def slot_bound(plan: Plan) -> float:
    """The slot imbalance that no packed cut can go below, because of the longest row.

    The other micro-batches of its slot are led by distinct rows, and one led by l tokens costs at
    most budget * (linear + quadratic * l); what they fall short of the longest row's cost is idle.
    """
    layout, idle, total = plan.layout, 0, 0
    for step in plan.steps("actor"):
        lengths = plan.lengths[step.row]
        longest = np.sort(lengths)[::-1][: layout.dp_size]
        per_token: Ints = layout.cost_linear + layout.cost_quadratic * longest
        idle += int(np.maximum(longest[0] * per_token[0] - CAP * per_token[1:], 0).sum())
        total += int(row_costs(lengths, layout).sum())
    return 1 + idle / total


def slots_over_seeds(num_rows: int, dp_size: int, num_seeds: int) -> Slots:
    slots, bounds = [], []
    with working_on(f"slots: {num_rows:,} rows, dp {dp_size}, {num_seeds} seeds"):
        for seed in range(num_seeds):
            rows = draw_rows(num_rows, seed)
            plan = make_plan(rows, one_step(rows, dp_size))
            slots.append(measure_imbalance(plan).slot)
            bounds.append(slot_bound(plan))
    gaps = [slot - bound for slot, bound in zip(slots, bounds, strict=True)]
    values = [figure(values) for values in (slots, bounds, gaps) for figure in (statistics.median, max)]
    return Slots(num_rows, dp_size, num_seeds, *values)


def by_size(sizes: Mapping[int, tuple[int, ...]], verl: Verl | None) -> Iterator[Case]:
    for num_rows, dp_sizes in sizes.items():
        with working_on(f"making {num_rows:,} rows"):
            rows = draw_rows(num_rows)
        for dp_size in dp_sizes:
            case = measure("size", "lognormal", rows, one_step(rows, dp_size))
            yield replace(case, verl=verl.time(rows, dp_size)) if verl and num_rows <= verl.max_rows else case


def by_shape() -> Iterator[Case]:
    for shape in SHAPES:
        rows = draw_rows(32_000, shape=shape)
        for dp_size in (8, 64):
            yield measure("shape", shape, rows, one_step(rows, dp_size))


def by_layout() -> Iterator[Case]:
    rows = draw_rows(32_000, prompt_tokens=300)
    for dp_size in (8, 64):
        layout = one_step(rows, dp_size)
        yield measure("layout", "padded collation", rows, replace(layout, collate="padded"))
        yield measure("layout", "16 steps", rows, replace(layout, mini_batch_size=rows.num_prompts // 16))
        yield measure(
            "layout", "8 rows a micro-batch", rows, replace(layout, micro_batch_tokens=None, micro_batch_rows=8)
        )
        yield measure("layout", "trees, 16 steps", rows, replace(layout, collate="tree", mini_batch_size=125))
        lcm = replace(layout, align="lcm", batch_size=2_048, mini_batch_size=128)
        yield measure("layout", "align lcm, 128 x 8 rows per step", rows, lcm)


def by_small_steps() -> Iterator[Case]:
    """align lcm with many steps x ranks: layouts that took seconds when each cell was cut separately."""
    base = Layout(dp_size=64, batch_size=1_800, mini_batch_size=1, rollout_n=8, align="lcm", micro_batch_tokens=CAP)
    rows = draw_rows(14_400)
    yield measure("lcm", "14,400 rows, 8 rows per step", rows, base)
    yield measure("lcm", "14,400 rows, critic, 2 epochs", rows, replace(base, critic_mini_batch_size=1, epochs=2))
    small = replace(base, dp_size=96, batch_size=125, mini_batch_size=7, rollout_n=5, critic_mini_batch_size=11)
    yield measure("lcm", "2,000 rows, critic 11", draw_rows(2_000), small)
    small = replace(base, dp_size=257, batch_size=5, mini_batch_size=5, rollout_n=3, critic_mini_batch_size=1)
    yield measure("lcm", "21 rows, critic 1", draw_rows(21), small)


def by_million() -> Iterator[Case]:
    """A million rows at dp 1,024 in 16 steps with a critic, in every collation and alignment."""
    with working_on("making 1,000,000 rows"):
        rows = draw_rows(1_000_000, prompt_tokens=300)
    layout = Layout(
        dp_size=1_024, batch_size=62_464, mini_batch_size=3_904, critic_mini_batch_size=3_904, rollout_n=8,
        micro_batch_tokens=CAP,
    )  # fmt: skip
    for collate in ("packed", "padded", "tree"):
        yield measure("million", f"steps, {collate}", rows, replace(layout, collate=collate))
    yield measure("million", "lcm, packed", rows, replace(layout, align="lcm"))
