"""Charts of numbers over rounds as SVG inside a page: lines with bands and dots, and stacked areas.

A chart is as wide as its container: the data stretches, while text, dots and strokes keep their size, so that it is
readable on a phone too. Lines differ in their dashes, not in colour alone. A gap in a series is a gap in the line, and
a point between two gaps is a dot. Colours are classes of the page's style. Names come from outside and are escaped.

A run of 100,000 rounds has more points than pixels, so neighbouring rounds share a bucket of which mean, minimum and
maximum are drawn: a spike of a single round still shows. Values that are not finite are gaps. Ticks are round numbers
and a scale ends on them; a constant series gets room around it, so that its line is not on the edge.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape

from raggedright.arrays import Floats, Ints
from raggedright.report.plan_svg import coordinate as xy
from raggedright.report.text import number, with_exponent, with_minus

WIDTH = 1000.0  # of the data, stretched to the width of the chart
LABEL_HEIGHT = 22  # below the data, for the numbers of rounds
MAX_VALUE = 1e290  # beyond it the width of a scale, or the sum of a series, would not be finite
MIN_SPREAD = 1e-6  # relative to the values; a smaller spread is rounding, and its ticks would need too many digits
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Buckets(NamedTuple):
    """Rounds in buckets: the first and last round of each, and a series' mean, minimum and maximum in it."""

    first: Ints
    last: Ints
    mean: Floats
    low: Floats
    high: Floats

    @property
    def middle(self) -> Floats:
        """The position of each bucket on the axis."""
        return (self.first + self.last) / 2


def bucketed(rounds: Ints, values: Floats, max_buckets: int) -> Buckets:
    """The series in at most `max_buckets` buckets with the same number of rounds."""
    count = min(len(rounds), max_buckets)
    if not count:
        return Buckets(rounds, rounds, values, values, values)
    starts = np.arange(count) * len(rounds) // count
    ends = np.append(starts[1:], len(rounds)) - 1
    finite = np.isfinite(values)
    num_finite = np.add.reduceat(finite, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    gap = num_finite == 0
    mean = np.where(gap, np.nan, total / np.maximum(num_finite, 1))
    low = np.where(gap, np.nan, np.minimum.reduceat(np.where(finite, values, np.inf), starts))
    high = np.where(gap, np.nan, np.maximum.reduceat(np.where(finite, values, -np.inf), starts))
    return Buckets(rounds[starts], rounds[ends], mean, low, high)


def numbers(values: Iterable[float | None]) -> Floats:
    """Values as an array: NaN where one is missing or not finite, and clipped so that their sum is finite."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return np.where(np.isfinite(array), np.clip(array, -MAX_VALUE, MAX_VALUE), np.nan)


def spread(values: Floats) -> tuple[float, float] | None:
    """The minimum and maximum of the finite values."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else None


class Scale(NamedTuple):
    """The ends of an axis, its ticks, and the distance between them."""

    low: float
    high: float
    step: float
    ticks: tuple[float, ...]


def scale_of(low: float, high: float, *, zero: bool = False, max_ticks: int = 5, integers: bool = False) -> Scale:
    """A scale that contains low and high, and zero if asked; `integers` keeps ticks to integers."""
    low, high = max(low, -MAX_VALUE), min(high, MAX_VALUE)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(abs(low), abs(high)) * MIN_SPREAD:
        room = abs(high) * 0.1 or 1.0
        low, high = (low if zero and low == 0 else low - room), high + room
    step = _round_step((high - low) / max_ticks)
    step = max(step, 1.0) if integers else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, max(last, first + 1) + 1))
    return Scale(ticks[0], ticks[-1], step, ticks)


def _round_step(minimum: float) -> float:
    power = 10.0 ** math.floor(math.log10(minimum)) if minimum > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5) if factor * power >= minimum * 0.999), 10 * power)


def tick_text(value: float, step: float) -> str:
    """The number of a tick, with enough digits to distinguish it from its neighbours."""
    if value == 0 or abs(value) < step * 1e-6:
        return "0"
    if abs(value) >= 1e15 or (step < 1e-3 and abs(value) < 1e-2):
        digits = max(2, math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9))
        return with_exponent(f"{value:.{digits + 1}g}")
    for size, unit in _UNITS:
        if abs(value) >= size and step >= size / 10 and (abs(value) >= 1e4 or step >= 1e3):
            return with_minus(f"{value / size:.{0 if step >= size else 1}f}".removesuffix(".0") + unit)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return with_minus(f"{value:,.{digits}f}")


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
    """Points at some rounds, such as evaluations; `hollow` distinguishes a second kind."""

    name: str
    rounds: Ints
    values: Floats
    style: int = 0
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The axes of a chart."""

    title: str
    rounds: Ints
    height: int = 180
    buckets: int = 300
    y_ticks: int = 4
    label_share: float = 0.16  # the part of the axis that the label of the first round takes; larger on a small chart
    zero: bool = False
    integers: bool = False
    limits: tuple[float, float] | None = None
    dots: Sequence[Dots] = ()

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last round on the axis, dots included."""
        rounds = np.concatenate([self.rounds, *(dots.rounds for dots in self.dots)])
        return (int(rounds.min()), int(rounds.max())) if len(rounds) else (0, 0)

    def x(self, rounds: Floats | Ints) -> Floats:
        """Positions of rounds from 0 to 1; a single round is in the middle."""
        first, last = self.ends
        if last == first:
            return np.full(len(rounds), 0.5)
        return (rounds.astype(np.float64) - first) / (last - first)

    def y(self, scale: Scale, values: Floats) -> Floats:
        """Positions of values, from the top."""
        return self.height * (1 - (np.clip(values, scale.low, scale.high) - scale.low) / (scale.high - scale.low))

    def scale(self, series: Iterable[Floats]) -> Scale:
        """The scale that contains all series."""
        limits = [*(filter(None, map(spread, series))), *([self.limits] if self.limits else [])]
        low, high = min((a for a, _ in limits), default=0.0), max((b for _, b in limits), default=1.0)
        return scale_of(low, high, zero=self.zero, max_ticks=self.y_ticks, integers=self.integers)


