"""The page that a plan is drawn on: frame, colours for light and dark, and the shapes.

Colours are written out for both schemes instead of through CSS variables, which many viewers of SVG do not know.
Within an HTML page several plans share one style and one hatch, `inline_style` and `HATCH`, under a class of their own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from string import Template
from xml.sax.saxutils import escape

WIDTH = 880
INLINE_CLASS = "plan"

_SHAPES = """
text{font:12px ui-sans-serif,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.h{font-size:16px;font-weight:600}.b{font-weight:600}.e{text-anchor:end}
.band{opacity:.14}.skipped{opacity:.4}.padding{fill:url(#hatch)}.dropped{fill:none;stroke-dasharray:2 2}
"""
_COLOURS = Template(
    "text{fill:$ink}.m{fill:$soft}.page{fill:$page;stroke:$line}.panel{fill:$panel;stroke:$line}"
    ".cell{fill:$cell;stroke:$line}.padding,.hatch{stroke:$ink}.under{fill:$cell}.dropped{stroke:$soft}"
)
LIGHT = {
    "page": "#fff", "panel": "#fafbfc", "cell": "#f0f2f5", "line": "#d9dee4", "ink": "#1f2933", "soft": "#65717e",
}  # fmt: skip
DARK = {
    "page": "#0d1117", "panel": "#12171e", "cell": "#1b222b", "line": "#303842", "ink": "#e6edf3", "soft": "#919ca8",
}  # fmt: skip
LIGHT_PROMPTS = ("#4c88d3", "#e38d3d", "#32a88e", "#cd6199", "#8166c3", "#d8b349", "#51b3d0", "#dc655f")
DARK_PROMPTS = ("#5e9ae7", "#f8a052", "#4abba1", "#e274ab", "#9379d7", "#deba50", "#65c6e4", "#f17871")


HATCH = (
    '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse">'
    '<rect class="under" width="4" height="4"/><path class="hatch" d="M-1 1 1-1M0 4 4 0M3 5 5 3"/>'
    "</pattern></defs>"
)


def page(body: Iterable[str], height: float, about: str, *, inline: str = "") -> str:
    """A whole SVG document; `about` is what a screen reader says. `inline` names one that stands in an HTML page."""
    style = _SHAPES + _colours(LIGHT, LIGHT_PROMPTS)
    style += f"\n@media (prefers-color-scheme:dark){{{_colours(DARK, DARK_PROMPTS)}}}\n"
    end = f"-{inline}" if inline else ""
    parts = (
        f'<svg {f"class={INLINE_CLASS!r} " if inline else ""}xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {n(height)}" width="{WIDTH}" '
        f'height="{n(height)}" role="img" aria-labelledby="title{end} desc{end}">',
        f'<title id="title{end}">From ragged sessions to a plan</title>',
        f'<desc id="desc{end}">{escape(about)}</desc>',
        *(() if inline else (f"<style>{style}</style>", HATCH)),
        rect(0.5, 0.5, WIDTH - 1, height - 1, "page", 12),
        *body,
        "</svg>\n",
    )
    return "\n".join(parts)


def inline_style() -> str:
    """The style of plans within an HTML page, which touches nothing else there."""
    light, dark = (_colours(*scheme) for scheme in ((LIGHT, LIGHT_PROMPTS), (DARK, DARK_PROMPTS)))
    return f"{_scoped(_SHAPES + light)}\n@media (prefers-color-scheme:dark){{{_scoped(dark)}}}"


def _scoped(style: str) -> str:
    """The rules, each for what is under our class alone."""
    return re.sub(
        r"([^{}]+)(\{[^}]*\})",
        lambda rule: ",".join(f".{INLINE_CLASS} {each.strip()}" for each in rule[1].split(",")) + rule[2],
        style.strip(),
    )


def _colours(names: Mapping[str, str], prompts: Sequence[str]) -> str:
    return _COLOURS.substitute(names) + "".join(f".p{i}{{fill:{colour}}}" for i, colour in enumerate(prompts))


def prompt_class(prompt: int) -> str:
    """The colour of a prompt by its number; colours come around again."""
    return f"p{prompt % len(LIGHT_PROMPTS)}"


def text(x: float, y: float, words: str, classes: str) -> str:
    """Words, made safe, with their baseline at y."""
    return f'<text class="{classes}" x="{n(x)}" y="{n(y)}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, classes: str, radius: float) -> str:
    """A rectangle with round corners."""
    size = f'width="{n(width)}" height="{n(height)}" rx="{n(radius)}"'
    return f'<rect class="{classes}" x="{n(x)}" y="{n(y)}" {size}/>'


def short(name: str) -> str:
    """A name from outside in at most eight characters that any XML reader takes."""
    name = name if len(name) <= 8 else f"{name[:3]}…{name[-4:]}"
    return "".join(c if c.isprintable() else "?" for c in name)


def n(number: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{number:.1f}".removesuffix(".0")
