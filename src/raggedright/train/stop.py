"""How a run is asked to end: Ctrl-C or SIGTERM, or a file named `stop` in the run folder.

The file is how the launcher passes Ctrl-C on, since its ranks are not in the terminal's process group, and the one way
on Ray, where a rank is not its process's main thread and gets no signals. The first request ends the run cleanly:
sessions that run are cancelled, a round that trains is finished. A second signal ends the process at once.
"""

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STOP_FILE = "stop"
POLL_SECONDS = 0.2


def ask_to_stop(folder: Path) -> None:
    """For a launcher: the first Ctrl-C is passed on to the ranks, the second ends all."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (folder / STOP_FILE).touch()
    _say_ending()


def _say_ending() -> None:
    print("\nending the run; Ctrl-C again ends it at once", file=sys.stderr, flush=True)


class Stop:
    """Whether an end was asked for; `close` gives the signals back."""

    def __init__(self, folder: Path, cancel: Callable[[], None]) -> None:
        self.requested = False
        self._cancel, self._file = cancel, folder / STOP_FILE
        self._closed = threading.Event()
        heard = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        threading.Thread(target=self._watch, name="stop", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if self._file.exists():
                self._request()
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number == signal.SIGINT:  # of a terminal: this process is the launcher, too
            _say_ending()
        self._request()

    def _request(self) -> None:
        self.requested = True
        self._cancel()
