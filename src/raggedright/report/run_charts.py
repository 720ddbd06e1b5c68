"""The charts of a run's page. A chart without any number is left out."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from raggedright.arrays import Floats
from raggedright.report.chart_scale import metric, numbers, round_numbers, spread
from raggedright.report.charts import Dots, Frame, Line, bar_chart, line_chart, stacked_chart
from raggedright.report.events import RunEvents
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
    rounds, evaluated = round_numbers(events.rounds), round_numbers(events.evals)
    lines, keys, dots = [], [], []
    for style, (label, name) in enumerate((("score", SCORE), ("exact match", EXACT))):
        values = metric(events.rounds, name)
        if spread(values) or style == 0:
            lines.append(Line(label, values, style=style))
            keys.append(Key(label, style, "line", _last(values)))
        values = metric(events.evals, f"eval/{'score' if style == 0 else 'exact_match'}/mean")
        if spread(values):
            dots.append(Dots(f"eval {label}", evaluated, values, style=style, hollow=style == 1))
            keys.append(Key(f"eval {label}", style, "ring" if style else "dot", _last(values)))
    ends = [limits for series in (*lines, *dots) if (limits := spread(series.values))]
    rate = all(low >= 0 and high <= 1 for low, high in ends)  # then the scale is 0 to 1
    limits = (0.0, 1.0) if rate else None
    frame = Frame(title="Score by round", rounds=rounds, height=260, y_ticks=5, dots=dots, limits=limits)
    return Panel("", line_chart(frame, lines), tuple(keys))


def row_panels(events: RunEvents) -> list[Panel]:
    """Rows, padding rows, and rows per session."""
    rounds = round_numbers(events.rounds)

    def frame(title: str, *, zero: bool = True, integers: bool = True) -> Frame:
        return Frame(
            title=title,
            rounds=rounds,
            height=130,
            buckets=200,
            y_ticks=3,
            x_ticks=3,
            first_label=0.26,
            last_label=0.14,
            zero=zero,
            integers=integers,
        )

    rows = numbers(each.rows for each in events.rounds)
    padding = numbers(each.padding_rows for each in events.rounds)
    mean, low, high = (metric(events.rounds, f"rows_per_session/{end}") for end in ("mean", "min", "max"))
    banded = Line("mean", mean, style=4, low=low, high=high)
    panels = [
        Panel(
            "Rows",
            line_chart(frame("Rows by round", zero=False), [Line("rows", rows)]),
            value=_last(rows),
            note="without padding rows",
        ),
        Panel(
            "Padding rows",
            bar_chart(frame("Padding rows by round"), Line("padding rows", padding, style=1)),
            value=_last(padding),
            note="with weight zero",
        ),
    ]
    if spread(mean):
        chart = line_chart(frame("Rows per session by round", integers=False), [banded])
        panels.append(
            Panel("Rows per session", chart, value=_last(mean), note="mean; the band shows minimum to maximum")
        )
    return panels


def loss_panels(events: RunEvents) -> list[Panel]:
    """One small chart per metric."""
    rounds = round_numbers(events.rounds)
    names = dict.fromkeys(name for each in events.rounds for name in each.metrics)
    panels = []
    for name in [name for name in _order(names) if spread(metric(events.rounds, name))][:MAX_PANELS]:
        values, title = metric(events.rounds, name), visible(name, MAX_NAME)
        frame = Frame(
            title=title, rounds=rounds, height=92, buckets=160, y_ticks=2, x_ticks=3, first_label=0.36, last_label=0.2
        )
        panels.append(Panel(title, line_chart(frame, [Line(title, values)]), value=_last(values)))
    return panels


def _order(names: Iterable[str]) -> list[str]:
    """The metrics that get a chart, the most common first."""
    names = list(names)
    losses = [name for name in names if name.startswith(("actor/", "critic/")) and not name.startswith(ELSEWHERE)]
    sessions = [name for name in names if name.startswith("session/") and name.endswith("/mean") and name != EXACT]
    ends = ("/min", "/max")
    chosen = [
        *(name for name in FIRST if name in losses),
        *(name for name in SIGNAL if name in names),
        *losses,
        *sessions,
        *(name for name in LAST if name in names),
    ]
    return [name for name in dict.fromkeys(chosen) if not name.endswith(ends)]


def time_panel(events: RunEvents) -> Panel | None:
    """Seconds of each round by part."""
    parts = [part for part, _ in parts_total(events)][:MAX_PARTS]
    if not parts:
        return None
    rounds = round_numbers(events.rounds)
    lines = [
        Line(visible(part, 40), numbers(each.seconds.get(part) for each in events.rounds), style=i)
        for i, part in enumerate(parts)
    ]
    frame = Frame(title="Seconds by round", rounds=rounds, height=200, buckets=60, y_ticks=4, zero=True)
    keys = tuple(Key(line.name, line.style, "box") for line in lines)
    return Panel("Seconds per round", stacked_chart(frame, lines), keys)


def _last(values: Floats) -> str:
    finite = values[np.isfinite(values)]
    return number(float(finite[-1])) if len(finite) else NONE
