"""`raggedright check`: prove on a model that no plan changes a gradient or a metric."""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from raggedright.cli.arguments import Commands, add_parser, count, counts, integer
from raggedright.errors import ConfigError, RaggedRightError, install_hint
from raggedright.report.text import counted

if TYPE_CHECKING:
    from raggedright.check.cases import Case, Line
    from raggedright.check.compare import ModelFacts, Result

EXAMPLES = """\
examples:
  raggedright check                          tiny models made on the spot
  raggedright check --model path/to/model    a model directory of yours
  raggedright check --format json | jq .max_rel_error

Each case plans a made-up ragged batch, runs it rank by rank and micro-batch by micro-batch, padding rows included, and
compares gradient and metrics with the same rows run one by one. Half of the cases have rows that are longer than the
windows, chunks and positions in the model's config. Then follow advantages, weights after optimizer steps in two
processes, and bfloat16. Exit code 1 above the tolerance: 1e-10 in float64, 1e-5 in float32.
"""
DTYPES = ("float64", "float32")
_LORA = ("qwen3-lora",) if find_spec("peft") else ()
NUM_COVERINGS = 3  # each covering has every pair of choices, in other combinations
MAX_PARAMETERS = 50_000_000  # of a model whose optimizer steps are run in float64


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
        "--model", action="append", metavar="NAME",
        help="qwen3, qwen3-moe, qwen3-vl, qwen3-lora, mistral or a model directory (default the first four)",
    )  # fmt: skip
    add(
        "--critic", action="append", metavar="NAME",
        help="a directory for critic.path (default mistral, made on the spot)",
    )  # fmt: skip
    add("--dp", type=counts, default=[1, 2, 3, 4], metavar="N,N", help="data-parallel sizes (default 1,2,3,4)")
    add("--dtype", action="append", choices=DTYPES, help="default both")
    add("--longest", type=count, metavar="N", help="most tokens of a row (default 1024 or less, by the vocabulary)")
    add("--seed", type=integer, default=0, metavar="N", help="chooses the cases (default 0)")
    add("--most", type=count, metavar="N", help="run N cases and nothing else")
    add("--full", action="store_true", help="every combination, not only every pair: hours")
    add("--format", choices=("table", "json"), default="table", help="default table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Choose cases, run them and show the results."""
    for name in (*(args.model or ()), *(args.critic or ())):
        _check_name(name)
    try:
        from raggedright.check.check_inputs import BUILTIN, CRITICS
        from raggedright.check.compare import facts_of
        from raggedright.check.verdict import ONE_ROW, sentence_of
    except ModuleNotFoundError as error:
        raise ConfigError(f"check needs {error.name}; {install_hint('train')}") from None
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # a critic has a new head, which transformers would report
    models, critics = args.model or [*BUILTIN, *_LORA], args.critic or ([] if args.model else list(CRITICS))
    dtypes = args.dtype or DTYPES
    facts = [facts_of(name, dtypes[0], longest=args.longest) for name in models]
    facts += [facts_of(name, dtypes[0], longest=args.longest, only_critic=True) for name in critics]
    cases = list(islice(_choose_cases(args, facts, critics, dtypes), args.most))
    results = _run_cases(cases, args.longest)
    lines = [] if args.most else _run_sections(facts, critics)
    checked = [of_model.model for of_model in facts if any(r.case.model == of_model.model for r in results)]
    limited = [of_model.model for of_model in facts if of_model.rope_limited]
    sentences = {name: sentence_of(name, results, refused=[ONE_ROW] * (name in limited)) for name in checked}
    if args.format == "json":
        print(json.dumps(_to_dict(results, facts, sentences, lines)))
    else:
        _print_report(results, facts, sentences, lines)
    failed = [result.case.model for result in results if not result.passed]
    if failed:
        faults = "; ".join(sentences[name] for name in checked if name in failed)
        raise CheckError(f"{len(failed)} of {len(results)} cases are above their tolerance: {faults}")
    for line in lines:
        if not line.passed:
            raise CheckError(
                f"{line.section}, {line.subject}: off by {line.error:.1e} and the tolerance is {line.tolerance:.1e}"
            )


def _check_name(name: str) -> None:
    """Refuse a path that is not a model directory before anything slow is imported."""
    if "/" not in name and not Path(name).is_dir():
        return  # the name of a model that is made on the spot; a wrong name is refused later, with the right ones
    if not (Path(name) / "config.json").is_file():
        inside = Path(name) / "model"
        hint = f"; did you mean {inside}?" if (inside / "config.json").is_file() else ""
        raise ConfigError(f"--model {name}: not a model directory, it has no config.json{hint}")


def _choose_cases(
    args: argparse.Namespace, facts: "Sequence[ModelFacts]", critics: Sequence[str], dtypes: Sequence[str]
) -> "Iterable[Case]":
    """All cases, or several coverings."""
    from raggedright.check.cases import all_cases, choices, covering_cases
    from raggedright.check.compare import able

    options = choices([of_model.model for of_model in facts], args.dp, dtypes)
    if args.full:
        return all_cases(options, able(facts, critics))
    coverings = (covering_cases(options, able(facts, critics), seed=args.seed + i) for i in range(NUM_COVERINGS))
    return dict.fromkeys(case for covering in coverings for case in covering)


def _run_cases(cases: "Sequence[Case]", longest: int | None) -> "list[Result]":
    import torch

    from raggedright.check.compare import run_case

    torch.set_num_threads(1)  # matrices are tiny: threads only wait for each other
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        return [run_case(case, longest) for case in progress.track(cases)]


def _run_sections(facts: "Sequence[ModelFacts]", critics: Sequence[str]) -> "list[Line]":
    """The checks that are not cases: advantages, weights after steps in two processes, and bfloat16."""
    from raggedright.check.advantage_check import run_advantages
    from raggedright.check.compare import run_half
    from raggedright.check.step_check import run_steps, step_cases

    actors = [of_model for of_model in facts if of_model.model not in critics]
    small = [of_model.model for of_model in facts if of_model.parameters <= MAX_PARAMETERS]
    steps = step_cases([a.model for a in actors if a.model in small], [name for name in critics if name in small])
    lines = run_advantages()
    lines += run_steps(steps) if steps else []
    for of_model in actors:
        collates = ("packed", "padded", "tree") if of_model.trees else ("packed", "padded")
        lines += run_half(of_model.model, collates)
    for name in critics:
        lines += run_half(name, ("packed", "padded"), critic=True)
    return lines


def _to_dict(
    results: "Sequence[Result]", facts: "Sequence[ModelFacts]", sentences: dict[str, str], lines: "Sequence[Line]"
) -> dict[str, object]:
    from raggedright.check.verdict import verdicts

    numbers = ("padding_rows", "rel_error", "metric_drift", "tolerance", "passed")
    return {
        "cases": [
            {**asdict(r.case), "critic": r.case.critic, **{name: getattr(r, name) for name in numbers}} for r in results
        ],
        "models": [{**asdict(of_model), "verdict": sentences.get(of_model.model)} for of_model in facts],
        "verdicts": [verdict.to_dict() for verdict in verdicts(results)],
        "max_rel_error": max((result.rel_error for result in results), default=0.0),
        "max_metric_drift": max((result.metric_drift for result in results), default=0.0),
        "more": [asdict(line) for line in lines],
        "passed": all(result.passed for result in (*results, *lines)),
    }


def _print_report(
    results: "Sequence[Result]", facts: "Sequence[ModelFacts]", sentences: dict[str, str], lines: "Sequence[Line]"
) -> None:
    """The tables, then the verdict about each model and what was not checked."""
    from raggedright.check.verdict import short_name, verdicts

    console = Console(emoji=False, highlight=False)
    table = _table(
        "Largest difference from the same rows run one by one",
        "model",
        "dtype",
        "collate",
        "cases",
        "gradient",
        "metrics",
    )
    for v in verdicts(results):
        names = (escape(short_name(v.model)), v.dtype, v.collate)
        table.add_row(
            *names, str(v.cases), f"{v.gradient:.1e}", f"{v.metrics:.1e}", f"{v.tolerance:.0e}", _verdict(v.right)
        )
    console.print(table)
    for section in dict.fromkeys(line.section for line in lines):
        explained = ", against rows one by one; tolerance: twice its rounding" if section == "bfloat16" else ""
        table = _table(section + explained, "", "checks", "difference")
        for line in lines:
            if line.section == section:
                numbers = (str(line.cases), f"{line.error:.1e}", f"{line.tolerance:.0e}")
                table.add_row(escape(line.subject), *numbers, _verdict(line.passed))
        console.print()
        console.print(table)
    console.print()
    for of_model in facts:
        sentence = sentences.get(of_model.model, f"{short_name(of_model.model)}: no case")
        for text in (sentence, *(f"  {note}" for note in (*_length_notes(of_model), *of_model.notes))):
            print(fill(text, console.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))
    if all(result.passed for result in (*results, *lines)):
        more = f" and {counted(sum(line.cases for line in lines), 'more check')}" if lines else ""
        print(f"{counted(len(results), 'case')}{more}, all within their tolerance")


def _table(title: str, *headings: str) -> Table:
    """A table without rows; the tolerance and the verdict are its last columns."""
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    table.add_column(headings[0], min_width=0 if headings[0] else 34, max_width=16 if headings[0] else 40, no_wrap=True)
    for heading in (*headings[1:], "tolerance"):
        table.add_column(heading, justify="left" if heading in ("dtype", "collate") else "right", no_wrap=True)
    table.add_column("")
    return table


def _verdict(passed: bool) -> str:
    return "[green]right[/]" if passed else "[red]wrong[/]"


def _length_notes(facts: "ModelFacts") -> Iterable[str]:
    """Which lengths of the config the rows exceeded, and which not."""
    lengths = facts.lengths
    if lengths.reached:
        tokens = ", ".join(f"{number:,}" for number in lengths.row_tokens)
        yield f"rows of {tokens} tokens reach {_named(lengths.reached)}"
    if lengths.not_reached:
        yield f"not reached: {_named(lengths.not_reached)}; rows have at most {lengths.limit:,} tokens (--longest)"


def _named(lengths: dict[str, int]) -> str:
    return ", ".join(dict.fromkeys(f"{name.rpartition('.')[2]} {value:,}" for name, value in lengths.items()))