def line_chart(frame: Frame, lines: Sequence[Line]) -> Markup:
    """Lines over rounds, with bands and dots."""
    buckets = [bucketed(frame.rounds, line.values, frame.buckets) for line in lines]
    bands = [_band(frame, line, bucket) for line, bucket in zip(lines, buckets, strict=True)]
    ends = [end for bucket in buckets for end in (bucket.low, bucket.high)] + [end for band in bands for end in band]
    scale = frame.scale([*ends, *(dots.values for dots in frame.dots)])
    stretched, fixed = [], []
    for line, bucket, (low, high) in zip(lines, buckets, bands, strict=True):
        x, y = frame.x(bucket.middle), frame.y(scale, bucket.mean)
        stretched.append(_area(x, frame.y(scale, low), frame.y(scale, high), f"band c{line.style % 8}"))
        stretched.append(f'<path class="line l{line.style % 8}" d="{_polyline(x, y)}"/>')
        for i in _between_gaps(bucket.mean).tolist():
            fixed.append(_dot(float(x[i]), float(y[i]), f"dot c{line.style % 8}"))
    for dots in frame.dots:
        classes = f"ring l{dots.style % 8}" if dots.hollow else f"dot c{dots.style % 8}"
        x, y = frame.x(dots.rounds), frame.y(scale, dots.values)
        for i in np.flatnonzero(np.isfinite(dots.values)).tolist():
            title = f"round {dots.rounds[i]:,}: {dots.name} {number(float(dots.values[i]))}"
            fixed.append(_dot(float(x[i]), float(y[i]), classes, title))
    return _draw_chart(frame, scale, stretched, fixed, buckets, lines)


def stacked_chart(frame: Frame, lines: Sequence[Line]) -> Markup:
    """Parts of a total over rounds, the first one at the bottom; a gap counts as zero."""
    buckets = [bucketed(frame.rounds, line.values, frame.buckets) for line in lines]
    tops = np.cumsum([np.nan_to_num(bucket.mean) for bucket in buckets], axis=0)
    bottoms = np.vstack([np.zeros_like(tops[:1]), tops[:-1]]) if len(lines) else tops
    scale = frame.scale([*tops, np.zeros(1)])
    areas = []
    for line, bucket, low, high in zip(lines, buckets, bottoms, tops, strict=True):
        x = frame.x(bucket.middle)
        if len(x) == 1:  # a single round has no width
            x, low, high = np.array([0.3, 0.7]), np.repeat(low, 2), np.repeat(high, 2)
        areas.append(_area(x, frame.y(scale, low), frame.y(scale, high), f"stack c{line.style % 8}"))
    return _draw_chart(frame, scale, areas, [], buckets, lines)


def _band(frame: Frame, line: Line, bucket: Buckets) -> tuple[Floats, Floats]:
    """The band of a line: the line's `low` and `high`, or the range of its buckets."""
    if line.low is not None and line.high is not None:
        low, high = (bucketed(frame.rounds, end, frame.buckets) for end in (line.low, line.high))
        return low.low, high.high
    return (bucket.low, bucket.high) if len(frame.rounds) > frame.buckets else (bucket.low[:0], bucket.high[:0])


def _polyline(x: Floats, y: Floats) -> str:
    """A path through the points, broken at gaps."""
    words, pen = [], "M"
    for a, b in zip((x * WIDTH).tolist(), y.tolist(), strict=True):
        if math.isnan(b):
            pen = "M"
        else:
            words.append(f"{pen}{xy(a)} {xy(b)}")
            pen = "L"
    return "".join(words)


def _between_gaps(values: Floats) -> Ints:
    """Points with a gap on both sides, which a line does not show."""
    finite = np.concatenate(([False], np.isfinite(values), [False]))
    return np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])


