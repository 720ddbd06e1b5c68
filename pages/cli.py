"""docs/cli.md: every command's help, as it is printed."""

import argparse
import os
from unittest.mock import patch

from raggedright.cli import make_parser

HEAD = """\
# Commands

Exit codes: 0 done, 1 bad input (one sentence on standard error), 2 wrong usage, 130 interrupted. Every key of the
[config](config.md) is an option of `raggedright train`, too; `raggedright train --help-all` prints them. This page is
made by `make pages`.
"""


def page() -> str:
    """The page."""
    parser = make_parser(["train", "--help"])
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = [HEAD, _block(parser)]
    for name, command in commands.choices.items():
        parts += [f"## raggedright {name}\n", _block(command)]
    return "\n".join(parts)


def _block(parser: argparse.ArgumentParser) -> str:
    with patch.dict(os.environ, COLUMNS="120"):  # where argparse breaks its lines
        return f"```text\n{parser.format_help().rstrip()}\n```\n"
