"""The command line: one module per subcommand. Bad input is one sentence and exit code 1, wrong usage exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from raggedright.cli import check_command, plan_command, report_command, train_command
from raggedright.errors import RaggedRightError
from raggedright.files import disk_fault
from raggedright.report.text import say

EXIT_BAD_INPUT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def make_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all subcommands; it has the config's keys as options only if `argv` contains `train`."""
    parser = argparse.ArgumentParser(
        prog="raggedright",
        description="Ragged rollouts in, right batches out.",
        epilog="raggedright COMMAND --help has examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"raggedright {version('raggedright')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    plan_command.add_command(commands)
    check_command.add_command(commands)
    train_command.add_command(commands, argv)
    report_command.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; an error is one sentence on standard error."""
    _open_closed_streams()
    parser = make_parser(sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if unknown and not hasattr(args, "take_unknown"):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.unknown = unknown
    try:
        args.run(args)
        sys.stdout.flush()
    except RaggedRightError as error:
        say(f"raggedright: {error}", error=True)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        fault = disk_fault(error)
        if fault is None:
            raise
        place = f"{error.filename}: " if error.filename else ""
        say(f"raggedright: {place}{fault}; make room, and run it again", error=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _open_closed_streams() -> None:
    """Replace closed streams (`>&-`) by /dev/null; otherwise the next opened file would get their descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
