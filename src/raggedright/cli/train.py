"""`raggedright train CONFIG`: the training run that a config describes, with any of its keys from the command line."""

import argparse
import fcntl
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from raggedright.cli.arguments import Commands, add_parser
from raggedright.errors import ConfigError, RaggedRightError, install_hint
from raggedright.files import write_file
from raggedright.report.text import counted, say, score_text

if TYPE_CHECKING:
    from pydantic_settings import CliSettingsSource

    from raggedright.config.schema import Config
    from raggedright.report.events import RunEvents
    from raggedright.rows import Rows

EXAMPLES = """\
examples:
  raggedright train configs/compaction.toml
  raggedright train configs/compaction.toml --train.rounds 20 --out runs/short
  raggedright train configs/compaction.toml --train.align lcm --dry-run

Every key of the config is an option (--help-all shows them, docs/config.md has a page about them). Lists and tables
are given as JSON; null stands for no value. Run the same command again to resume a run from its last checkpoint.
"""
CONFIG_FILE, EVENTS_FILE, LOCK_FILE = "config.toml", "events.jsonl", "lock"
RUN_FILES = (CONFIG_FILE, EVENTS_FILE, "rows.db", "rows.db-wal", "rows.db-shm", "run_id", "report.html", "stop")
RUN_FOLDERS = ("tensorboard", "wandb", "mlruns", "logs", "model", "model.new", "checkpoints", "ray")


def add_command(commands: "Commands[argparse.ArgumentParser]", argv: Sequence[str]) -> None:
    """Declare the subcommand; the config's keys, which take a moment to read, only where it is the one that runs."""
    parser = add_parser(
        commands,
        "train",
        summary="train a model with an agent of any number of trajectories",
        description="Train, round by round, and write a report.",
        epilog=EXAMPLES,
    )
    parser.usage = "raggedright train CONFIG [options] [--KEY VALUE ...]"
    parser.add_argument("--help-all", action=_HelpAll, help="show this help message with every key of the config")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the config and the plan of a made-up round, and stop; looks at no model, agent or prompt",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="remove the run that is in the run folder, and start again"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="K",
        help="start all ranks again up to K times when one dies",
    )
    parser.add_argument("--launcher", choices=("local", "ray"), help="on this machine alone, or on Ray")
    source = None
    if "train" in argv:
        from raggedright.cli.config_options import add_all_keys, add_changed_often

        if {"-h", "--help"} & {*argv}:
            add_changed_often(parser)
        else:
            source = add_all_keys(parser)
    parser.set_defaults(run=lambda args: run(args, source), take_unknown=True)


