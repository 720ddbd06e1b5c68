"""`raggedright report RUN`: write the page about a training run from its events."""

import argparse
import webbrowser
from pathlib import Path

from raggedright.cli.arguments import Commands, add_parser
from raggedright.errors import ConfigError, install_hint
from raggedright.report.text import terminal_text

EXAMPLES = """\
examples:
  raggedright report runs/latest          write runs/latest/report.html
  raggedright report runs/latest --open   and show it in the browser

The page is one file without scripts, fonts or links: it can be mailed, archived and opened offline. It is made from
RUN/events.jsonl alone, also during the run; every run writes it when it ends.
"""


def add_command(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Declare the subcommand and its options."""
    parser = add_parser(
        commands,
        "report",
        summary="write the page about a training run",
        description="Write RUN/report.html, one self-contained page about a training run, and print its path.",
        epilog=EXAMPLES,
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run, the one with events.jsonl in it")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the page and print its path."""
    try:
        from raggedright.report.run_page import write_report
    except ModuleNotFoundError as error:
        raise ConfigError(f"report needs {error.name}; {install_hint('train')}") from None
    path = write_report(args.folder)
    print(terminal_text(str(path)))
    if args.open and not webbrowser.open(path.resolve().as_uri()):
        raise ConfigError(f"no browser could be started; open {path} in one yourself")
