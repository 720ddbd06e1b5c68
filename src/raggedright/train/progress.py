"""Live progress on a terminal, plain lines elsewhere: round, score, rows, padding, tokens a second, time left."""

from collections.abc import Mapping
from math import isnan, nan
from time import monotonic
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from raggedright.report.text import print_text, score_text

SECONDS_A_LINE = 5.0


class Figures(NamedTuple):
    """What is shown of a round."""

    score: float
    rows: int
    padding_rows: int
    failed: int
    tokens_per_second: float
    first_failure: str = ""  # prompt/session: cause
    score_std: float = nan
    shares: Mapping[str, float] = {}  # by their names here; those of zero are not shown

    def __str__(self) -> str:
        spread = "" if isnan(self.score_std) else f" std {score_text(self.score_std)}"
        failed = f"  {self.failed} failed" if self.failed else ""
        shares = "".join(f"  {name} {share:.0%}" for name, share in self.shares.items() if share)
        return (
            f"score {score_text(self.score)}{spread}  {self.rows:,} rows + {self.padding_rows} padding"
            f"{failed}{shares}  {self.tokens_per_second:,.0f} tokens/s"
        )


SHARES = {  # what the console calls a metric
    "prompts/no_signal_ratio": "no signal",
    "response_length/clip_ratio": "cut",
    "rows/no_loss_ratio": "no loss",
}


def shares_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The shares that the console shows, by their names there."""
    return {words: metrics[name] for name, words in SHARES.items() if name in metrics}


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
                TextColumn("{task.fields[words]}", table_column=Column(ratio=1)),  # the one that may take two lines
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task(
                "", total=num_rounds, completed=done, words="resuming" if done else "first round"
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
        numbers = "  ".join(f"{name.removesuffix('/mean')} {score_text(value)}" for name, value in metrics.items())
        self.say(f"round {round}  {numbers}")

    def say(self, line: str) -> None:
        """A line above the bar, or in its place among plain lines."""
        print_text(self._console, line)

    def warn(self, text: str) -> None:
        """A warning, which stands out on a terminal."""
        print_text(self._console, f"warning: {text}", style="yellow")

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
