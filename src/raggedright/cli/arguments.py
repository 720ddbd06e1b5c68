"""What subcommands share: how one is declared, and the numbers that their options take."""

import argparse
import textwrap
from itertools import groupby

Commands = argparse._SubParsersAction  # argparse has no public name for it


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs at the terminal's width and keeps indented lines, which are examples, as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = groupby(text.splitlines(), key=lambda line: "example" if line.startswith(" ") else bool(line))
        filled = []
        for kind, lines in blocks:
            if kind is True:
                lines = [textwrap.fill(" ".join(lines), width, initial_indent=indent, subsequent_indent=indent)]
            filled += lines
        return "\n".join(filled)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names of choices have hyphens


def add_parser(
    commands: "Commands[argparse.ArgumentParser]", name: str, *, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """A subcommand whose help ends with examples as they are written."""
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )


def count(text: str) -> int:
    """An integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return number


def counts(text: str) -> list[int]:
    """Comma-separated integers of at least 1."""
    try:
        return [count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        message = f"{text!r} is not a list of integers of at least 1, such as 1,2,4"
        raise argparse.ArgumentTypeError(message) from None
