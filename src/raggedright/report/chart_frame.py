"""What a chart stands in: its axes, the numbers on them, and the stretches of rounds that say theirs when pointed at.

A chart is as wide as its place: the data stretch, while text, dots and strokes keep their size, so that it reads the
same on a phone. Colours are classes of the page's style. Names come from outside and are escaped here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup, escape

from raggedright.arrays import Floats, Ints
from raggedright.report.axes import Scale, number, round_ticks, scale_of, tick_text
from raggedright.report.series import Buckets, spread
from raggedright.report.svg_page import n

WIDE = 1000.0  # the data's own width, stretched to the chart's
BELOW = 22  # room for the rounds' numbers


@dataclass(frozen=True, slots=True)
class Line:
    """A series; `style` is its colour and dash, `low` and `high` draw a band."""

    name: str
    values: Floats
    style: int = 0
    low: Floats | None = None
    high: Floats | None = None


@dataclass(frozen=True, slots=True)
class Dots:
    """Points at some rounds, such as evaluations; `hollow` tells a second kind apart."""

    name: str
    rounds: Ints
    values: Floats
    style: int = 0
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a chart is drawn in."""

    title: str
    rounds: Ints
    height: int = 180
    buckets: int = 300
    y_ticks: int = 4
    x_ticks: int = 6
    first_label: float = 0.16  # shares of the axis that the labels of the first and the last round take
    last_label: float = 0.07
    zero: bool = False
    whole: bool = False
    limits: tuple[float, float] | None = None
    dots: Sequence[Dots] = field(default=())

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last round on the axis, those of the dots too."""
        numbers = [self.rounds, *(dots.rounds for dots in self.dots)]
        every = np.concatenate(numbers)
        return (int(every.min()), int(every.max())) if len(every) else (0, 0)

    def x(self, rounds: Floats | Ints) -> Floats:
        """Places of rounds from 0 to 1; a single one stands in the middle."""
        first, last = self.ends
        if last == first:
            return np.full(len(rounds), 0.5)
        return (rounds.astype(np.float64) - first) / (last - first)

    def scale(self, series: Iterable[Floats]) -> Scale:
        """The scale that holds all series."""
        limits = [*(filter(None, map(spread, series))), *([self.limits] if self.limits else [])]
        low, high = min((a for a, _ in limits), default=0.0), max((b for _, b in limits), default=1.0)
        return scale_of(low, high, zero=self.zero, most=self.y_ticks, whole=self.whole)


def draw_chart(
    frame: Frame,
    scale: Scale,
    parts: Sequence[str],
    loose: Sequence[str],
    named: Sequence[tuple[str, Buckets]],
    lines: Sequence[Line],
) -> Markup:
    """The chart around its data: `parts` stretch with it, `loose` ones keep their shape."""
    height = frame.height
    body = [*_grid(frame, scale)]
    body.append(f'<svg width="100%" height="{height}" viewBox="0 0 {n(WIDE)} {height}" preserveAspectRatio="none">')
    body += [part for part in parts if part]
    body += _hovers(frame, named)
    body += ["</svg>", *loose]
    if not any(spread(line.values) for line in lines) and not loose:
        body.append(f'<text class="none" x="50%" y="{height / 2 + 4:.0f}">no numbers yet</text>')
    about = escape(_about(frame, lines))
    return Markup(
        f'<svg class="plot" width="100%" height="{height + BELOW}" role="img" aria-label="{about}">'
        + "".join(body)
        + "</svg>"
    )


def _about(frame: Frame, lines: Sequence[Line]) -> str:
    """The chart in a sentence, for those who do not see it."""
    first, last = frame.ends
    facts = []
    for line in lines:
        finite = line.values[np.isfinite(line.values)]
        if len(finite):
            low, high = number(float(finite.min())), number(float(finite.max()))
            facts.append(f"{line.name} from {number(finite[0])} to {number(finite[-1])}, between {low} and {high}")
    return f"{frame.title}, rounds {first:,} to {last:,}: {'; '.join(facts) or 'no numbers'}"


def _grid(frame: Frame, scale: Scale) -> list[str]:
    """Lines and numbers behind the data."""
    parts, height = [], frame.height
    for tick in scale.ticks:
        y = n(height * (1 - scale.share(tick)))
        kind = "zero" if tick == 0 or tick == scale.ticks[0] else "rule"
        parts.append(f'<line class="{kind}" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="y" x="-8" y="{y}" dy=".32em">{tick_text(tick, scale.step)}</text>')
    parts += [
        f'<text class="{" ".join(("x", *end))}" x="{100 * x:.2f}%" y="{height + 17}">{words}</text>'
        for x, words, *end in _round_labels(frame)
    ]
    return parts


def _round_labels(frame: Frame) -> list[tuple[float, str] | tuple[float, str, str]]:
    """The first and the last round, and round numbers where there is room between; where each stands."""
    if not len(frame.rounds) and not frame.dots:
        return []
    first, last = frame.ends
    if last == first:
        return [(0.5, f"round {first:,}")]
    ticks = [((tick - first) / (last - first), f"{tick:,}") for tick in round_ticks(first, last, frame.x_ticks)]
    between = [tick for tick in ticks if frame.first_label < tick[0] < 1 - frame.last_label]
    return [(0.0, f"round {first:,}", "first"), *between, (1.0, f"{last:,}", "last")]


def _hovers(frame: Frame, named: Sequence[tuple[str, Buckets]]) -> list[str]:
    """Invisible boxes over the data that say its numbers."""
    if not named or not len(named[0][1].first):
        return []
    left, width = stretches(frame, named[0][1])
    values = [(escape(name), bucket.mean.tolist(), bucket) for name, bucket in named]
    parts = []
    for i, (x, w) in enumerate(zip(left.tolist(), width.tolist(), strict=True)):
        first, last = int(named[0][1].first[i]), int(named[0][1].last[i])
        words = [f"round {first:,}" if first == last else f"rounds {first:,} to {last:,}, mean (least to most)"]
        for name, mean, bucket in values:
            ends = "" if first == last else f" ({number(bucket.low[i])} to {number(bucket.high[i])})"
            words.append(f"{name} {number(mean[i])}{ends}")
        box = f'<rect class="at" x="{n(x)}" width="{w:.2f}" height="{frame.height}">'
        parts.append(f"{box}<title>{'&#10;'.join(words)}</title></rect>")
    return parts


def stretches(frame: Frame, bucket: Buckets) -> tuple[Floats, Floats]:
    """Where each bucket begins, and how wide it is."""
    middle = frame.x(bucket.middle) * WIDE
    if len(middle) < 2:
        return middle - 40, np.full(len(middle), 80.0)
    edges = (middle[1:] + middle[:-1]) / 2
    edges = np.concatenate(([max(2 * middle[0] - edges[0], 0)], edges, [min(2 * middle[-1] - edges[-1], WIDE)]))
    return edges[:-1], np.diff(edges)


def y_of(frame: Frame, scale: Scale, values: Floats) -> Floats:
    """Heights of values, from the top."""
    share = (np.clip(values, scale.low, scale.high) - scale.low) / (scale.high - scale.low)
    return frame.height * (1 - share)
