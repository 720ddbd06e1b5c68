"""Break runs and commands in every way that we know, and count what was survived: `python verification/faults.py`.

A case is survived if the docs' promise held: the run resumes with the weights of an undisturbed run (float64), bad
input is refused with one sentence that names the file or key, and an agent fails only its own session. Lost: recorded
work is missing. Wrong: other numbers. Unclear: a traceback, a hang, or a last line without the cause. The table goes
into docs/faults.md; the exit code is 1 if anything was lost, wrong or unclear.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fault_ports  # noqa: F401, adds its kinds
from fault_kinds import KINDS, Kind
from fault_runs import Case, FaultError, NotTriedError, Shared, prepare_processes

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"
BEGIN, END = "<!-- made by verification/faults.py: begin -->", "<!-- made by verification/faults.py: end -->"
OUTCOMES = ("survived", "lost", "wrong", "unclear")
Counts = dict[Kind, Counter[str]]


def main() -> int:
    """Try all cases, print the table, write the page."""
    args = _arguments()
    if args.ray:
        import fault_ray  # noqa: F401, adds its kinds
    kinds = [kind for kind in KINDS if not args.only or any(text in f"{kind.group} {kind.name}" for text in args.only)]
    prepare_processes()
    counts: Counts = {kind: Counter() for kind in kinds}
    jobs = [(kind, number) for kind in kinds for number in range(args.first or kind.cases * args.cases)]
    random.Random(0).shuffle(jobs)  # long and short cases side by side
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="faults-") as name, Progress(*columns, console=console) as progress:
        shared = Shared.make(Path(name))
        task = progress.add_task("cases", total=len(jobs))
        with ThreadPoolExecutor(args.jobs) as pool:
            for kind, number, outcome, words in pool.map(partial(_attempt, shared, Path(name)), jobs):
                counts[kind][outcome] += 1
                progress.advance(task)
                if outcome != "survived":
                    console.print(f"{kind.group}, {kind.name}, case {number}: {outcome}: {words}", markup=False)
    Console(width=80).print(_table(counts))
    if not args.only and not args.first:
        _write_page(counts)
    bad = sum(counts[kind][outcome] for kind in kinds for outcome in OUTCOMES[1:])
    return 1 if bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break runs and commands, and count what was survived.")
    parser.add_argument("--cases", type=int, default=1, metavar="N", help="try N times as many cases of each kind")
    parser.add_argument("--only", action="append", metavar="TEXT", help="kinds with this text in their name; no page")
    parser.add_argument("--first", type=int, metavar="N", help="the first N cases of each kind; no page")
    parser.add_argument("--ray", action="store_true", help="also kill parts of a Ray on this machine; minutes more")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="cases at the same time")
    return parser.parse_args()


def _attempt(shared: Shared, folder: Path, job: tuple[Kind, int]) -> tuple[Kind, int, str, str]:
    """Try a case: its outcome, and what there is to say of it."""
    kind, number = job
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        case = Case(number, random.Random(f"{kind.name} {number}"), Path(name), shared)
        try:
            kind.attempt(case)
        except NotTriedError as error:
            return kind, number, "not tried", str(error)
        except FaultError as fault:
            return kind, number, type(fault).__name__.removesuffix("Error").lower(), str(fault)
        except Exception as error:  # a state that the case does not expect, such as a file that is not there
            return kind, number, "unclear", f"{type(error).__name__}: {error}"
    return kind, number, "survived", ""


def _tried(counts: Counter[str]) -> int:
    return sum(counts[outcome] for outcome in OUTCOMES)


def _table(counts: Counts) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("fault", no_wrap=True)
    for heading in ("tried", *OUTCOMES):
        table.add_column(heading, justify="right")
    for group, kinds in groupby(counts, key=lambda kind: kind.group):
        table.add_row(f"[bold]{group}[/]")
        for kind in kinds:
            numbers = (_tried(counts[kind]), *(counts[kind][outcome] for outcome in OUTCOMES))
            table.add_row(f"  {kind.name}", *map(str, numbers))
    total = sum(counts.values(), Counter[str]())
    table.add_row("all", str(_tried(total)), *(str(total[outcome]) for outcome in OUTCOMES))
    return table


def _write_page(counts: Counts) -> None:
    """Put the table between its two marks."""
    lines = ["| fault | tried | survived | lost | wrong | unclear |", "| --- | --: | --: | --: | --: | --: |"]
    for kind, found in counts.items():
        numbers = " | ".join(str(found[outcome]) for outcome in OUTCOMES)
        lines.append(f"| {kind.group}: {kind.name} | {_tried(found)} | {numbers} |")
    total = sum(counts.values(), Counter[str]())
    lines.append(f"| **all** | {_tried(total)} | {' | '.join(str(total[outcome]) for outcome in OUTCOMES)} |")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join((before + BEGIN, *lines, END + after)))


if __name__ == "__main__":
    sys.exit(main())
