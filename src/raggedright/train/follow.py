"""A run whose ranks are elsewhere, shown here: its events are read as they come, and shown as the first rank would.

The events are in the run folder, which the driver shares with the ranks; nothing else has to reach it. A file that
gets shorter was mended by a rank that started again, and is read on from its new end.
"""

import json
from collections.abc import Iterator
from math import nan
from pathlib import Path

from raggedright.config.schema import Config
from raggedright.report.event_fields import Fields
from raggedright.report.run_events import Eval, RoundEvent
from raggedright.train.progress import Figures, Progress
from raggedright.train.record import EVENTS_FILE, found_words


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
            event = Fields.of(EVENTS_FILE, json.loads(line))
            match event.text("event"):
                case "start":
                    self._start(event)
                case "round" if self.progress:
                    round = RoundEvent.of(event)
                    self.progress.round(round.round, _figures(round))
                case "eval" if self.progress:
                    evaluation = Eval.of(event)
                    self.progress.evaluation(evaluation.round, evaluation.metrics)

    def say(self, line: str) -> None:
        """A line among the others."""
        if self.progress is None:
            print(line, flush=True)
        else:
            self.progress.say(line)

    def close(self) -> None:
        """Show what is left, and leave the last state on the screen."""
        self.look()
        if self.progress is not None:
            self.progress.close()

    def _start(self, event: Fields) -> None:
        done = event.count("resumed_from") or 0
        if self.progress is not None:
            self.progress.close()
        self.progress = Progress(self._config.train.rounds, done=done)
        if words := found_words(self._config, done + 1, event.count("sessions_found") or 0):
            self.progress.say(words)


def _figures(round: RoundEvent) -> Figures:
    failed = sum(count for outcome, count in round.session_outcomes.items() if outcome.startswith("failed"))
    first = next((f"{each.prompt}/{each.session}: {each.cause}" for each in round.failed), "")
    return Figures(
        score=round.metrics.get("critic/score/mean", nan),
        rows=round.rows or 0,
        padding_rows=round.padding_rows or 0,
        failed=failed,
        tokens_per_second=round.metrics.get("perf/tokens_per_second", nan),
        first_failure=first,
    )
