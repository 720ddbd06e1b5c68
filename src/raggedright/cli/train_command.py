"""`raggedright train CONFIG`: the training run that a config describes; every key of the config is also an option."""

import argparse
import fcntl
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from raggedright.cli.arguments import Commands, add_parser, integer
from raggedright.errors import ConfigError, RaggedRightError, install_hint
from raggedright.files import check_kind, write_file
from raggedright.report.text import counted, duration, say, score_text

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

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
CHANGED_OFTEN = (
    "out", "model.path", "agent.name", "rollout.n", "rollout.max_tokens", "train.rounds", "train.batch_size",
    "train.mini_batch_size", "optimizer.lr", "parallel.dp",
)  # fmt: skip
METAVARS = {int: "N", float: "NUMBER", bool: "{true,false}", str: "TEXT", Path: "PATH"}  # JSON for the others
MAX_METAVAR = 45  # characters; longer lists of choices are in the help text of the key
CONFIG_FILE, EVENTS_FILE, LOCK_FILE = "config.toml", "events.jsonl", "lock"
RUN_FILES = (
    CONFIG_FILE, EVENTS_FILE, "rows.db", "rows.db-wal", "rows.db-shm", "run_id", "report.html", "stop",
)  # fmt: skip
RUN_FOLDERS = ("tensorboard", "wandb", "mlruns", "logs", "model", "model.new", "checkpoints", "ray")


def add_command(commands: "Commands[argparse.ArgumentParser]", argv: Sequence[str]) -> None:
    """Declare the subcommand; the config's keys, which take time to import, only if `argv` contains `train`."""
    parser = add_parser(
        commands,
        "train",
        summary="train a model with an agent of any number of trajectories",
        description="Train, round by round, and write a report.",
        epilog=EXAMPLES,
    )
    parser.usage = "raggedright train CONFIG [options] [--KEY VALUE ...]"
    add = parser.add_argument
    add("--help-all", action=_HelpAll, nargs=0, help="show this help message with every key of the config")
    add("config", type=Path, metavar="CONFIG", help="a TOML file")
    add(
        "--dry-run", action="store_true",
        help="print the config and the plan of a made-up round, and stop; looks at no model, agent or prompt",
    )  # fmt: skip
    add("--fresh", action="store_true", help="remove the run that is in the run folder, and start again")
    add("--max-restarts", type=integer, metavar="K", help="start all ranks again up to K times when one dies")
    add("--launcher", choices=("local", "ray"), help="on this machine alone, or on Ray")
    if "train" in argv:
        _add_keys(parser, short={"-h", "--help"} & {*argv} != set())
    parser.set_defaults(run=run, take_unknown=True)


class _HelpAll(argparse.Action):
    """Prints the help of the parser, which has every key unless the short help was asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.print_help()
        parser.exit()


def _add_keys(parser: argparse.ArgumentParser, *, short: bool) -> None:
    """Declare the keys of the config as options; `short` declares those that are changed most often."""
    from raggedright.config.load import SECTIONS, keys

    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    if short:
        often = parser.add_argument_group("config keys that are changed most often (--help-all shows all of them)")
        groups = dict.fromkeys(("", *SECTIONS), often)
    else:
        groups |= {name: parser.add_argument_group(f"{name} options", each.__doc__) for name, each in SECTIONS.items()}
    fields = keys()
    for key in CHANGED_OFTEN if short else fields:
        metavar, words = _key_help(fields[key])
        group = groups[key.rpartition(".")[0]]
        group.add_argument(f"--{key}", metavar=metavar, help=words, default=argparse.SUPPRESS)


def _key_help(field: "FieldInfo") -> tuple[str, str]:
    """The placeholder for the value of a key, and its description with the default."""
    from raggedright.config.load import kinds

    of_key, description = kinds(field.annotation), field.description or ""
    choices = [kind for kind in of_key if isinstance(kind, str)]
    metavar = METAVARS.get(of_key[0], "JSON") if not choices else "{" + ",".join(choices) + "}"  # pyright: ignore[reportArgumentType, reportCallIssue]
    if len(metavar) > MAX_METAVAR:
        metavar, description = "NAME", f"{description} One of {', '.join(choices)}."
    if field.is_required():
        description += " (no default)"
    elif field.default is not None and field.default != {}:
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        description += f" (default {default})"
    return metavar, description.replace("%", "%%")


def run(args: argparse.Namespace) -> None:
    """Read the config, check it, and train."""
    from raggedright.config.load import dump_config, load_config

    config = load_config(args.config, _overrides(args))
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
    with _lock(config.out):
        _prepare_folder(config, fresh=args.fresh)
        write_file(config.out / CONFIG_FILE, dump_config(config).encode())
        _train(config)


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    """The keys that were set by options; an unknown option is among them, and refused with all other faults."""
    from raggedright.config.load import keys

    options = {key: value for key, value in vars(args).items() if key in keys()}
    short_options = {"parallel.max_restarts": args.max_restarts, "parallel.launcher": args.launcher}
    options |= {key: value for key, value in short_options.items() if value is not None}
    for before, word in pairwise(["", *args.unknown]):
        if word.startswith("--"):
            key, _, options[key] = word[2:].partition("=")
        elif before.startswith("--") and "=" not in before:
            options[before[2:]] = word
        else:
            raise ConfigError(f"{word!r} is not an option; set a key with --KEY VALUE, such as --train.rounds 10")
    overrides: dict[str, object] = {}
    for key, value in options.items():
        section, _, name = key.partition(".")
        table = overrides.get(section, {})
        overrides[section] = {**table, name: value} if name and isinstance(table, dict) else value
    return overrides


def _train(config: "Config") -> None:
    """Train to the end, then print a summary and write the report, also if the run failed."""
    from raggedright.train.launch import launch

    critic = f", critic mini_batch_size {config.critic.mini_batch_size}" if config.has_critic else ""
    say(
        f"{config.agent.name}: {counted(config.train.rounds, 'round')}, dp {config.parallel.dp}, batch_size "
        f"{config.train.batch_size}, mini_batch_size {config.train.mini_batch_size}{critic}, rollout.n "
        f"{config.rollout.n}, align {config.train.align}; starting"
    )
    try:
        launch(config, apart=True)
    except BaseException:  # its message is printed last
        if (config.out / EVENTS_FILE).exists():
            try:
                _finish(config.out)
            except (RaggedRightError, OSError) as error:
                say(f"there is no report: {error}", error=True)
        raise
    if _finish(config.out) == "interrupted":
        raise KeyboardInterrupt


def _finish(folder: Path) -> str:
    """Print the summary of a run, write its report, and return how the run ended."""
    from raggedright.report.events import read_events
    from raggedright.report.run_page import write_report

    events = read_events(folder / EVENTS_FILE)
    reason = events.end.reason if events.end else "cut off"
    say(_summary(folder, events, reason))
    say(f"report: {write_report(folder)}")
    return reason


def _summary(folder: Path, events: "RunEvents", reason: str) -> str:
    """How the run ended, and what is in its folder."""
    from raggedright.report.run_numbers import SCORE, ends_of, wall_seconds

    scores = [round.metrics[SCORE] for round in events.rounds if SCORE in round.metrics]
    rounds, score = counted(len(scores), "round"), "no round trained"
    if len(scores) == 1:
        score = f"score {score_text(scores[0])}"
    elif scores:
        first, last, window = ends_of(scores)
        means = f"mean of the first and the last {window} rounds" if window > 1 else "of the first and the last round"
        score = f"score {score_text(first)} -> {score_text(last)} ({means})"
    checkpoints = sorted((folder / "checkpoints").glob("round-*"))
    kept = f"events of {rounds}"
    kept += f", the checkpoint of round {int(checkpoints[-1].name[6:])}" if checkpoints else ""
    kept += ", the model" if (folder / "model").is_dir() else ""
    kept += "; run the same command again to resume" if reason in ("interrupted", "cut off") else ""
    return f"{reason} after {rounds} in {duration(wall_seconds(events))}: {score}\nkept in {folder}: {kept}"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Create the run folder if it does not exist, and lock it, so that no second run writes into it."""
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


