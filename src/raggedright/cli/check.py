"""`raggedright check`: prove on a model that no plan changes a gradient or a metric."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from raggedright.cli.arguments import Commands, add_parser, count, counts
from raggedright.errors import ConfigError, RaggedRightError
from raggedright.report.words import counted

if TYPE_CHECKING:
    from raggedright.check.cases import Case
    from raggedright.check.run import Result

EXAMPLES = """\
examples:
  raggedright check                                 tiny models made on the spot, about a minute
  raggedright check --model path/to/model --dp 2,8  a model directory of yours, on two data-parallel sizes
  raggedright check --format json | jq .max_rel_error

Each case plans a made-up ragged batch, runs it rank by rank and micro-batch by micro-batch, padding rows included, and
compares gradient and metrics with the same rows run one by one. Exit code 1 above the tolerance: 1e-10 in float64,
1e-5 in float32.
"""
DTYPES = ("float64", "float32")
COVERINGS = 3  # different ones: each has every pair of choices


class CheckError(RaggedRightError):
    """A case is above its tolerance."""


def add_command(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Declare the subcommand and its options."""
    parser = add_parser(
        commands,
        "check",
        summary="prove that plans change no gradient and no metric",
        description="Compare the gradient and metrics of planned batches with those of their rows run one by one.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--model",
        action="append",
        metavar="NAME",
        help="qwen3, qwen3-moe, qwen3-vl or a model directory (default all three)",
    )
    add("--dp", type=counts, default=[1, 2, 3, 4], metavar="N,N", help="data-parallel sizes (default 1,2,3,4)")
    add("--dtype", action="append", choices=DTYPES, help="default both")
    add("--seed", type=int, default=0, metavar="N", help="chooses the cases (default 0)")
    add("--most", type=count, metavar="N", help="stop after N cases")
    add("--full", action="store_true", help="every combination, not only every pair: hours")
    add("--format", choices=("table", "json"), default="table", help="default table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Choose cases, run them, show them."""
    for name in args.model or ():
        _check_name(name)
    try:
        from raggedright.check.cases import all_cases, choices, covering_cases
        from raggedright.check.models import BUILTIN, has_critic
        from raggedright.check.run import has_experts, has_trees
    except ModuleNotFoundError as error:
        raise ConfigError(f"check needs {error.name}; pip install 'raggedright[train]'") from None
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # a critic's new head is no news
    models = args.model or list(BUILTIN)
    options = choices(models, args.dp, args.dtype or DTYPES)
    dtype = options["dtype"][0]
    able = {
        "with_critic": [model for model in models if has_critic(model)],
        "with_experts": [model for model in models if has_experts(model, dtype)],
        "with_trees": [model for model in models if has_trees(model, dtype)],
    }
    if args.full:
        cases: Iterable[Case] = all_cases(options, **able)
    else:
        coverings = (covering_cases(options, **able, seed=args.seed + i) for i in range(COVERINGS))
        cases = dict.fromkeys(case for covering in coverings for case in covering)
    results = list(_run_all(list(islice(cases, args.most))))
    failed = [result for result in results if not result.passed]
    if args.format == "json":
        json.dump(_to_dict(results), sys.stdout)
        print()
    else:
        _print_table(results, Console(emoji=False))
        if not failed:
            print(f"{counted(len(results), 'case')}, all within their tolerance")
    if failed:
        raise CheckError(f"{len(failed)} of {len(results)} cases are above their tolerance; the first is {failed[0]}")


def _check_name(name: str) -> None:
    """Refuse what is no model before anything slow is imported."""
    if "/" not in name and not Path(name).is_dir():
        return  # one that is made on the spot, or a wrong name, which is told with the right ones
    if not (Path(name) / "config.json").is_file():
        inside = Path(name) / "model"
        hint = f"; did you mean {inside}?" if (inside / "config.json").is_file() else ""
        raise ConfigError(f"--model {name}: not a model directory, it has no config.json{hint}")


def _run_all(cases: "list[Case]") -> "Iterator[Result]":
    import torch

    from raggedright.check.run import run_case

    torch.set_num_threads(1)  # tiny matrices: threads only wait for each other
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for case in progress.track(cases):
            yield run_case(case)


def _to_dict(results: "list[Result]") -> dict[str, object]:
    return {
        "cases": [
            {
                **asdict(result.case),
                "critic": result.case.critic,
                "padding_rows": result.padding_rows,
                "rel_error": result.rel_error,
                "metric_drift": result.metric_drift,
                "passed": result.passed,
            }
            for result in results
        ],
        "max_rel_error": max((result.rel_error for result in results), default=0.0),
        "max_metric_drift": max((result.metric_drift for result in results), default=0.0),
    }


def _print_table(results: "list[Result]", console: Console) -> None:
    """One line per model, dtype and align: the largest error of its cases."""
    from raggedright.check.run import TOLERANCE

    table = Table(title="Largest difference from the same rows run one by one", title_justify="left", box=None)
    for heading in ("model", "dtype", "align"):
        table.add_column(heading)
    for heading in ("cases", "padding rows", "gradient", "metrics", "tolerance", ""):
        table.add_column(heading, justify="right")
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.case.model, result.case.dtype, result.case.align), []).append(result)
    for (model, dtype, align), group in sorted(groups.items()):
        padding = [result.padding_rows for result in group]
        table.add_row(
            escape(model),
            dtype,
            align,
            str(len(group)),
            str(min(padding)) if min(padding) == max(padding) else f"{min(padding)}-{max(padding)}",
            f"{max(result.rel_error for result in group):.1e}",
            f"{max(result.metric_drift for result in group):.1e}",
            f"{TOLERANCE[dtype]:.0e}",
            "[green]ok[/]" if all(result.passed for result in group) else "[red]above[/]",
        )
    console.print(table)
