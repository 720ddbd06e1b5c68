"""How a run is asked to end: Ctrl-C, SIGTERM or SIGHUP, or a file named `stop` in the run folder.

The file is how a launcher passes signals on, since its ranks are not in the terminal's process group, and the only way
on Ray, where a rank is not its process's main thread and gets no signals. The first request ends the run cleanly:
sessions that run are cancelled, a round that trains is finished. A second signal ends the process at once.
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

STOP_FILE = "stop"
POLL_SECONDS = 0.2
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handlers = Mapping[signal.Signals, Callable[[int, FrameType | None], object] | int | None]


@contextmanager
def passing_on_signals(folder: Path) -> Iterator[None]:
    """For a launcher: the first signal is passed on to the ranks, the second ends all."""

    def handle(number: int, frame: FrameType | None) -> None:
        _restore(dict.fromkeys(before, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler})
        (folder / STOP_FILE).touch()
        _tell(number)

    before = _install(handle)
    try:
        yield
    finally:
        _restore(before)


class Stop:
    """Whether an end was asked for; `close` gives the signals back."""

    def __init__(self, folder: Path, cancel: Callable[[], None]) -> None:
        self.requested = False
        self._cancel, self._file = cancel, folder / STOP_FILE
        self._closed = threading.Event()
        self._before = _install(self._handle)
        threading.Thread(target=self._watch, name="stop", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        _restore(self._before)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if self._file.exists():
                _leave_lost_terminal()
                self._request()
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        _tell(number)
        self._request()

    def _request(self) -> None:
        self.requested = True
        self._cancel()


def _install(handle: Callable[[int, FrameType | None], None]) -> Handlers:
    """Handle the signals that ask for an end, except ignored ones (nohup); returns their handlers until now."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [number for number in ENDING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handle) for number in heard}


def _restore(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _tell(number: int) -> None:
    if number == signal.SIGINT:
        print("\nending the run; Ctrl-C again ends it at once", file=sys.stderr, flush=True)
    _leave_lost_terminal()


def _leave_lost_terminal() -> None:
    """Write to nowhere from now on where the terminal was closed: every write to it would be an error."""
    for file in (1, 2):
        if stat.S_ISCHR(os.fstat(file).st_mode) and not os.isatty(file):
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), file)