def _prepare_folder(config: "Config", *, fresh: bool) -> None:
    """Check that the run in the folder can be resumed with this config; `fresh` removes the run instead."""
    from raggedright.config.key_rules import resume_changes

    folder, names = config.out, (*RUN_FILES, *RUN_FOLDERS)
    has_started = (folder / CONFIG_FILE).exists() and (folder / EVENTS_FILE).exists()
    if fresh:
        for path in (folder / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return
    for name in names:
        check_kind(folder / name, folder=name in RUN_FOLDERS)
    if has_started or any((folder / "checkpoints").glob("round-*")):
        changes = resume_changes(_previous_config(folder), config)
        if changes:
            say(f"changed since the run began: {'; '.join(changes)}")


def _previous_config(folder: Path) -> "Config":
    """The config of the run in the folder; if its file is missing or damaged, the copy in the last checkpoint."""
    from raggedright.config.load import load_config, parse_config
    from raggedright.train.checkpoint import check_files, last_checkpoint

    try:
        return load_config(folder / CONFIG_FILE)
    except ConfigError as error:
        last = last_checkpoint(folder)
        if last is None:
            raise ConfigError(
                f"{folder} contains a run whose config cannot be read ({str(error).splitlines()[0]}), and there is no "
                "checkpoint with a copy of it; start again with --fresh, or give another --out"
            ) from None
        return parse_config(check_files(last[1]).config, source=f"the config in {last[1]}")


def _dry_run(config: "Config") -> None:
    """Print the resolved config and the plan of a made-up round."""
    from raggedright.config.load import dump_config
    from raggedright.plan.planner import make_plan
    from raggedright.report.plan_output import print_plan

    console = Console(emoji=False, markup=False)
    print(dump_config(config), flush=True)
    start = time.perf_counter()
    plan = make_plan(_made_up_rows(config), config.layout(1))
    for warning in plan.warnings:
        say(f"warning: {warning}", error=True)
    console.print("a made-up first round, one to four rows per session of any length that fits:\n", highlight=False)
    print_plan(plan, time.perf_counter() - start, console)
    sys.stdout.flush()


def _made_up_rows(config: "Config") -> "Rows":
    """Rows that a first round may have; lengths are guesses within the limits of the config."""
    from raggedright.rows import Rows

    rng = random.Random(config.seed)
    budget = config.layout(1).micro_batch_tokens or 2 * config.rollout.max_tokens
    context = (config.model.made or {}).get("max_position_embeddings")
    longest = min(config.rollout.max_row_tokens or budget, budget, context if isinstance(context, int) else budget)
    response = max(1, min(config.rollout.max_tokens, longest // 2))
    records = []
    for prompt in range(config.train.batch_size):
        prompt_tokens = rng.randint(1, max(1, longest - response))
        for session in range(config.rollout.n):
            for trajectory in range(rng.randint(1, 4)):
                row = {"prompt": str(prompt), "session": session, "trajectory": trajectory}
                records.append({**row, "prompt_tokens": prompt_tokens, "response_tokens": rng.randint(1, response)})
    return Rows.from_records(records)
