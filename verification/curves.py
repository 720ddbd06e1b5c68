"""Draw curves of runs as one self-contained SVG: one panel per group of runs, for light and dark backgrounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, GAP, LEFT, TOP = 260, 130, 26, 34, 40
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #3d4451 } .title { font-weight: 600; font-size: 12px }
.grid { stroke: #d9dde3; stroke-width: 1 } polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round }
.s0 { stroke: #1f6feb } .s1 { stroke: #d9730d; stroke-dasharray: 5 3 } .s2 { stroke: #1a7f5a; stroke-dasharray: 2 2 }
.s3 { stroke: #8250df; stroke-dasharray: 8 3 } .s4 { stroke: #b42318; stroke-dasharray: 1 3 } .s5 { stroke: #57606a }
rect { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #c9d1d9 } .grid { stroke: #30363d } rect { fill: #0d1117 }
.s0 { stroke: #58a6ff } .s1 { stroke: #f0a05a } .s2 { stroke: #56d39b } .s3 { stroke: #bc8cff } .s4 { stroke: #ff7b72 }
}
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves with values from 0 to 1, over rounds, or over points with the labels `ticks`."""

    title: str
    curves: Mapping[str, Sequence[float]]
    ticks: Sequence[str] = ()


def draw(panels: Sequence[Panel], *, columns: int, title: str, height: int = HEIGHT, width: int = WIDTH) -> str:
    """The SVG; the legend is that of the first panel."""
    across, down = width + LEFT + GAP, height + TOP + GAP
    num_lines = -(-len(panels) // columns)
    total = columns * across + GAP, num_lines * down + 2 * GAP
    parts = [f'<rect width="{total[0]}" height="{total[1]}"/>', _legend(panels[0], title)]
    for i, panel in enumerate(panels):
        x, y = GAP + i % columns * across, GAP + i // columns * down
        parts.append(f'<g transform="translate({x + LEFT} {y + TOP})">{_panel(panel, width, height)}</g>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" role="img">'
    return f"{head}<title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"


def _legend(panel: Panel, title: str) -> str:
    x, parts = GAP, [f'<text class="title" x="{GAP}" y="20">{escape(title)}</text>']
    for i, name in enumerate(panel.curves):
        parts.append(f'<polyline class="s{i}" points="{x},36 {x + 24},36"/>')
        parts.append(f'<text x="{x + 30}" y="40">{escape(name)}</text>')
        x += 44 + 7 * len(name)
    return "".join(parts)


def _panel(panel: Panel, width: int, height: int) -> str:
    parts = [f'<text class="title" y="-8">{escape(panel.title)}</text>']
    for value in (0.0, 0.5, 1.0):
        y = height * (1 - value)
        parts.append(f'<line class="grid" x1="0" x2="{width}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="-6" y="{y + 4}" text-anchor="end">{value:g}</text>')
    last = max(len(values) for values in panel.curves.values())
    ticks = {*range(last)} if panel.ticks else {0, (last - 1) // 2, last - 1}
    for r in sorted(ticks):
        x = width * r / max(1, last - 1)
        words = panel.ticks[r] if panel.ticks else str(r + 1)
        parts.append(f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle">{escape(words)}</text>')
    for i, values in enumerate(panel.curves.values()):
        points = (
            f"{width * r / max(1, last - 1):.1f},{height * (1 - min(1.0, max(0.0, value))):.1f}"
            for r, value in enumerate(values)
        )
        parts.append(f'<polyline class="s{i}" points="{" ".join(points)}"/>')
    return "".join(parts)
