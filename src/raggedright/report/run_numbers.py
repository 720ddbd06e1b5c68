"""What a run comes to: its name and state, the numbers at the top of its page, and sums over its rounds.

A score is compared between the first and the last ten rounds, or half of the run each where it is shorter than twenty.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raggedright.arrays import Floats
from raggedright.report.axes import duration, number, share
from raggedright.report.run_events import RoundEvent, RunEvents
from raggedright.report.series import metric
from raggedright.report.visible import visible
from raggedright.report.words import counted

SCORE, EXACT = "critic/score/mean", "session/exact_match/mean"
WINDOW, MOST_NAME = 10, 80
MOST_SECONDS = 1e12  # a part that took longer is not believed
STATES = {"finished": "✓", "interrupted": "■", "failed": "✕", "running": "…"}


class Name(NamedTuple):
    """What was run, and whether it still does."""

    agent: str
    model: str
    state: str
    sign: str
    facts: tuple[str, ...]
    small: tuple[str, ...]


class Stat(NamedTuple):
    """A number at the top; `before` is where it came from."""

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
        agent=visible(_setting(config, "agent", "name") or "A run", MOST_NAME),
        model=visible(_model(config), MOST_NAME),
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
    dp = (start.dp if start else None) or (layout.dp_size if layout else None)
    if dp:
        yield f"dp {dp:,}" + (f" on {visible(start.device, 20)}" if start and start.device else "")
    if layout:
        prompts, sessions = counted(layout.batch_size, "prompt"), counted(layout.rollout_n, "session")
        yield f"{prompts} \N{MULTIPLICATION SIGN} {sessions} a round"
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
        yield "no end is written down: the run goes on, or was cut off"


def _moment(time: str) -> str:
    """A time as it was written, to the second."""
    return visible(time.replace("T", " ")[: len("2000-01-01 00:00:00")], 24)


def _setting(config: Mapping[str, object], *path: str) -> str:
    """A setting as text; empty where there is none."""
    value: object = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return str(value) if isinstance(value, str | int | float) else ""


def _model(config: Mapping[str, object]) -> str:
    path = _setting(config, "model", "path").rstrip("/")
    return path.rpartition("/")[2] or _setting(config, "model", "made", "model_type") or _setting(config, "model")


def headline(events: RunEvents) -> list[Stat]:
    """The numbers that a reader looks for first."""
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
    """The mean of the first few values and of the last few, which do not overlap, and how many these are."""
    window = min(WINDOW, max(1, len(values) // 2))
    return float(np.mean(values[:window])), float(np.mean(values[-window:])), window


def _rise(label: str, events: RunEvents, name: str) -> list[Stat]:
    values = metric(events.rounds, name)
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return []
    if len(values) == 1:
        return [Stat(label, number(round(float(values[0]), 3)), "of the only round")]
    *ends, window = ends_of(values)
    before, after = (f"{end:.2f}".replace("-", "\N{MINUS SIGN}") for end in ends)
    rounds = "round" if window == 1 else f"{window} rounds"
    return [Stat(label, after, f"mean of the first and last {rounds}", before)]


def _speed(events: RunEvents) -> list[Stat]:
    tokens, speed = metric(events.rounds, "perf/tokens"), metric(events.rounds, "perf/tokens_per_second")
    known = (tokens > 0) & (speed > 1e-9)
    if not known.any():
        return []
    per_second = float(tokens[known].sum() / (tokens[known] / speed[known]).sum())
    total = number(float(tokens[np.isfinite(tokens)].sum()))
    return [Stat("Tokens a second", number(float(round(per_second))), f"{total} in all")]


def wall_seconds(events: RunEvents) -> float | None:
    """As the end says; a run that resumed took at least as long as its rounds together."""
    of_rounds = sum(seconds for _, seconds in parts_total(events))
    stated = (events.end.seconds if events.end else None) or 0.0
    return max(stated if stated < MOST_SECONDS else 0.0, of_rounds) or None


def _per_round(events: RunEvents) -> str:
    seconds, count = wall_seconds(events), len(events.rounds)
    return f"{duration(seconds / count)} a round" if seconds and count else ""


def parts_total(events: RunEvents) -> list[tuple[str, float]]:
    """Seconds by part over all rounds, in the order that rounds name them."""
    total: dict[str, float] = {}
    for each in events.rounds:
        for part, seconds in each.seconds.items():
            if 0 <= seconds < MOST_SECONDS:
                total[part] = total.get(part, 0.0) + seconds
    return list(total.items())


def session_outcomes(events: RunEvents) -> Counter[str]:
    """What became of the sessions of all rounds."""
    return _add(each.session_outcomes for each in events.rounds)


def row_outcomes(events: RunEvents) -> Counter[str]:
    """What became of the rows of all rounds."""
    return _add(each.row_outcomes for each in events.rounds)


def ledger_lines(outcomes: Counter[str], most: int) -> list[LedgerLine]:
    """Outcomes as lines of a table, trained first, then by count; those beyond `most` are summed in one."""
    total, longest = sum(outcomes.values()), max(outcomes.values(), default=1)
    ordered = sorted(outcomes.items(), key=lambda item: (item[0] != "trained", -item[1], item[0]))
    lines = [(visible(name, 120), count) for name, count in ordered[:most]]
    if len(ordered) > most:
        lines.append((f"{len(ordered) - most:,} other outcomes", sum(count for _, count in ordered[most:])))
    return [LedgerLine(name, count, share(count, total), 100 * count / max(longest, 1)) for name, count in lines]


def _add(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _sum(rounds: Iterable[RoundEvent], of: Callable[[RoundEvent], int | None]) -> int:
    return sum(of(each) or 0 for each in rounds)
