"""Charts of numbers over rounds, as SVG that stands in a page: lines with bands and dots, bars, and stacks.

Lines differ in their dashes, not in colour alone. A gap is a gap: no line leads over it, and a point between two
gaps is a dot.
"""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape

from raggedright.arrays import Floats, Ints
from raggedright.report.axes import number
from raggedright.report.chart_frame import WIDE, Frame, Line, draw_chart, stretches, y_of
from raggedright.report.series import bucketed
from raggedright.report.svg_page import n


def line_chart(frame: Frame, lines: Sequence[Line]) -> Markup:
    """Lines over rounds, with bands and dots."""
    drawn = [(line, bucketed(frame.rounds, line.values, frame.buckets)) for line in lines]
    bands = [_band(frame, line) for line in lines]
    every = [b for _, bucket in drawn for b in (bucket.low, bucket.high)] + [b for pair in bands for b in pair]
    scale = frame.scale([*every, *(dots.values for dots in frame.dots)])
    parts, loose = [], []
    for (line, bucket), (low, high) in zip(drawn, bands, strict=True):
        x = frame.x(bucket.middle)
        parts.append(_area(x, y_of(frame, scale, low), y_of(frame, scale, high), f"band c{line.style % 8}"))
        y = y_of(frame, scale, bucket.mean)
        parts.append(f'<path class="line l{line.style % 8}" d="{_polyline(x, y)}"/>')
        alone = _alone(bucket.mean)
        places = zip(x[alone].tolist(), y[alone].tolist(), strict=True)
        loose += [_dot(at, height, f"dot c{line.style % 8}", "") for at, height in places]
    for dots in frame.dots:
        kind = f"{'ring' if dots.hollow else 'dot'} {'l' if dots.hollow else 'c'}{dots.style % 8}"
        places = zip(frame.x(dots.rounds).tolist(), dots.rounds.tolist(), dots.values.tolist(), strict=True)
        loose += [
            _dot(x, float(y_of(frame, scale, np.array([value]))[0]), kind, f"round {at:,}: {dots.name} {number(value)}")
            for x, at, value in places
            if np.isfinite(value)
        ]
    return draw_chart(frame, scale, parts, loose, [(line.name, bucket) for line, bucket in drawn], lines)


def bar_chart(frame: Frame, bars: Line) -> Markup:
    """A bar for each round, or for the mean of a few."""
    bucket = bucketed(frame.rounds, bars.values, frame.buckets)
    scale = frame.scale([bucket.mean, np.zeros(1)])
    left, width = stretches(frame, bucket)
    top = y_of(frame, scale, bucket.mean)
    boxes = zip(left.tolist(), (width * 0.8).tolist(), top.tolist(), strict=True)
    path = "".join(
        f"M{n(x)} {frame.height}V{n(min(y, frame.height - 1.0))}h{max(w, 1):.2f}V{frame.height}z"
        for (x, w, y), value in zip(boxes, bucket.mean.tolist(), strict=True)
        if value > 0
    )
    parts = [f'<path class="bars c{bars.style % 8}" d="{path}"/>']
    return draw_chart(frame, scale, parts, [], [(bars.name, bucket)], [bars])


def stacked_chart(frame: Frame, lines: Sequence[Line]) -> Markup:
    """Parts of a whole over rounds, the first one lowest; a gap counts as zero."""
    buckets = [bucketed(frame.rounds, line.values, frame.buckets) for line in lines]
    heights = np.cumsum([np.nan_to_num(bucket.mean) for bucket in buckets], axis=0)
    below = np.vstack([np.zeros_like(heights[:1]), heights[:-1]]) if len(lines) else heights
    scale = frame.scale([*heights, np.zeros(1)])
    parts = []
    for line, bucket, low, high in zip(lines, buckets, below, heights, strict=True):
        x = frame.x(bucket.middle)
        if len(x) == 1:  # a single round has no width of its own
            x, low, high = np.array([0.3, 0.7]), np.repeat(low, 2), np.repeat(high, 2)
        parts.append(_area(x, y_of(frame, scale, low), y_of(frame, scale, high), f"stack c{line.style % 8}"))
    return draw_chart(frame, scale, parts, [], [(line.name, b) for line, b in zip(lines, buckets, strict=True)], lines)


def _band(frame: Frame, line: Line) -> tuple[Floats, Floats]:
    """The band of a line: its own, or what its buckets span."""
    if line.low is not None and line.high is not None:
        low, high = (bucketed(frame.rounds, end, frame.buckets) for end in (line.low, line.high))
        return low.low, high.high
    bucket = bucketed(frame.rounds, line.values, frame.buckets)
    return (bucket.low, bucket.high) if len(frame.rounds) > frame.buckets else (bucket.low[:0], bucket.high[:0])


def _polyline(x: Floats, y: Floats) -> str:
    """A path through the points, broken at gaps."""
    words, pen = [], "M"
    for a, b in zip((x * WIDE).tolist(), y.tolist(), strict=True):
        if b != b:
            pen = "M"
        else:
            words.append(f"{pen}{n(a)} {n(b)}")
            pen = "L"
    return "".join(words)


def _alone(values: Floats) -> Ints:
    """Points with a gap on both sides: a line does not show them."""
    known = np.concatenate(([False], np.isfinite(values), [False]))
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])


def _area(x: Floats, low: Floats, high: Floats, classes: str) -> str:
    """What lies between two lines, a piece for each stretch without a gap."""
    if not len(low):
        return ""
    known = np.isfinite(low) & np.isfinite(high)
    pieces = np.split(np.arange(len(known)), np.flatnonzero(np.diff(known)) + 1)
    path = ""
    for piece in pieces:
        if known[piece[0]]:
            if len(piece) == 1:  # a bar, where a point has no width
                at, top, bottom = (float(values[piece[0]]) for values in (x, high, low))
                path += f"M{n(at * WIDE - 4)} {n(top)}h8V{n(bottom)}h-8z"
                continue
            path += _polyline(x[piece], high[piece]) + "L" + _polyline(x[piece][::-1], low[piece][::-1])[1:] + "z"
    return f'<path class="{classes}" d="{path}"/>' if path else ""


def _dot(x: float, y: float, classes: str, words: str) -> str:
    title = f"<title>{escape(words)}</title>" if words else ""
    return f'<circle class="{classes}" cx="{100 * x:.2f}%" cy="{n(y)}" r="3.5">{title}</circle>'
