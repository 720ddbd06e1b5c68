"""`raggedright plan ROWS.jsonl`: plan a batch without a model, to look at it or to compare alignments."""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import BinaryIO, get_args

from rich.console import Console

from raggedright.cli.arguments import Commands, ReportProgress, add_parser, count, integer, progress_bar
from raggedright.errors import ConfigError, RowsError
from raggedright.ledger import close_ledger
from raggedright.plan.layout import Align, Collate, Layout, LossAgg, OverLong
from raggedright.plan.measure import WhatIf, compare_rules
from raggedright.plan.planner import Plan, make_plan
from raggedright.report.plan_output import plan_to_dict, print_comparison, print_plan
from raggedright.report.plan_svg import draw_plan
from raggedright.report.text import say
from raggedright.rows import Rows

EXAMPLES = """\
examples:
  raggedright plan rows.jsonl --dp 2 --batch-size 45 --mini-batch-size 15 \\
      --rollout-n 8
  raggedright plan rows.jsonl --dp 8 --batch-size 64 --mini-batch-size 32 \\
      --rollout-n 4 --compare
  cat rows.jsonl | raggedright plan - --dp 2 --batch-size 45 \\
      --mini-batch-size 15 --rollout-n 8 --format svg > plan.svg

A line of ROWS.jsonl is one row, a JSON object such as (here on two lines)
  {"prompt": "p0", "session": 0, "trajectory": 0, "prompt_tokens": 12,
   "response_tokens": 30, "loss_tokens": 30}

Without loss_tokens, all response tokens have loss.
"""
MAX_LINE_BYTES = 16 << 20  # a row has about 100; parsed JSON needs up to 30 times its size in memory
REPORT_LINES = 1_000  # lines of a file between two reports of progress


