"""The numbers of a run: its name and state, the headline of its page, and sums over its rounds.

Scores are compared between the first and the last ten rounds, or between the halves of a run of less than 20 rounds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np

from raggedright.arrays import Floats
from raggedright.report.chart_scale import metric
from raggedright.report.events import RoundEvent, RunEvents
from raggedright.report.text import counted, duration, number, score_text, share, visible

SCORE, EXACT = "critic/score/mean", "session/exact_match/mean"
WINDOW, MAX_NAME = 10, 80
MAX_WARNINGS, MAX_WARNING_CHARS = 5, 1200
MAX_SECONDS = 1e12  # a larger number in a file is not credible
STATES = {"finished": "✓", "interrupted": "■", "failed": "✕", "running": "…"}


class Name(NamedTuple):
    """What was run, and its state."""

    agent: str
    model: str
    state: str
    sign: str
    facts: tuple[str, ...]
    small: tuple[str, ...]


class Stat(NamedTuple):
    """A number of the headline; `before` is its value in the first rounds."""

    label: str
    value: str
    note: str = ""
    before: str = ""


class LedgerLine(NamedTuple):
    """A line of the ledger."""

    name: str
    total: int
    percent: str
    width: float


def name_of(events: RunEvents) -> Name:
    """Title, state and facts of a run."""
    config = events.start.config if events.start else {}
    state = events.end.reason if events.end else "running"
    state = state if state in STATES else "ended"
    return Name(
        agent=visible(_setting(config, "agent", "name") or "A run", MAX_NAME),
        model=visible(_model(config), MAX_NAME),
        state=state,
        sign=STATES.get(state, "■"),
        facts=tuple(_facts(events, config)),
        small=tuple(_small_facts(events)),
    )


def _facts(events: RunEvents, config: Mapping[str, object]) -> Iterable[str]:
    planned = _setting(config, "train", "rounds")
    done = len(events.rounds)
    yield f"{done:,} of {visible(planned, 20)} rounds" if planned else counted(done, "round")
    start = events.start
    layout = start.layout if start else None
    dp = (start.world.dp if start else None) or (layout.dp_size if layout else None)
    if dp:
        yield f"dp {dp:,}" + (f" on {visible(start.world.device, 20)}" if start and start.world.device else "")
    if layout:
        prompts, sessions = counted(layout.batch_size, "prompt"), counted(layout.rollout_n, "session")
        yield f"{prompts} \N{MULTIPLICATION SIGN} {sessions} per round"
        critic = layout.critic_mini_batch_size
        yield f"mini-batches of {layout.mini_batch_size:,}" + (f", critic {critic:,}" if critic else "")
        yield f"align {layout.align}"
        yield layout.loss_agg


def _small_facts(events: RunEvents) -> Iterable[str]:
    start, end = events.start, events.end
    if start and start.time:
        began, ended = _moment(start.time), _moment(end.time) if end else ""
        same_day = ended[:10] == began[:10] and len(began) == len(ended) == len("2000-01-01 00:00:00")
        yield f"{began} to {ended[11:] if same_day else ended}" if ended else began
    if start and start.num_parameters:
        yield counted(start.num_parameters, "parameter")
    if start and start.version:
        yield f"raggedright {visible(start.version, 20)}"
    if end is None:
        yield "no end is recorded: the run is still running, or was killed"


def _moment(time: str) -> str:
    """A time as it was recorded, to the second."""
    return visible(time.replace("T", " ")[: len("2000-01-01 00:00:00")], 24)


def _setting(config: Mapping[str, object], *path: str) -> str:
    """A setting as text; empty if it is not set."""
    value: object = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return str(value) if isinstance(value, str | int | float) else ""


def _model(config: Mapping[str, object]) -> str:
    path = _setting(config, "model", "path").rstrip("/")
    return path.rpartition("/")[2] or _setting(config, "model", "made", "model_type") or _setting(config, "model")


def shown_warnings(events: RunEvents) -> list[str]:
    """The last warning of each streak of rounds, at most the MAX_WARNINGS most recent ones."""
    last = {(each.kind, each.round if each.first_round is None else each.first_round): each for each in events.warnings}
    texts = [visible(each.text, MAX_WARNING_CHARS) for each in sorted(last.values(), key=lambda each: each.round)]
    left = len(texts) - MAX_WARNINGS
    return [*([f"{counted(left, 'earlier warning')} in events.jsonl"] if left > 0 else []), *texts[-MAX_WARNINGS:]]


def headline(events: RunEvents) -> list[Stat]:
    """The numbers at the top of the page."""
    rounds = events.rounds
    rows, padding = _sum(rounds, lambda r: r.rows), _sum(rounds, lambda r: r.padding_rows)
    outcomes = session_outcomes(events)
    sessions = sum(outcomes.values()) or _sum(rounds, lambda r: r.sessions)
    failed = sum(count for outcome, count in outcomes.items() if outcome.startswith("failed"))
    skipped = _sum(rounds, lambda r: r.skipped_steps)
    of_rows = row_outcomes(events)
    trained = of_rows["trained"] if of_rows else rows  # a run of another version may have no ledger
    return [
        *_rise("Score", events, SCORE),
        *_rise("Exact match", events, EXACT),
        Stat("Rows trained", f"{trained:,}", f"of {counted(sessions, 'session')}"),
        Stat("Padding rows", f"{padding:,}", f"{share(padding, rows + padding)} of all rows"),
        Stat("Sessions failed", f"{failed:,}", f"{share(failed, sessions)} of all sessions"),
        Stat("Optimizer steps", f"{_sum(rounds, lambda r: r.optimizer_steps):,}", f"{skipped:,} skipped"),
        Stat("Wall time", duration(wall_seconds(events)), _per_round(events)),
        *_speed(events),
    ]


def ends_of(values: Sequence[float] | Floats) -> tuple[float, float, int]:
    """The mean of the first and of the last values, which do not overlap, and how many values each mean has."""
    window = min(WINDOW, max(1, len(values) // 2))
    first, last = (float(np.sum(np.divide(few, window))) for few in (values[:window], values[-window:]))
    return first, last, window  # divided first, because the sum of large scores may overflow


def _rise(label: str, events: RunEvents, name: str) -> list[Stat]:
    values = [value for event in events.rounds if (value := event.metrics.get(name)) is not None and isfinite(value)]
    if len(values) == 0:
        return []
    if len(values) == 1:
        return [Stat(label, number(round(values[0], 3)), "of the only round")]
    *ends, window = ends_of(values)
    before, after = (score_text(end, 2).replace("-", "\N{MINUS SIGN}") for end in ends)
    rounds = "round" if window == 1 else f"{window} rounds"
    return [Stat(label, after, f"mean of the first and last {rounds}", before)]


def _speed(events: RunEvents) -> list[Stat]:
    tokens, speed = metric(events.rounds, "perf/tokens"), metric(events.rounds, "perf/tokens_per_second")
    known = (tokens > 0) & (speed > 1e-9)
    if not known.any():
        return []
    per_second = float(tokens[known].sum() / (tokens[known] / speed[known]).sum())
    total = number(float(tokens[np.isfinite(tokens)].sum()))
    return [Stat("Tokens per second", number(float(round(per_second))), f"{total} in total")]


def wall_seconds(events: RunEvents) -> float | None:
    """The seconds of the end event; for a resumed run at least the sum over its rounds."""
    of_rounds = sum(seconds for _, seconds in parts_total(events))
    stated = (events.end.seconds if events.end else None) or 0.0
    return max(stated if stated < MAX_SECONDS else 0.0, of_rounds) or None


def _per_round(events: RunEvents) -> str:
    seconds, count = wall_seconds(events), len(events.rounds)
    return f"{duration(seconds / count)} per round" if seconds and count else ""


def parts_total(events: RunEvents) -> list[tuple[str, float]]:
    """Seconds by part over all rounds, in the order in which the events list them."""
    total: dict[str, float] = {}
    for each in events.rounds:
        for part, seconds in each.seconds.items():
            if 0 <= seconds < MAX_SECONDS:
                total[part] = total.get(part, 0.0) + seconds
    return list(total.items())


def session_outcomes(events: RunEvents) -> Counter[str]:
    """Sessions of all rounds by outcome."""
    return add_counts(each.ledger.sessions for each in events.rounds)


def row_outcomes(events: RunEvents) -> Counter[str]:
    """Rows of all rounds by outcome."""
    return add_counts(each.ledger.rows for each in events.rounds)


def ledger_lines(outcomes: Counter[str], max_lines: int) -> list[LedgerLine]:
    """Outcomes as lines of a table, trained first, then by count; those after `max_lines` are summed."""
    total, longest = sum(outcomes.values()), max(outcomes.values(), default=1)
    ordered = sorted(outcomes.items(), key=lambda item: (item[0] != "trained", -item[1], item[0]))
    lines = [(visible(name, 120), count) for name, count in ordered[:max_lines]]
    if len(ordered) > max_lines:
        lines.append((f"{len(ordered) - max_lines:,} other outcomes", sum(count for _, count in ordered[max_lines:])))
    return [LedgerLine(name, count, share(count, total), 100 * count / max(longest, 1)) for name, count in lines]


def add_counts(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sum of counts by name."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _sum(rounds: Iterable[RoundEvent], of: Callable[[RoundEvent], int | None]) -> int:
    return sum(of(each) or 0 for each in rounds)
