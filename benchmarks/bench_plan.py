"""The planner's time and quality compared with its goals, and with verl's balanced partitions in the same run.

verl 0.9.1 runs in `.venv-verl` (see `verl_partitions.py`). Its call only assigns rows to ranks; its micro-batches are
formed later on the workers, while a plan contains them. A missed goal does not change the exit code: timings are noisy.

    make bench-plan                                                    # about two minutes
    .venv/bin/python benchmarks/bench_plan.py --quick                  # seconds; goals that are skipped say "not run"
    .venv/bin/python benchmarks/bench_plan.py --json plan.json --verl-rows 256000 --verl-limit 600
"""

import argparse
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from plan_cases import (
    SIZES,
    Case,
    Slots,
    Verl,
    by_layout,
    by_million,
    by_shape,
    by_size,
    by_small_steps,
    slots_over_seeds,
)

Goal = tuple[str, str, bool | None]  # what, measured, met (None: not run)


def show(console: Console, title: str, headings: Sequence[str], lines: Iterable[Sequence[str]], note: str = "") -> None:
    """Print a table with right-aligned numbers; the first column has names."""
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left", box=box.SIMPLE)
    table.pad_edge = False
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def show_cases(console: Console, title: str, cases: Sequence[Case], note: str = "") -> None:
    with_verl = any(case.verl for case in cases)
    with_steps = any(case.num_steps > 1 for case in cases)
    headings = ["rows", "dp", *["steps"] * with_steps, "seconds", "micro-batches", "bound", "FFD", "padding"]
    headings += ["ranks", "slots", *["verl s", "verl/ours", "verl ranks"] * with_verl]
    lines = []
    for case in cases:
        name = f"{case.num_rows:,}" if case.table == "size" else case.name
        counts = (case.micro_batches, case.fewest, case.first_fit, case.padding_rows)
        lines.append(
            [name, f"{case.dp_size:,}", *[str(case.num_steps)] * with_steps, f"{case.seconds:.4f}"]
            + ["-" if count is None else f"{count:,}" for count in counts]
            + [f"{case.rank:.4f}", f"{case.slot:.4f}"]
            + (_verl_cells(case) if with_verl else [])
        )
    show(console, title, headings, lines, note)


def _verl_cells(case: Case) -> list[str]:
    if case.verl is None:
        return ["-", "-", "-"]
    if case.verl.seconds is None:
        return [f"> {case.verl.limit:g}", f"> {case.verl.limit / case.seconds:,.0f} x", "-"]
    return [f"{case.verl.seconds:.3f}", f"{case.verl.seconds / case.seconds:,.0f} x", f"{case.verl.rank:.4f}"]


def show_slots(console: Console, slots: Sequence[Slots]) -> None:
    lines = [
        [f"{s.num_rows:,}", str(s.dp_size), str(s.num_seeds)]
        + [f"{value:.5f}" for value in (s.median, s.max, s.bound_median, s.bound_max, s.gap_median, s.gap_max)]
        for s in slots
    ]
    headings = ["rows", "dp", "seeds", "slots median", "max", "bound median", "max", "gap median", "max"]
    note = "bound: what the longest row alone imposes; gap: slots - bound, seed by seed"
    show(console, "Slot imbalance over seeds", headings, lines, note)


def judge(cases: Sequence[Case], slots: Sequence[Slots]) -> list[Goal]:
    """Each goal with its measured value, which is that of the slowest case."""

    def at_most(goal: str, limit: float, chosen: list[Case]) -> Goal:
        if not chosen:
            return f"{goal}: at most {limit:g} s", "not run", None
        worst = max(chosen, key=lambda case: case.seconds)
        measured = f"{worst.seconds:.4f} s (dp {worst.dp_size:,}{'' if worst.table == 'size' else f', {worst.name}'})"
        return f"{goal}: at most {limit:g} s", measured, worst.seconds <= limit

    def sized(num_rows: int, *dp_sizes: int) -> list[Case]:
        return [c for c in cases if c.table == "size" and c.num_rows == num_rows and c.dp_size in dp_sizes]

    def named(table: str, name: str = "") -> list[Case]:
        return [case for case in cases if case.table == table and case.name.startswith(name)]

    goals = [
        at_most("4,000 rows", 0.06, sized(4_000, 8, 64)),
        at_most("32,000 rows", 0.25, sized(32_000, 8, 64)),
        at_most("32,000 rows of any shape", 0.6, named("shape")),
        _against_verl([case for case in sized(32_000, 8, 64) if case.verl]),
        at_most("256,000 rows", 0.5, sized(256_000, 8, 64)),
        at_most("1,000,000 rows", 1.5, sized(1_000_000, 8, 64)),
        at_most("1,000,000 rows, dp 1,024", 4, sized(1_000_000, 1_024)),
        at_most("32,000 rows, padded collation", 0.06, named("layout", "padded")),
        at_most("16 steps of 2,000 rows", 0.4, named("layout", "16 steps")),
        at_most("16 steps of 2,000 rows, trees", 0.6, named("layout", "trees")),
        at_most("32,000 rows, align lcm", 0.4, named("layout", "align lcm")),
        at_most("align lcm, many steps x ranks", 0.5, named("lcm")),
        at_most("1,000,000 rows, dp 1,024, 16 steps, critic", 4, named("million")),
    ]
    few, many = slots
    for goal, value, limit in (
        (f"slots, 4,000 rows, dp 64, {few.num_seeds} seeds: max", few.max, 1.03),
        (f"slots, 32,000 rows, dp 64, {many.num_seeds} seeds: median", many.median, 1.003),
        (f"slots, 32,000 rows, dp 64, {many.num_seeds} seeds: max", many.max, 1.005),
    ):
        goals.append((f"{goal} at most {limit:g}", f"{value:.5f}", value <= limit))
    promised = [case.as_promised for case in cases if case.as_promised is not None]
    goal = "micro-batches = m ceil(B / m), B at most FFD's; padding = max(0, that - rows)"
    return [*goals, (goal, f"{sum(promised)} of {len(promised)} cases", all(promised))]