def add_command(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Declare the subcommand and its options."""
    parser = add_parser(
        commands,
        "plan",
        summary="plan a batch of rows: steps, ranks, micro-batches, weights",
        description="Plan a batch of ragged rows: the step, rank, micro-batch and weight of each.",
        epilog=EXAMPLES,
    )
    parser.usage = (
        "raggedright plan ROWS.jsonl --dp N --batch-size N --mini-batch-size N\n"
        "                        --rollout-n N [options]"
    )
    parser.add_argument("file", metavar="ROWS.jsonl", help="one JSON object per line; - reads standard input")
    add = parser.add_argument_group("the batch").add_argument
    add("--dp", dest="dp_size", type=count, required=True, metavar="N", help="data-parallel ranks (not the world size)")
    add("--batch-size", type=count, required=True, metavar="N", help="prompts in a batch")
    add("--mini-batch-size", type=count, required=True, metavar="N", help="prompts in an actor's mini-batch")
    add("--rollout-n", type=count, required=True, metavar="N", help="sessions per prompt")
    add("--critic-mini-batch-size", type=count, metavar="N", help="prompts in a critic's mini-batch, where one trains")
    add("--critic-warm-up", dest="actor_trains", action="store_false", help="the critic trains alone")
    add("--epochs", type=count, default=1, metavar="N", help="passes over the rows (default 1)")
    add("--seed", type=integer, default=0, metavar="N", help="shuffles prompts over steps (default 0)")
    add = parser.add_argument_group("alignment and weights").add_argument
    add(
        "--align", choices=get_args(Align), default="steps",
        help="steps: the step count is the config's (default); lcm: equal row counts, for engines that require them",
    )  # fmt: skip
    add(
        "--loss-agg", choices=get_args(LossAgg), default="token-mean", metavar="NAME",
        help=f"how loss tokens are weighted: {', '.join(get_args(LossAgg))} (default token-mean)",
    )  # fmt: skip
    add("--loss-norm-tokens", type=count, metavar="L", help="the constant of seq-mean-token-sum-norm")
    group = parser.add_argument_group("micro-batches")
    rule = group.add_mutually_exclusive_group()
    rule.add_argument("--micro-batch-tokens", type=count, metavar="N", help="token budget (default 8192)")
    rule.add_argument("--micro-batch-rows", type=count, metavar="N", help="row count, instead of a token budget")
    add = group.add_argument
    add(
        "--collate", choices=get_args(Collate), default="packed",
        help="packed (default) and tree count tokens, padded rectangles",
    )  # fmt: skip
    add("--micro-batch-multiple", type=count, default=1, metavar="N", help="for pipeline parallelism (default 1)")
    add("--min-row-tokens", type=count, default=2, metavar="N", help="for context parallelism (default 2)")
    add("--over-long", choices=get_args(OverLong), default="error", help="a row above the token budget (default error)")
    add = parser.add_argument_group("output").add_argument
    add("--format", choices=("table", "json", "svg"), default="table", help="default table")
    add("--compare", action="store_true", help="compare the alignments and the rules of other trainers")
    parser.set_defaults(run=lambda args: run(args, parser))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Read the rows, plan them and print the plan."""
    if args.compare and args.format == "svg":
        parser.error("argument --compare: not with --format svg, which draws one plan")
    options = {name: getattr(args, name) for name in Layout.__dataclass_fields__ if hasattr(args, name)}
    try:
        layout = Layout(**options)
    except ConfigError as error:
        parser.error(_with_options(str(error)))
    with progress_bar() as report:
        rows = _read(args.file, report)
        report(f"planning {len(rows):,} rows", 0, 0)
        start = time.perf_counter()
        try:
            plan = make_plan(rows, layout)
        except RowsError as error:
            raise RowsError(_with_options(str(error))) from None
        seconds = time.perf_counter() - start
        for warning in plan.warnings:
            say(f"warning: {_with_options(warning)}", error=True)
        rules = compare_rules(rows, layout, plan=plan, report=report) if args.compare else None
        report("writing", 0, 0)
        if args.format == "svg":
            text = draw_plan(plan)
        elif args.format == "json":
            comparison = {"compare": [asdict(rule) for rule in rules]} if rules else {}
            text = json.dumps({**plan_to_dict(plan, seconds), **comparison})
        else:
            text = _table(plan, seconds, rules)
    print(text)


def _table(plan: Plan, seconds: float, rules: Sequence[WhatIf] | None) -> str:
    """The table in the width and colours of the terminal."""
    console = Console(emoji=False, markup=False, highlight=False)
    with console.capture() as captured:
        print_plan(plan, seconds, console)
        console.print(str(close_ledger(plan)), soft_wrap=True)
        if rules:
            console.print()
            print_comparison(rules, console)
    return captured.get().rstrip("\n")


def _read(file: str, report: ReportProgress) -> Rows:
    try:
        with sys.stdin.buffer if file == "-" else open(file, "rb") as source:
            rows = Rows.from_jsonl(_reported(source, f"reading {_name(file)}", report))
    except OSError as error:
        raise RowsError(f"{file}: {error.strerror}; give a file of rows, or - for standard input") from None
    except RowsError as error:
        raise RowsError(f"{_name(file)}, {error}") from None
    if not len(rows):
        raise RowsError(f"{_name(file)} has no rows; a line is one row, a JSON object")
    return rows


def _reported(source: BinaryIO, activity: str, report: ReportProgress) -> Iterator[bytes]:
    """The lines of a file; reports how much of it is read."""
    size = os.fstat(source.fileno()).st_size  # 0 for a pipe
    read = 0
    for i, line in enumerate(iter(partial(source.readline, MAX_LINE_BYTES + 1), b"")):
        if len(line) > MAX_LINE_BYTES:
            raise RowsError(f"line {i + 1}: more than {MAX_LINE_BYTES:,} bytes; one line is one row, a JSON object")
        read += len(line)
        if i % REPORT_LINES == 0:
            report(activity, read, size)
        yield line


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def _as_option(setting: re.Match[str]) -> str:
    name, *values = filter(None, setting.groups())
    return f"--{name.replace('_', '-')} {' or '.join(values)}"


def _with_options(text: str) -> str:
    """A sentence with the names of settings replaced by those of options, and `name = 'value'` by `--name value`."""
    any_name = "|".join(Layout.__dataclass_fields__)
    text = re.sub(rf"\b({any_name}) = '([\w-]+)'(?: or '([\w-]+)')?", _as_option, text)
    options = {"dp_size": "--dp", "actor_trains is False": "--critic-warm-up is given"}
    names = [name for name in Layout.__dataclass_fields__ if "_" in name and name not in options]
    options |= {name: f"--{name.replace('_', '-')}" for name in names}
    return re.sub(r"\b(" + "|".join(options) + r")\b", lambda match: options[match[1]], text)
