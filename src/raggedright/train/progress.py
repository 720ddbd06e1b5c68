"""What a run shows in the terminal: a live progress bar, or plain lines where the output is not a terminal.

The first rank shows its rounds as it trains. If the ranks run on other machines, the driver follows the events file in
the run folder, which it shares with the ranks, and shows the same. An events file that became shorter was repaired by a
rank that started again; reading continues at its new end.
"""

from collections.abc import Iterator
from math import isnan, nan
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from raggedright.config.schema import Config
from raggedright.report.events import EVENTS_FILE, EvalEvent, RoundEvent, StartEvent, WarningEvent, parse_event
from raggedright.report.text import print_text, score_text, terminal_text

SECONDS_PER_LINE = 5.0
RATIOS = {  # metrics that are shown unless they are zero, and their names in the terminal
    "prompts/no_signal_ratio": "no signal",
    "response_length/clip_ratio": "cut",
    "rows/no_loss_ratio": "no loss",
}


def round_text(event: RoundEvent) -> str:
    """The numbers of a round in one line."""
    metrics = event.metrics
    std = metrics.get("critic/score/std", nan)
    spread = "" if isnan(std) else f" std {score_text(std)}"
    num_failed = sum(count for outcome, count in event.ledger.sessions.items() if outcome.startswith("failed"))
    failed = f"  {num_failed} failed" if num_failed else ""
    ratios = "".join(f"  {text} {metrics[name]:.0%}" for name, text in RATIOS.items() if metrics.get(name))
    return (
        f"score {score_text(metrics.get('critic/score/mean', nan))}{spread}  "
        f"{event.rows or 0:,} rows + {event.padding_rows or 0} padding"
        f"{failed}{ratios}  {metrics.get('perf/tokens_per_second', nan):,.0f} tokens/s"
    )


def resume_text(config: Config, first_round: int, num_found: int) -> str:
    """What a resumed run has found and what is left to do; empty for a new run."""
    if first_round == 1 and not num_found:
        return ""
    total = f" of {config.train.batch_size * config.rollout.n:,}" if not config.rollout.dynamic_sampling else ""
    checkpoint = f"the checkpoint of round {first_round - 1}" if first_round > 1 else "no checkpoint"
    left = max(0, config.train.rounds - first_round + 1)
    if not left:
        done = f"all {config.train.rounds:,} rounds are done; raise train.rounds for more"
        return f"{config.out}: found {checkpoint}, and {done}"
    return (
        f"resuming {config.out}: found {checkpoint} and {num_found:,}{total} sessions of round "
        f"{first_round}; {left:,} of {config.train.rounds:,} rounds to go"
    )


class Progress:
    """Shows a run; plain lines appear every few seconds, and for the first and the last round."""

    def __init__(self, num_rounds: int, *, done: int = 0, console: Console | None = None) -> None:
        self._console = console or Console()
        self._num_rounds = num_rounds
        self._start = self._last_line = self._round_start = monotonic()
        self._rounds_shown = 0
        self._has_shown_failure = False
        self._bar: Bar | None = None
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(bar_width=12),
                TextColumn("{task.fields[text]}", table_column=Column(ratio=1)),  # the one that may take two lines
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self._console,
                expand=True,
            )
            text = "resuming" if done else "first round"
            self._task = self._bar.add_task("", total=num_rounds, completed=done, text=text)
            self._bar.start()

    def show(self, event: object) -> None:
        """Show an event, if it is one that the terminal shows."""
        match event:
            case RoundEvent():
                self._show_round(event)
            case EvalEvent(round=round):
                metrics = event.metrics.items()
                numbers = "  ".join(f"{name.removesuffix('/mean')} {score_text(value)}" for name, value in metrics)
                self.say(f"round {round}  {numbers}")
            case WarningEvent(text=text):
                print_text(self._console, f"warning: {text}", style="yellow")

    def _show_round(self, event: RoundEvent) -> None:
        self._rounds_shown += 1
        if event.failed and not self._has_shown_failure:
            self._has_shown_failure = True
            first = event.failed[0]
            failure = f"{first.prompt}/{first.session}: {first.cause}"
            self.say(f"round {event.round}: the first session that failed, {failure}; others are in the report")
        now = self._round_start = monotonic()
        if self._bar is not None:
            self._last_line = now
            self._bar.update(self._task, completed=event.round, text=round_text(event))
            return
        if event.round in (1, self._num_rounds) or now - self._last_line >= SECONDS_PER_LINE:
            self._last_line = now
            left = (now - self._start) / self._rounds_shown * (self._num_rounds - event.round)
            self.say(f"round {event.round}/{self._num_rounds}  {round_text(event)}  {_time(left)} left")

    def sessions(self, round: int, done: int, total: int) -> None:
        """Show how many sessions of this rank have ended, in a round that takes longer than a line interval."""
        now = monotonic()
        if now - max(self._last_line, self._round_start) < SECONDS_PER_LINE:
            return
        self._last_line = now
        text = f"{done:,} of {total:,} sessions on this rank"
        if self._bar is not None:
            self._bar.update(self._task, text=text)
        else:
            self.say(f"round {round}/{self._num_rounds}  {text}")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        print_text(self._console, line)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class NewLines:
    """The complete lines that are added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._incomplete = b""

    def read(self) -> Iterator[str]:
        """The lines since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._offset:
                self._offset, self._incomplete = size, b""
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


class Follower:
    """Shows a run that trains elsewhere, from its events."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lines = NewLines(config.out / EVENTS_FILE)
        self.progress: Progress | None = None

    def poll(self) -> None:
        """Show new events."""
        for line in self._lines.read():
            event = parse_event(EVENTS_FILE, line.encode())
            if isinstance(event, StartEvent):
                self._start(event)
            elif self.progress is not None:
                self.progress.show(event)

    def say(self, line: str) -> None:
        """Print a line between the others."""
        if self.progress is None:
            print(terminal_text(line), flush=True)
        else:
            self.progress.say(line)

    def close(self) -> None:
        """Show the remaining events, and leave the last state on the screen."""
        self.poll()
        if self.progress is not None:
            self.progress.close()

    def _start(self, event: StartEvent) -> None:
        if self.progress is not None:
            self.progress.close()
        self.progress = Progress(self._config.train.rounds, done=event.resumed_from)
        if text := resume_text(self._config, event.resumed_from + 1, event.sessions_found):
            self.progress.say(text)
