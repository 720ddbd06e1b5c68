"""Shared by the subcommands: how one is declared, the integers that options take, and a progress bar."""

import argparse
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

DELAY_SECONDS = 1.0  # shorter work shows no progress bar

Commands = argparse._SubParsersAction  # argparse has no public name for it
ReportProgress = Callable[[str, int, int], None]
"""Takes the current activity, the amount that is done, and the total; a total of 0 means that it is not known."""


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
    """Add a subcommand whose help ends with examples."""
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )


def integer(text: str) -> int:
    """Any integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not an integer, or has too many digits") from None


def count(text: str) -> int:
    """An integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not an integer of at least 1")
    return number


def counts(text: str) -> list[int]:
    """Comma-separated integers of at least 1."""
    try:
        return [count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        message = f"{text!r:.40} is not a list of integers of at least 1, such as 1,2,4"
        raise argparse.ArgumentTypeError(message) from None


@contextmanager
def progress_bar() -> Iterator[ReportProgress]:
    """Show a progress bar on standard error during long work, and erase it at the end; nothing without a terminal."""
    console = Console(stderr=True)
    if not console.is_interactive:
        yield lambda activity, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None)
    timer = threading.Timer(DELAY_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda activity, done, total: bar.update(task, description=activity, completed=done, total=total or None)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
