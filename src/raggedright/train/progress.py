"""Live progress on a terminal, plain lines elsewhere: round, score, rows, padding, tokens a second, time left."""

from collections.abc import Mapping
from time import monotonic
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_A_LINE = 5.0


class Figures(NamedTuple):
    """What is shown of a round."""

    score: float
    rows: int
    padding_rows: int
    failed: int
    tokens_per_second: float
    first_failure: str = ""  # prompt/session: cause

    def __str__(self) -> str:
        failed = f"  {self.failed} failed" if self.failed else ""
        return (
            f"score {self.score:.3f}  {self.rows:,} rows + {self.padding_rows} padding{failed}  "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )


class Progress:
    """Shows a run as it goes; plain lines come every few seconds, and for the first and the last round."""

    def __init__(self, num_rounds: int, *, done: int = 0, console: Console | None = None) -> None:
        self._console = console or Console()
        self._num_rounds = num_rounds
        self._began = self._last_line = self._round_began = monotonic()
        self._rounds_here = 0
        self._told_of_failure = False
        self._bar: Bar | None = None
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(bar_width=12),
                TextColumn("{task.fields[words]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self._console,
            )
            self._task = self._bar.add_task(
                "", total=num_rounds, completed=done, words="going on" if done else "first round"
            )
            self._bar.start()

    def round(self, round: int, figures: Figures) -> None:
        """A round that has trained."""
        self._rounds_here += 1
        if figures.first_failure and not self._told_of_failure:
            self._told_of_failure = True
            self.say(f"round {round}: the first session that failed, {figures.first_failure}; others are in the report")
        now = self._round_began = monotonic()
        if self._bar is not None:
            self._last_line = now
            self._bar.update(self._task, completed=round, words=str(figures))
            return
        if round in (1, self._num_rounds) or now - self._last_line >= SECONDS_A_LINE:
            self._last_line = now
            left = (now - self._began) / self._rounds_here * (self._num_rounds - round)
            self.say(f"round {round}/{self._num_rounds}  {figures}  {_time(left)} left")

    def sessions(self, round: int, done: int, total: int) -> None:
        """Sessions of this rank have ended; shown in a round that takes longer than a line may be awaited."""
        now = monotonic()
        if now - max(self._last_line, self._round_began) < SECONDS_A_LINE:
            return
        self._last_line = now
        words = f"{done:,} of {total:,} sessions on this rank"
        if self._bar is not None:
            self._bar.update(self._task, words=words)
        else:
            self.say(f"round {round}/{self._num_rounds}  {words}")

    def evaluation(self, round: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after a round."""
        numbers = "  ".join(f"{name.removesuffix('/mean')} {value:.3f}" for name, value in metrics.items())
        self.say(f"round {round}  {numbers}")

    def say(self, line: str) -> None:
        """A line above the bar, or in its place among plain lines."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
