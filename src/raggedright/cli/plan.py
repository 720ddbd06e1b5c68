"""`raggedright plan ROWS.jsonl`: plan a batch without a model, to look at it or to compare alignments."""

import argparse
import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import get_args

from rich.console import Console

from raggedright.cli.arguments import Commands, add_parser, count
from raggedright.errors import ConfigError, RowsError
from raggedright.ledger import close_ledger
from raggedright.plan.layout import Align, Collate, Layout, LossAgg, OverLong
from raggedright.plan.plan import make_plan
from raggedright.plan.what_if import compare_rules
from raggedright.report.comparison import print_comparison
from raggedright.report.plan_json import plan_to_dict
from raggedright.report.svg import draw_plan
from raggedright.report.table import print_plan
from raggedright.rows import Rows

EXAMPLES = """\
examples:
  raggedright plan rows.jsonl --dp 2 --batch-size 45 --mini-batch-size 15 --rollout-n 8
  raggedright plan rows.jsonl --dp 8 --batch-size 64 --mini-batch-size 32 --rollout-n 4 --compare
  cat rows.jsonl | raggedright plan - --dp 2 --batch-size 45 --mini-batch-size 15 --rollout-n 8 --format svg > plan.svg

A line of ROWS.jsonl is one row:
  {"prompt": "p0", "session": 0, "trajectory": 0, "prompt_tokens": 12, "response_tokens": 30, "loss_tokens": 30}
loss_tokens may be left out: all of the response.
"""


def add_command(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Declare the subcommand and its options."""
    parser = add_parser(
        commands,
        "plan",
        summary="plan a batch of rows: steps, ranks, micro-batches, weights",
        description="Plan a batch of ragged rows: the step, rank, micro-batch and weight of each.",
        epilog=EXAMPLES,
    )
    parser.usage = "raggedright plan ROWS.jsonl --dp N --batch-size N --mini-batch-size N --rollout-n N [options]"
    parser.add_argument("file", metavar="ROWS.jsonl", help="one JSON object a line; - reads standard input")
    add = parser.add_argument_group("the batch").add_argument
    add("--dp", dest="dp_size", type=count, required=True, metavar="N", help="data-parallel ranks (not the world size)")
    add("--batch-size", type=count, required=True, metavar="N", help="prompts in a batch")
    add("--mini-batch-size", type=count, required=True, metavar="N", help="prompts in an actor's mini-batch")
    add("--rollout-n", type=count, required=True, metavar="N", help="sessions a prompt")
    add("--critic-mini-batch-size", type=count, metavar="N", help="prompts in a critic's mini-batch, where one trains")
    add("--critic-warm-up", dest="actor_trains", action="store_false", help="the critic trains alone")
    add("--epochs", type=count, default=1, metavar="N", help="times that each row is trained (default 1)")
    add("--seed", type=int, default=0, metavar="N", help="shuffles prompts over steps (default 0)")
    add = parser.add_argument_group("alignment and weights").add_argument
    add(
        "--align", choices=get_args(Align), default="steps",
        help="steps: the step count is the config's (default); lcm: equal row counts, for engines that ask for them",
    )  # fmt: skip
    add("--loss-agg", choices=get_args(LossAgg), default="token-mean", help="what a token weighs (default token-mean)")
    add("--loss-norm-tokens", type=count, metavar="L", help="the constant of seq-mean-token-sum-norm")
    group = parser.add_argument_group("micro-batches")
    rule = group.add_mutually_exclusive_group()
    rule.add_argument("--micro-batch-tokens", type=count, metavar="N", help="token budget (default 8192)")
    rule.add_argument("--micro-batch-rows", type=count, metavar="N", help="row count, instead of a token budget")
    add = group.add_argument
    add(
        "--collate",
        choices=get_args(Collate),
        default="packed",
        help="packed (default) and tree count tokens, padded rectangles",
    )
    add("--micro-batch-multiple", type=count, default=1, metavar="N", help="asked for by pipeline parallel (default 1)")
    add("--min-row-tokens", type=count, default=2, metavar="N", help="asked for by context parallel (default 2)")
    add("--over-long", choices=get_args(OverLong), default="error", help="a row above the token budget (default error)")
    add = parser.add_argument_group("output").add_argument
    add("--format", choices=("table", "json", "svg"), default="table", help="default table")
    add("--compare", action="store_true", help="put the alignments, and the rules of other trainers, side by side")
    parser.set_defaults(run=lambda args: run(args, parser))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Read, plan, show."""
    if args.compare and args.format == "svg":
        parser.error("argument --compare: not with --format svg, which draws one plan")
    options = {name: getattr(args, name) for name in Layout.__dataclass_fields__ if hasattr(args, name)}
    try:
        layout = Layout(**options)
    except ConfigError as error:
        parser.error(_with_options(str(error)))
    rows = _read(args.file)
    if not len(rows):
        print(f"warning: {_name(args.file)} has no rows; a line is one row, a JSON object", file=sys.stderr)
    if rows.num_prompts > layout.batch_size:
        print(
            f"warning: {args.file} has {rows.num_prompts:,} prompts and --batch-size is {layout.batch_size:,}; "
            "steps are counted from the latter",
            file=sys.stderr,
        )
    if (most := _most_sessions(rows)) > layout.rollout_n:
        print(
            f"warning: {args.file} has a prompt of {most:,} sessions and --rollout-n is {layout.rollout_n:,}",
            file=sys.stderr,
        )
    start = time.perf_counter()
    try:
        plan = make_plan(rows, layout)
    except RowsError as error:
        raise RowsError(_with_options(str(error))) from None
    seconds = time.perf_counter() - start
    rules = compare_rules(rows, layout) if args.compare else None
    if args.format == "svg":
        print(draw_plan(plan))
    elif args.format == "json":
        comparison = {"compare": [asdict(rule) for rule in rules]} if rules else {}
        json.dump({**plan_to_dict(plan, seconds), **comparison}, sys.stdout)
        print()
    else:
        console = Console(emoji=False, markup=False)
        print_plan(plan, seconds, console)
        console.print(str(close_ledger(plan)), highlight=False)
        if rules:
            console.print()
            print_comparison(rules, console)


def _read(file: str) -> Rows:
    try:
        return Rows.from_jsonl(sys.stdin.buffer if file == "-" else file)
    except OSError as error:
        raise RowsError(f"{file}: {error.strerror}; give a file of rows, or - for standard input") from None
    except RowsError as error:
        raise RowsError(f"{_name(file)}, {error}") from None


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def _most_sessions(rows: Rows) -> int:
    """Sessions of the prompt that has the most."""
    sessions = dict.fromkeys(zip(rows.prompt.tolist(), rows.session.tolist(), strict=True))
    return max(Counter(prompt for prompt, _ in sessions).values(), default=0)


def _with_options(text: str) -> str:
    """A sentence about settings in the words of the command line."""
    options = {"dp_size": "--dp", "actor_trains is False": "--critic-warm-up is given"}
    names = [name for name in Layout.__dataclass_fields__ if "_" in name and name not in options]
    options |= {name: f"--{name.replace('_', '-')}" for name in names}
    return re.sub(r"\b(" + "|".join(options) + r")\b", lambda found: options[found[1]], text)
