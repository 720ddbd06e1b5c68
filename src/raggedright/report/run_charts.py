"""The charts of a run's page. A chart without any number is left out."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from raggedright.arrays import Floats, Ints
from raggedright.report.charts import Dots, Frame, Line, line_chart, numbers, spread, stacked_chart
from raggedright.report.events import EvalEvent, RoundEvent, RunEvents
from raggedright.report.run_numbers import EXACT, SCORE, parts_total
from raggedright.report.text import NONE, number, visible

MAX_PARTS, MAX_PANELS, MAX_NAME = 8, 24, 60
FIRST = (
    "actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "actor/lr",
    "actor/kl_loss", "critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/lr",
)  # fmt: skip
SIGNAL = (
    "critic/score/std", "prompts/no_signal_ratio", "prompts/sampled", "response_length/clip_ratio",
    "sessions/failed_ratio", "rows/no_loss_ratio",
)  # fmt: skip
LAST = ("rollout_corr/kl", "response_length/mean", "perf/tokens_per_second", "perf/micro_batches")
ELSEWHERE = ("critic/score/", "critic/rewards/")  # shown elsewhere, or too similar to what is shown


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a chart's legend; `kind` is line, dot, ring or box."""

    name: str
    style: int
    kind: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart with its heading."""

    title: str
    chart: Markup
    keys: tuple[Key, ...] = ()
    value: str = ""
    note: str = ""


def score_panel(events: RunEvents) -> Panel:
    """Score and exact match, with the evaluations."""
    lines, keys, dots = [], [], []
    for style, (label, name) in enumerate((("score", SCORE), ("exact match", EXACT))):
        values = _metric(events.rounds, name)
        if spread(values) or style == 0:
            lines.append(Line(label, values, style=style))
            keys.append(Key(label, style, "line", _last(values)))
        values = _metric(events.evals, f"eval/{'score' if style == 0 else 'exact_match'}/mean")
        if spread(values):
            dots.append(Dots(f"eval {label}", _rounds(events.evals), values, style=style, hollow=style == 1))
            keys.append(Key(f"eval {label}", style, "ring" if style else "dot", _last(values)))
    ends = [limits for series in (*lines, *dots) if (limits := spread(series.values))]
    is_rate = all(low >= 0 and high <= 1 for low, high in ends)
    frame = Frame(
        title="Score by round",
        rounds=_rounds(events.rounds),
        height=260,
        y_ticks=5,
        dots=dots,
        limits=(0.0, 1.0) if is_rate else None,
    )
    return Panel("", line_chart(frame, lines), tuple(keys))


def row_panels(events: RunEvents) -> list[Panel]:
    """Rows, padding rows, and rows per session."""

    def frame(title: str, *, zero: bool = True, integers: bool = True) -> Frame:
        rounds = _rounds(events.rounds)
        size = {"height": 130, "buckets": 200, "y_ticks": 3, "label_share": 0.26}
        return Frame(title=title, rounds=rounds, zero=zero, integers=integers, **size)

    rows = numbers(each.rows for each in events.rounds)
    chart = line_chart(frame("Rows by round", zero=False), [Line("rows", rows)])
    panels = [Panel("Rows", chart, value=_last(rows), note="without padding rows")]
    padding = numbers(each.padding_rows for each in events.rounds)
    chart = stacked_chart(frame("Padding rows by round"), [Line("padding rows", padding, style=1)])
    panels.append(Panel("Padding rows", chart, value=_last(padding), note="with weight zero"))
    mean, low, high = (_metric(events.rounds, f"rows_per_session/{end}") for end in ("mean", "min", "max"))
    if spread(mean):
        line = Line("mean", mean, style=4, low=low, high=high)
        chart = line_chart(frame("Rows per session by round", integers=False), [line])
        note = "mean; the band shows minimum to maximum"
        panels.append(Panel("Rows per session", chart, value=_last(mean), note=note))
    return panels


def metric_panels(events: RunEvents) -> list[Panel]:
    """One small chart per metric."""
    names = dict.fromkeys(name for each in events.rounds for name in each.metrics)
    panels = []
    for name in _in_order(names):
        values, title = _metric(events.rounds, name), visible(name, MAX_NAME)
        if spread(values) and len(panels) < MAX_PANELS:
            rounds = _rounds(events.rounds)
            frame = Frame(title=title, rounds=rounds, height=92, buckets=160, y_ticks=2, label_share=0.36)
            panels.append(Panel(title, line_chart(frame, [Line(title, values)]), value=_last(values)))
    return panels


def _in_order(names: Collection[str]) -> list[str]:
    """The metrics that get a chart, the most common first."""
    losses = [name for name in names if name.startswith(("actor/", "critic/")) and not name.startswith(ELSEWHERE)]
    sessions = [name for name in names if name.startswith("session/") and name.endswith("/mean") and name != EXACT]
    order = dict.fromkeys((*FIRST, *SIGNAL, *losses, *sessions, *LAST))
    return [name for name in order if name in names and not name.endswith(("/min", "/max"))]


def time_panel(events: RunEvents) -> Panel | None:
    """Seconds of each round by part."""
    lines = [
        Line(visible(part, 40), numbers(each.seconds.get(part) for each in events.rounds), style=i)
        for i, (part, _) in enumerate(parts_total(events)[:MAX_PARTS])
    ]
    if not lines:
        return None
    frame = Frame(title="Seconds by round", rounds=_rounds(events.rounds), height=200, buckets=60, zero=True)
    keys = tuple(Key(line.name, line.style, "box") for line in lines)
    return Panel("Seconds per round", stacked_chart(frame, lines), keys)


def _rounds(events: Iterable[RoundEvent | EvalEvent]) -> Ints:
    return np.array([event.round for event in events], dtype=np.int64)


def _metric(events: Iterable[RoundEvent | EvalEvent], name: str) -> Floats:
    """A metric over rounds, NaN where a round does not have it."""
    return numbers(event.metrics.get(name) for event in events)


def _last(values: Floats) -> str:
    finite = values[np.isfinite(values)]
    return number(float(finite[-1])) if len(finite) else NONE
