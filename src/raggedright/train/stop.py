"""How a run is asked to stop: Ctrl-C, SIGTERM or SIGHUP, or a file named `stop` in the run folder.

A launcher passes signals on through the file, since its ranks are not in the terminal's process group. On Ray the file
is the only way, because a rank is not in the main thread of its process and gets no signals. The first request ends the
run cleanly: running sessions are cancelled, and a round that is training is finished. A second signal ends the process
immediately.
"""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raggedright.files import open_to_append

STOP_FILE = "stop"
POLL_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handlers = Mapping[signal.Signals, Callable[[int, FrameType | None], object] | int | None]


@contextmanager
def passing_on_signals(folder: Path) -> Iterator[None]:
    """For a launcher: the first signal is passed on to the ranks, the second ends everything."""

    def handle(number: int, frame: FrameType | None) -> None:
        _restore(dict.fromkeys(handlers, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler})
        open_to_append(folder / STOP_FILE).close()
        _announce(number)

    handlers = _install(handle)
    try:
        yield
    finally:
        _restore(handlers)


class StopRequest:
    """Whether the run was asked to stop; `close` restores the signal handlers."""

    def __init__(self, folder: Path, cancel: Callable[[], None]) -> None:
        self.requested = False
        self._cancel, self._file = cancel, folder / STOP_FILE
        self._closed = threading.Event()
        self._handlers = _install(self._handle)
        threading.Thread(target=self._watch, name="stop", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        _restore(self._handlers)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if self._file.exists():
                _detach_lost_terminal()
                self._request()
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        _announce(number)
        self._request()

    def _request(self) -> None:
        self.requested = True
        self._cancel()


def _install(handle: Callable[[int, FrameType | None], None]) -> Handlers:
    """Handle the stop signals, except ignored ones (nohup); returns the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handle) for number in handled}


def _restore(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _announce(number: int) -> None:
    if number == signal.SIGINT:
        print("\nending the run; Ctrl-C again ends it at once", file=sys.stderr, flush=True)
    _detach_lost_terminal()


def _detach_lost_terminal() -> None:
    """If the terminal was closed, discard further output: every write to it would be an error."""
    for file in (1, 2):
        if stat.S_ISCHR(os.fstat(file).st_mode) and not os.isatty(file):
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), file)
