"""A run whose ranks are elsewhere, shown here: its events are read as they come, and shown as the first rank would.

The events are in the run folder, which the driver shares with the ranks; nothing else has to reach it. A file that
gets shorter was mended by a rank that started again, and is read on from its new end.
"""

from collections.abc import Iterator
from pathlib import Path

from raggedright.config.schema import Config
from raggedright.report.events import EVENTS_FILE, EvalEvent, RoundEvent, StartEvent, WarningEvent, parse_event
from raggedright.report.text import terminal_text
from raggedright.train.progress import Progress
from raggedright.train.record import figures_of, found_words


class Lines:
    """The whole lines that are added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new(self) -> Iterator[str]:
        """Those since the last look."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._at:
                self._at, self._rest = size, b""
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)


class Follower:
    """Shows a run from its events."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lines = Lines(config.out / EVENTS_FILE)
        self.progress: Progress | None = None

    def look(self) -> None:
        """Show what is new."""
        for line in self._lines.new():
            match event := parse_event(EVENTS_FILE, line.encode()):
                case StartEvent():
                    self._start(event)
                case RoundEvent() if self.progress:
                    self.progress.round(event.round, figures_of(event))
                case EvalEvent() if self.progress:
                    self.progress.evaluation(event.round, event.metrics)
                case WarningEvent() if self.progress:
                    self.progress.warn(event.text)

    def say(self, line: str) -> None:
        """A line among the others."""
        if self.progress is None:
            print(terminal_text(line), flush=True)
        else:
            self.progress.say(line)

    def close(self) -> None:
        """Show what is left, and leave the last state on the screen."""
        self.look()
        if self.progress is not None:
            self.progress.close()

    def _start(self, event: StartEvent) -> None:
        if self.progress is not None:
            self.progress.close()
        self.progress = Progress(self._config.train.rounds, done=event.resumed_from)
        if words := found_words(self._config, event.resumed_from + 1, event.sessions_found):
            self.progress.say(words)