class _HelpAll(argparse.Action):
    """Prints the help of the parser, which has every key where no short help was asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.print_help()
        parser.exit()


def run(args: argparse.Namespace, source: object) -> None:
    """Read the config, check it, and train."""
    from pydantic_settings import CliSettingsSource

    from raggedright.config.load import dump_config, load_config

    assert isinstance(source, CliSettingsSource)
    overrides = _with_unknown(_read_options(args, source), args.unknown)
    short = {"max_restarts": args.max_restarts, "launcher": args.launcher}
    if given := {key: value for key, value in short.items() if value is not None}:
        overrides["parallel"] = {**cast(dict, overrides.get("parallel", {})), **given}
    config = load_config(args.config, overrides)
    for warning in config.warnings():
        say(f"warning: {warning}", error=True)
    if args.dry_run:
        _dry_run(config)
        return
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}; {install_hint('train')}") from None
    config = config.model_copy(update={"out": config.out.absolute()})  # an agent may change the working folder
    with _alone_in(config.out):
        _take_folder(config, fresh=args.fresh)
        write_file(config.out / CONFIG_FILE, dump_config(config).encode())
        _train(config)


def _read_options(args: argparse.Namespace, source: "CliSettingsSource[Config]") -> dict[str, object]:
    """The keys that were given as options; null is done here, since pydantic-settings takes none for a table."""
    from pydantic_settings import SettingsError

    nulls = [name for name, value in vars(args).items() if value in ("null", ["null"])]
    for name in nulls:
        delattr(args, name)
    try:
        values = dict(source(parsed_args=args)())
    except SettingsError as error:
        said = str(error).removeprefix("Parsing error encountered for ")
        raise ConfigError(f"{said}; lists and tables are given as JSON, such as '{{\"tries\": 3}}'") from None
    for name in nulls:
        section, _, key = name.rpartition(".")
        inside = cast(dict, values.get(section, {}))
        values |= {section: {**inside, key: None}} if section else {key: None}
    return values


def _with_unknown(values: Mapping[str, object], unknown: Sequence[str]) -> dict[str, object]:
    """The values with options that are no keys among them, so that they are refused along with all other faults."""
    merged = dict(values)
    for before, option in pairwise(["", *unknown]):
        is_value = before.startswith("--") and "=" not in before
        if option.startswith("--"):
            section, _, key = option[2:].partition("=")[0].partition(".")
            inside = merged.get(section, {})
            merged[section] = {**inside, key: option} if key and isinstance(inside, Mapping) else option
        elif not is_value:
            raise ConfigError(f"{option!r} is not an option; set a key with --KEY VALUE, such as --train.rounds 10")
    return merged


def _train(config: "Config") -> None:
    """Run to the end, whichever it is, and say what is there."""
    from raggedright.train.launch import launch

    critic = f", critic mini_batch_size {config.critic.mini_batch_size}" if config.has_critic else ""
    say(
        f"{config.agent.name}: {counted(config.train.rounds, 'round')}, dp {config.parallel.dp}, batch_size "
        f"{config.train.batch_size}, mini_batch_size {config.train.mini_batch_size}{critic}, rollout.n "
        f"{config.rollout.n}, align {config.train.align}; starting"
    )
    try:
        launch(config, apart=True)
    except BaseException:
        if (config.out / EVENTS_FILE).exists():
            _try_to_finish(config.out)
        raise
    if _finish(config.out) == "interrupted":
        raise KeyboardInterrupt


def _try_to_finish(folder: Path) -> None:
    """Write a report of what there is of a run that failed; the error that ended it comes after this and says more."""
    try:
        _finish(folder)
    except (RaggedRightError, OSError) as error:
        say(f"there is no report: {error}", error=True)


def _finish(folder: Path) -> str:
    """Write the report and say what there is; how the run ended."""
    from raggedright.report.events import read_events
    from raggedright.report.run_page import write_report

    events = read_events(folder / EVENTS_FILE)
    say(_last_lines(folder, events))
    say(f"report: {write_report(folder)}")
    return events.end.reason if events.end else "cut off"


def _last_lines(folder: Path, events: "RunEvents") -> str:
    """How the run ended and what was kept."""
    from raggedright.report.run_numbers import ends_of, wall_seconds
    from raggedright.report.text import duration

    reason = events.end.reason if events.end else "cut off"
    scores = [round.metrics["critic/score/mean"] for round in events.rounds if "critic/score/mean" in round.metrics]
    score = "no round trained"
    if scores:
        before, after, few = ends_of(scores)
        of = f"mean of the first and the last {counted(few, 'round')}" if few > 1 else "of the first and the last round"
        score = f"score {score_text(after)}"
        if len(scores) > 1:
            score = f"score {score_text(before)} -> {score_text(after)} ({of})"
    checkpoints = sorted((folder / "checkpoints").glob("round-*"))
    kept = f"events of {counted(len(scores), 'round')}"
    kept += f", the checkpoint of round {int(checkpoints[-1].name[6:])}" if checkpoints else ""
    kept += ", the model" if (folder / "model").is_dir() else ""
    again = "; run the same command again to resume" if reason in ("interrupted", "cut off") else ""
    took = f"{counted(len(scores), 'round')} in {duration(wall_seconds(events))}"
    return f"{reason} after {took}: {score}\nkept in {folder}: {kept}{again}"


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the run folder, made if it is not there, so that no second run writes into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"out is {folder}: {error.strerror}; give a folder that can be written") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is being trained in by another process; wait for it, or give --out") from None
        yield


def _take_folder(config: "Config", *, fresh: bool) -> None:
    """See whether the run in the folder can go on, or remove it where that was asked for."""
    folder = config.out
    begun = (folder / CONFIG_FILE).exists() and (folder / EVENTS_FILE).exists()
    if not fresh and (begun or any((folder / "checkpoints").glob("round-*"))):
        _check_same_run(config)
        return
    for name in (*RUN_FILES, *RUN_FOLDERS) if fresh else ():
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _check_same_run(config: "Config") -> None:
    """Refuse to go on with a run under a config that would make it another one, and say what else differs."""
    from raggedright.config.resume import changes

    changed = changes(_config_before(config.out), config)
    if changed:
        say(f"changed since the run began: {'; '.join(changed)}")


def _config_before(folder: Path) -> "Config":
    """The config of the run in the folder; where its file is gone or damaged, the last checkpoint has a copy."""
    from raggedright.config.load import load_config, parse_config
    from raggedright.train.checkpoint import check_files, last_checkpoint

    try:
        return load_config(folder / CONFIG_FILE)
    except ConfigError as error:
        last = last_checkpoint(folder)
        if last is None:
            raise ConfigError(
                f"{folder} holds a run whose config cannot be read ({str(error).splitlines()[0]}), and no checkpoint "
                "has a copy of it; start again with --fresh, or give another --out"
            ) from None
        return parse_config(check_files(last[1]).config, source=f"the config in {last[1]}")


def _dry_run(config: "Config") -> None:
    from raggedright.config.load import dump_config
    from raggedright.plan.plan import make_plan
    from raggedright.report.plan_output import print_plan

    console = Console(emoji=False, markup=False)
    print(dump_config(config), flush=True)
    began = time.perf_counter()
    plan = make_plan(_made_up_rows(config), config.layout(1))
    for warning in plan.warnings:
        say(f"warning: {warning}", error=True)
    console.print("a made-up first round, one to four rows per session of any length that fits:\n", highlight=False)
    print_plan(plan, time.perf_counter() - began, console)
    sys.stdout.flush()


def _made_up_rows(config: "Config") -> "Rows":
    """Rows such as a first round may have; lengths are guesses within the limits of the config."""
    from raggedright.report.events import COLUMNS
    from raggedright.rows import Rows

    chance = random.Random(config.seed)
    budget = config.layout(1).micro_batch_tokens or 2 * config.rollout.max_tokens
    context = (config.model.made or {}).get("max_position_embeddings")
    longest = min(config.rollout.max_row_tokens or budget, budget, context if isinstance(context, int) else budget)
    response = max(1, min(config.rollout.max_tokens, longest // 2))
    records = []
    for prompt in range(config.train.batch_size):
        prompt_tokens = chance.randint(1, max(1, longest - response))
        for session in range(config.rollout.n):
            for trajectory in range(chance.randint(1, 4)):
                tokens = chance.randint(1, response)
                records.append((str(prompt), session, trajectory, prompt_tokens, tokens, tokens))
    columns = zip(COLUMNS, zip(*records, strict=True), strict=True)
    return Rows.from_columns(**{name: list(column) for name, column in columns})