def _area(x: Floats, low: Floats, high: Floats, classes: str) -> str:
    """The area between two lines, in one piece per stretch without a gap."""
    if not len(low):
        return ""
    finite = np.isfinite(low) & np.isfinite(high)
    pieces = np.split(np.arange(len(finite)), np.flatnonzero(np.diff(finite)) + 1)
    path = ""
    for piece in pieces:
        if not finite[piece[0]]:
            continue
        if len(piece) == 1:  # a point has no width, so it is a bar
            middle, top, bottom = (float(values[piece[0]]) for values in (x, high, low))
            path += f"M{xy(middle * WIDTH - 4)} {xy(top)}h8V{xy(bottom)}h-8z"
        else:
            path += _polyline(x[piece], high[piece]) + "L" + _polyline(x[piece][::-1], low[piece][::-1])[1:] + "z"
    return f'<path class="{classes}" d="{path}"/>' if path else ""


def _dot(x: float, y: float, classes: str, title: str = "") -> str:
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="{classes}" cx="{100 * x:.2f}%" cy="{xy(y)}" r="3.5">{tooltip}</circle>'


def _draw_chart(
    frame: Frame,
    scale: Scale,
    stretched: Sequence[str],
    fixed: Sequence[str],
    buckets: Sequence[Buckets],
    lines: Sequence[Line],
) -> Markup:
    """The chart around its data: `stretched` parts are as wide as the chart, `fixed` ones keep their shape."""
    height = frame.height
    body = [*_grid(frame, scale)]
    body.append(f'<svg width="100%" height="{height}" viewBox="0 0 {xy(WIDTH)} {height}" preserveAspectRatio="none">')
    body += [*stretched, *_hover_boxes(frame, lines, buckets), "</svg>", *fixed]
    if not any(spread(line.values) for line in lines) and not fixed:
        body.append(f'<text class="none" x="50%" y="{height / 2 + 4:.0f}">no numbers yet</text>')
    label = escape(_description(frame, lines))
    head = f'<svg class="plot" width="100%" height="{height + LABEL_HEIGHT}" role="img" aria-label="{label}">'
    return Markup(head + "".join(body) + "</svg>")


def _description(frame: Frame, lines: Sequence[Line]) -> str:
    """The chart in a sentence, for screen readers."""
    first, last = frame.ends
    facts = []
    for line in lines:
        finite = line.values[np.isfinite(line.values)]
        if len(finite):
            low, high = number(float(finite.min())), number(float(finite.max()))
            facts.append(f"{line.name} from {number(finite[0])} to {number(finite[-1])}, between {low} and {high}")
    return f"{frame.title}, rounds {first:,} to {last:,}: {'; '.join(facts) or 'no numbers'}"


def _grid(frame: Frame, scale: Scale) -> Iterable[str]:
    """Lines and numbers behind the data."""
    positions = frame.y(scale, np.array(scale.ticks)).tolist()
    for tick, y in zip(scale.ticks, map(xy, positions), strict=True):
        kind = "zero" if tick == 0 or tick == scale.low else "rule"
        yield f'<line class="{kind}" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text class="y" x="-8" y="{y}" dy=".32em">{tick_text(tick, scale.step)}</text>'
    for x, words, classes in _round_labels(frame):
        yield f'<text class="{classes}" x="{100 * x:.2f}%" y="{frame.height + 17}">{words}</text>'


def _round_labels(frame: Frame) -> list[tuple[float, str, str]]:
    """The first and the last round, and round numbers between them: position, text and classes of each."""
    if not len(frame.rounds) and not frame.dots:
        return []
    first, last = frame.ends
    if last == first:
        return [(0.5, f"round {first:,}", "x")]
    ticks = scale_of(first, last, max_ticks=6 if frame.label_share < 0.2 else 3, integers=True).ticks
    labels = [((tick - first) / (last - first), f"{tick:,.0f}", "x") for tick in ticks]
    between = [label for label in labels if frame.label_share < label[0] < 1 - frame.label_share / 2]
    return [(0.0, f"round {first:,}", "x first"), *between, (1.0, f"{last:,}", "x last")]


def _hover_boxes(frame: Frame, lines: Sequence[Line], buckets: Sequence[Buckets]) -> Iterable[str]:
    """Invisible boxes over the data that show its numbers as tooltips."""
    if not buckets:
        return
    middle = frame.x(buckets[0].middle) * WIDTH
    edges = (middle[1:] + middle[:-1]) / 2
    edges = np.concatenate(([0.0], edges, [WIDTH])).tolist()
    names = [escape(line.name) for line in lines]
    for i, (first, last) in enumerate(zip(buckets[0].first.tolist(), buckets[0].last.tolist(), strict=True)):
        words = [f"round {first:,}" if first == last else f"rounds {first:,} to {last:,}, mean (minimum to maximum)"]
        for name, bucket in zip(names, buckets, strict=True):
            ends = "" if first == last else f" ({number(bucket.low[i])} to {number(bucket.high[i])})"
            words.append(f"{name} {number(float(bucket.mean[i]))}{ends}")
        box = f'<rect class="at" x="{xy(edges[i])}" width="{edges[i + 1] - edges[i]:.2f}" height="{frame.height}">'
        yield f"{box}<title>{'&#10;'.join(words)}</title></rect>"