def _against_verl(cases: list[Case]) -> Goal:
    goal = "32,000 rows: at least 40 x faster than verl's call"
    ratios = [((c.verl.seconds or c.verl.limit) / c.seconds, c) for c in cases if c.verl]
    if not ratios:
        return goal, "not run", None
    least, case = min(ratios, key=lambda pair: pair[0])
    finished = case.verl is not None and case.verl.seconds is not None
    met = least >= 40 if finished or least >= 40 else None  # not finished: the ratio is only a lower bound
    return goal, f"{'' if finished else 'more than '}{least:,.0f} x (dp {case.dp_size})", met


def show_goals(console: Console, goals: Sequence[Goal]) -> None:
    words = {True: "[green]yes[/]", False: "[bold red]NO[/]", None: "not run"}
    show(console, "Goals", ["goal", "measured", "met"], [[goal, value, words[met]] for goal, value, met in goals])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most 32,000 rows, 5 seeds, no verl")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE as well")
    python = Path(__file__).resolve().parent.parent / ".venv-verl/bin/python"
    parser.add_argument("--verl-python", type=Path, default=python, metavar="PATH", help="Python of .venv-verl")
    parser.add_argument("--verl-rows", type=int, metavar="N", help="most rows to give verl (32,000; with --quick 0)")
    parser.add_argument("--verl-limit", type=float, default=120, metavar="S", help="seconds a case for verl (120)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    max_rows = (0 if args.quick else 32_000) if args.verl_rows is None else args.verl_rows
    verl = Verl(args.verl_python, max_rows, args.verl_limit)
    note = f"verl ranks: by verl's own workload. verl was run with at most {max_rows:,} rows (--verl-rows)."
    if max_rows == 0:
        note = "verl was not run (--verl-rows N runs it with up to N rows)."
    elif not verl.python.exists():
        verl, note = None, f"verl was left out: there is no {args.verl_python} (make .venv-verl/installed)."
    note = f"bound: tokens / budget, rounded up. FFD: first-fit-decreasing's count. {note}"
    console = Console(width=max(Console().width, 130))  # a narrow terminal wraps lines instead of cutting figures
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    machine = f"{versions}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the start; best of 3"
    console.print(machine, highlight=False)

    sizes = {num_rows: dps for num_rows, dps in SIZES.items() if not args.quick or num_rows <= 32_000}
    cases = list(by_size(sizes, verl))
    show_cases(console, "One step, lognormal lengths", cases, note)
    shapes = list(by_shape())
    show_cases(console, "One step, 32,000 rows of other shapes", shapes)
    layouts = list(by_layout())
    show_cases(console, "32,000 rows, lognormal lengths, other layouts", layouts)
    small_steps = list(by_small_steps())
    show_cases(console, "align lcm with many steps x ranks", small_steps)
    million = [] if args.quick else list(by_million())
    if million:
        show_cases(console, "1,000,000 rows, 16 steps, critic", million)
    slots = [slots_over_seeds(num_rows, 64, 5 if args.quick else 20) for num_rows in (4_000, 32_000)]
    show_slots(console, slots)
    cases += [*shapes, *layouts, *small_steps, *million]
    goals = judge(cases, slots)
    show_goals(console, goals)
    if args.json:
        figures = {
            "machine": machine,
            "cases": [asdict(case) for case in cases],
            "slots": [asdict(s) for s in slots],
            "goals": [{"goal": goal, "measured": value, "met": met} for goal, value, met in goals],
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
