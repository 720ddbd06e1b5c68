"""A progress bar on standard error for work that takes long, where that is a terminal; it is erased at the end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

DELAY_SECONDS = 1.0  # shorter work shows nothing

Report = Callable[[str, int, int], None]
"""Takes what is being done, and how much of how much of it is finished; a total of 0 means that it is not known."""


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Give the function that reports progress; without a terminal it does nothing."""
    console = Console(stderr=True)
    if not console.is_interactive:
        yield lambda doing, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None)
    timer = threading.Timer(DELAY_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total or None)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
