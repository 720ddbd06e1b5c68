"""Charts of numbers over rounds as SVG inside a page: lines with bands and dots, bars, and stacked areas.

A chart is as wide as its container: the data stretches, while text, dots and strokes keep their size, so that it is
readable on a phone too. Lines differ in their dashes, not in colour alone. A gap in a series is a gap in the line, and
a point between two gaps is a dot. Colours are classes of the page's style. Names come from outside and are escaped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup, escape

from raggedright.arrays import Floats, Ints
from raggedright.report.chart_scale import Buckets, Scale, bucketed, round_ticks, scale_of, spread, tick_text
from raggedright.report.plan_svg import coordinate as xy
from raggedright.report.text import number

WIDTH = 1000.0  # of the data, stretched to the width of the chart
LABEL_HEIGHT = 22  # below the data, for the numbers of rounds


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
    x_ticks: int = 6
    first_label: float = 0.16  # the parts of the axis that the labels of the first and the last round take
    last_label: float = 0.07
    zero: bool = False
    integers: bool = False
    limits: tuple[float, float] | None = None
    dots: Sequence[Dots] = field(default=())

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
        alone = _between_gaps(bucket.mean)
        positions = zip(x[alone].tolist(), y[alone].tolist(), strict=True)
        fixed += [_dot(*position, f"dot c{line.style % 8}", "") for position in positions]
    for dots in frame.dots:
        fixed += _draw_dots(frame, scale, dots)
    return _draw_chart(frame, scale, stretched, fixed, buckets, lines)


def bar_chart(frame: Frame, bars: Line) -> Markup:
    """One bar per round, or per bucket of rounds."""
    bucket = bucketed(frame.rounds, bars.values, frame.buckets)
    scale = frame.scale([bucket.mean, np.zeros(1)])
    left, width = _bucket_boxes(frame, bucket)
    top = frame.y(scale, bucket.mean)
    boxes = zip(left.tolist(), (width * 0.8).tolist(), top.tolist(), strict=True)
    path = "".join(
        f"M{xy(x)} {frame.height}V{xy(min(y, frame.height - 1.0))}h{max(w, 1):.2f}V{frame.height}z"
        for (x, w, y), value in zip(boxes, bucket.mean.tolist(), strict=True)
        if value > 0
    )
    return _draw_chart(frame, scale, [f'<path class="bars c{bars.style % 8}" d="{path}"/>'], [], [bucket], [bars])


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
        if b != b:
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


def _draw_dots(frame: Frame, scale: Scale, dots: Dots) -> list[str]:
    classes = f"{'ring' if dots.hollow else 'dot'} {'l' if dots.hollow else 'c'}{dots.style % 8}"
    columns = (frame.x(dots.rounds), frame.y(scale, dots.values), dots.rounds, dots.values)
    return [
        _dot(x, y, classes, f"round {round:,}: {dots.name} {number(value)}")
        for x, y, round, value in zip(*(column.tolist() for column in columns), strict=True)
        if np.isfinite(value)
    ]


def _dot(x: float, y: float, classes: str, title: str) -> str:
    title = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="{classes}" cx="{100 * x:.2f}%" cy="{xy(y)}" r="3.5">{title}</circle>'


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


def _grid(frame: Frame, scale: Scale) -> list[str]:
    """Lines and numbers behind the data."""
    parts, height = [], frame.height
    for tick in scale.ticks:
        y = xy(height * (1 - scale.share(tick)))
        kind = "zero" if tick == 0 or tick == scale.ticks[0] else "rule"
        parts.append(f'<line class="{kind}" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="y" x="-8" y="{y}" dy=".32em">{tick_text(tick, scale.step)}</text>')
    parts += [
        f'<text class="{classes}" x="{100 * x:.2f}%" y="{height + 17}">{words}</text>'
        for x, words, classes in _round_labels(frame)
    ]
    return parts


def _round_labels(frame: Frame) -> list[tuple[float, str, str]]:
    """The first and the last round, and round numbers between them: position, text and classes of each."""
    if not len(frame.rounds) and not frame.dots:
        return []
    first, last = frame.ends
    if last == first:
        return [(0.5, f"round {first:,}", "x")]
    ticks = [((tick - first) / (last - first), f"{tick:,}", "x") for tick in round_ticks(first, last, frame.x_ticks)]
    between = [tick for tick in ticks if frame.first_label < tick[0] < 1 - frame.last_label]
    return [(0.0, f"round {first:,}", "x first"), *between, (1.0, f"{last:,}", "x last")]


def _hover_boxes(frame: Frame, lines: Sequence[Line], buckets: Sequence[Buckets]) -> list[str]:
    """Invisible boxes over the data that show its numbers as tooltips."""
    if not buckets or not len(buckets[0].first):
        return []
    left, width = _bucket_boxes(frame, buckets[0])
    named = [(escape(line.name), bucket) for line, bucket in zip(lines, buckets, strict=True)]
    parts = []
    for i, (x, w) in enumerate(zip(left.tolist(), width.tolist(), strict=True)):
        first, last = int(buckets[0].first[i]), int(buckets[0].last[i])
        words = [f"round {first:,}" if first == last else f"rounds {first:,} to {last:,}, mean (minimum to maximum)"]
        for name, bucket in named:
            ends = "" if first == last else f" ({number(bucket.low[i])} to {number(bucket.high[i])})"
            words.append(f"{name} {number(float(bucket.mean[i]))}{ends}")
        box = f'<rect class="at" x="{xy(x)}" width="{w:.2f}" height="{frame.height}">'
        parts.append(f"{box}<title>{'&#10;'.join(words)}</title></rect>")
    return parts


def _bucket_boxes(frame: Frame, bucket: Buckets) -> tuple[Floats, Floats]:
    """The left edge and the width of each bucket."""
    middle = frame.x(bucket.middle) * WIDTH
    if len(middle) < 2:
        return middle - 40, np.full(len(middle), 80.0)
    edges = (middle[1:] + middle[:-1]) / 2
    edges = np.concatenate(([max(2 * middle[0] - edges[0], 0)], edges, [min(2 * middle[-1] - edges[-1], WIDTH)]))
    return edges[:-1], np.diff(edges)
