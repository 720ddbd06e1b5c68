"""A plan as a picture: the ragged sessions on the left, steps x ranks x micro-batches on the right.

Each prompt has a colour, the width of a bar is its tokens, and a ribbon connects each prompt with the steps that train
on it. The output is plain SVG without scripts, fonts or links, for light and dark, so that it can be shown in a README.
It stays small for any plan: what is left out is counted in a caption, and bars that are too thin to see are merged.
Colours are written out for both schemes instead of through CSS variables, which many SVG viewers do not support.

Note: a padding row has so few tokens that it would not be visible, so it is drawn wider than its tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import Template
from xml.sax.saxutils import escape

import numpy as np

from raggedright.arrays import Ints, sum_by
from raggedright.plan.cut import Step
from raggedright.plan.measure import tokens_of
from raggedright.plan.planner import Plan, Role
from raggedright.report.plan_output import budget_in_words, num_padding_rows, rows_in_words, step_facts, step_name
from raggedright.report.text import counted, more

MAX_SESSIONS, MAX_STEPS, MAX_LANES, MAX_SLOTS = 32, 4, 16, 12
TOP, MARGIN = 84, 24
BAND, BAND_WIDTH, BARS = 84, 208, 192  # a prompt's band: left edge, width, room for bars
PANEL, PANEL_WIDTH, CELLS = 380, 476, 62  # a step's panel: left edge, width, where its cells begin
SESSION, BAR, MIN_LANE, MAX_LANE = 12, 8, 24, 38  # heights: a session's line, its bars, a rank's lane
MIN_BAR, PADDING_WIDTH, MAX_CELL = 2.5, 8.0, 200.0

WIDTH = 880

LIGHT = {
    "page": "#fff", "panel": "#fafbfc", "cell": "#f0f2f5", "line": "#d9dee4", "ink": "#1f2933", "soft": "#65717e",
}  # fmt: skip
DARK = {
    "page": "#0d1117", "panel": "#12171e", "cell": "#1b222b", "line": "#303842", "ink": "#e6edf3", "soft": "#919ca8",
}  # fmt: skip
LIGHT_PROMPTS = ("#4c88d3", "#e38d3d", "#32a88e", "#cd6199", "#8166c3", "#d8b349", "#51b3d0", "#dc655f")
DARK_PROMPTS = ("#5e9ae7", "#f8a052", "#4abba1", "#e274ab", "#9379d7", "#deba50", "#65c6e4", "#f17871")


def _colours(names: Mapping[str, str], prompts: Sequence[str]) -> str:
    rules = Template(
        ".plan text{fill:$ink}.plan .m{fill:$soft}.plan .page{fill:$page;stroke:$line}"
        ".plan .panel{fill:$panel;stroke:$line}.plan .cell{fill:$cell;stroke:$line}"
        ".plan .padding,.plan .hatch{stroke:$ink}.plan .under{fill:$cell}.plan .dropped{stroke:$soft}"
    )
    return rules.substitute(names) + "".join(f".plan .p{i}{{fill:{colour}}}" for i, colour in enumerate(prompts))


STYLE = f"""
.plan text{{font:12px ui-sans-serif,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}
.plan .h{{font-size:16px;font-weight:600}}.plan .b{{font-weight:600}}.plan .e{{text-anchor:end}}
.plan .band{{opacity:.14}}.plan .skipped{{opacity:.4}}
.plan .padding{{fill:url(#hatch)}}.plan .dropped{{fill:none;stroke-dasharray:2 2}}
{_colours(LIGHT, LIGHT_PROMPTS)}
@media (prefers-color-scheme:dark){{{_colours(DARK, DARK_PROMPTS)}}}
"""
HATCH = (
    '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse">'
    '<rect class="under" width="4" height="4"/><path class="hatch" d="M-1 1 1-1M0 4 4 0M3 5 5 3"/>'
    "</pattern></defs>"
)


@dataclass(frozen=True, slots=True)
class _Span:
    """The vertical extent of something on the page."""

    top: float
    bottom: float

    def part(self, end: int, size: int, total: int) -> "_Span":
        """The part that `size` of `total` units takes, ending at unit `end`."""
        unit = (self.bottom - self.top) / total
        return _Span(self.top + (end - size) * unit, self.top + end * unit)


@dataclass(frozen=True, slots=True)
class _Cell:
    """The size of a micro-batch, and the width of a token in it."""

    width: float
    height: float
    scale: float


def draw_plan(plan: Plan, *, role: Role | None = None, inline: str = "") -> str:
    """The SVG of one role's cut, by default of the first that trains; `inline` names it within an HTML page."""
    role = role or plan.trained_roles[0]
    bands, sessions = _draw_sessions(plan)
    left = max((band.bottom for band in bands.values()), default=float(TOP))
    panels, steps = _draw_steps(plan, role, left)
    bottom = max([left, *(panel.bottom for panel in panels)])
    title = {"actor": "Plan", "critic": "Plan of the critic", "forward": "Plan of the forward pass"}[role]
    body = [
        _text(MARGIN, 38, "Sessions", "h"),
        _text(MARGIN, 60, rows_in_words(plan), "m"),
        _text(PANEL, 38, title, "h"),
        _text(PANEL, 60, _steps_in_words(plan, role), "m"),
        *_draw_ribbons(plan, role, bands, panels),
        *sessions,
        *steps,
        *_draw_legend(plan, bottom + 46),
    ]
    description = f"{rows_in_words(plan)}, laid out as {_steps_in_words(plan, role)}."
    description += " Colours are prompts, widths are tokens, hatched bars are padding rows."
    return _document(body, bottom + 70, description, inline=inline)


def _steps_in_words(plan: Plan, role: Role) -> str:
    steps = plan.steps(role)
    count = "one pass" if role == "forward" else counted(len(steps), "step")
    micro_batches = counted(sum(step.num_micro_batches for step in steps), "micro-batch")
    padding = counted(num_padding_rows(plan, steps), "padding row")
    return f"{count} on {counted(plan.layout.dp_size, 'rank')}, {micro_batches}, {padding}"


def _draw_sessions(plan: Plan) -> tuple[dict[int, _Span], list[str]]:
    """The band of each prompt, and a line of bars for each of its sessions."""
    rows, bands, parts, y = plan.rows, {}, [], float(TOP)
    by_name = np.argsort(rows.order, kind="stable")
    real = by_name[~rows.is_padding[by_name]]
    ends = np.append(np.flatnonzero(np.diff(rows.session_index[real])) + 1, len(real))
    shown = np.split(real, ends[:MAX_SESSIONS])[:-1] if len(real) else []
    scale = BARS / max((int(plan.lengths[row].sum()) for row in shown), default=1)
    for prompt, group in groupby(shown, key=lambda row: int(rows.prompt_index[row[0]])):
        top = y
        for row in group:
            widths = (plan.lengths[row] * scale).tolist()
            parts += _draw_bars(BAND + 8, y + 3 + (SESSION - BAR) / 2, BAR, widths, widths, _classes(plan, row))
            y += SESSION
        bands[prompt] = _Span(top, y + 6)
        name = str(rows.prompt[real[np.searchsorted(rows.prompt_index[real], prompt)]])
        parts.append(_text(MARGIN, (top + y + 6) / 2 + 4, _short(name), "m"))
        y += 12
    notes = [more(len(ends) - MAX_SESSIONS, "session")] if len(ends) > MAX_SESSIONS else []
    notes += [f"{counted(len(plan.dropped), 'row')} dropped (dashed)"] if len(plan.dropped) else []
    return bands, parts + ([_text(BAND + 8, y + 10, ", ".join(notes), "m")] if notes else [])


def _draw_steps(plan: Plan, role: Role, bottom: float) -> tuple[list[_Span], list[str]]:
    """A panel for each step with its content; lanes are as high as needed to end at `bottom`, within limits."""
    steps = plan.steps(role)
    shown = steps[:MAX_STEPS]
    num_lanes = min(plan.layout.dp_size, MAX_LANES // max(len(shown), 1))
    note = more(plan.layout.dp_size - num_lanes, "rank")
    lanes = [num_lanes if step.num_slots else 0 for step in shown]
    frames = [34 + (16 if note and count else 0) for count in lanes]
    lane = (bottom - TOP + 12 - sum(frames) - 12 * len(frames)) / max(sum(lanes), 1)
    lane = min(max(lane, MIN_LANE), MAX_LANE)
    cell = _cell(plan, shown, lane - 8)
    panels, parts, y = [], [], float(TOP)
    for number, (step, count, frame) in enumerate(zip(shown, lanes, frames, strict=True)):
        panel = _Span(y, y + frame + count * lane)
        parts.append(_rect(PANEL, panel.top, PANEL_WIDTH, panel.bottom - panel.top, "panel", 8))
        name = "forward pass" if role == "forward" else step_name(plan, number, step)
        hidden = more(step.num_slots - MAX_SLOTS, "micro-batch")
        facts = step_facts(plan, step) + ([f"{hidden} per rank"] if hidden else [])
        parts.append(_text(PANEL + 12, y + 21, name, "b"))
        parts.append(_text(PANEL + PANEL_WIDTH - 12, y + 21, ", ".join(facts), "m e"))
        parts.append('<g class="skipped">' if step.skipped else "<g>")
        for dp_rank in range(count):
            parts += _draw_lane(plan, step, dp_rank, y + 30 + dp_rank * lane, cell)
        parts.append("</g>")
        parts += [_text(PANEL + 12, panel.bottom - 9, note, "m")] if note and count else []
        panels.append(panel)
        y = panel.bottom + 12
    end = more(len(steps) - len(shown), "step") or ("" if steps else "no rows, so no steps")
    return panels, parts + ([_text(PANEL + 12, y + 10, end, "m")] if end else [])


def _cell(plan: Plan, steps: Sequence[Step], height: float) -> _Cell:
    num_slots = min(max((step.num_slots for step in steps), default=0), MAX_SLOTS)
    fullest = max((int(tokens_of(plan, step).max(initial=1)) for step in steps), default=1)
    width = min((PANEL_WIDTH - CELLS - 8) / max(num_slots, 1), MAX_CELL)
    return _Cell(width, height, (width - 9) / max(fullest, plan.layout.micro_batch_tokens or 1))


def _draw_lane(plan: Plan, step: Step, dp_rank: int, y: float, cell: _Cell) -> list[str]:
    """A rank's micro-batches, the rows in each by name, then its padding rows."""
    parts = [_text(PANEL + 12, y + cell.height / 2 + 4, f"rank {dp_rank}", "m")]
    for slot in range(min(step.num_slots, MAX_SLOTS)):
        x, row = PANEL + CELLS + slot * cell.width, step.micro_batch(dp_rank, slot)
        parts.append(_rect(x, y, cell.width - 4, cell.height, "cell", 4))
        real = row[row < len(plan.rows)]
        real = real[np.argsort(plan.rows.order[real])]
        widths = (plan.lengths[real] * cell.scale).tolist()
        # In a padded micro-batch every row takes the room of the longest.
        strides = widths if plan.layout.collate != "padded" else [max(widths, default=0.0)] * len(widths)
        parts += _draw_bars(x + 3, y + 3, cell.height - 6, strides, widths, _classes(plan, real))
        if num_padding := len(row) - len(real):
            room = max(cell.width - 9 - sum(strides), PADDING_WIDTH)
            parts += _draw_padding(x + cell.width - 6 - room, y + 3, cell.height - 6, num_padding, room)
    return parts


def _draw_padding(x: float, y: float, height: float, count: int, room: float) -> list[str]:
    """Padding rows one by one, or as one block if there is not enough room."""
    stride = PADDING_WIDTH + 3
    if count * stride > room:
        return [_rect(x, y, room, height, "padding", 2)]
    return [_rect(x + i * stride, y, PADDING_WIDTH, height, "padding", 2) for i in range(count)]


def _draw_bars(
    x: float, y: float, height: float, strides: Sequence[float], widths: Sequence[float], classes: Sequence[str]
) -> list[str]:
    """Adjacent bars; neighbours are merged, in the colour of the first, until the bar is wide enough to see."""
    parts, start, colour = [], x, ""
    for i, (stride, width, name) in enumerate(zip(strides, widths, classes, strict=True)):
        colour = colour or name
        if x + stride - start >= MIN_BAR or i == len(classes) - 1:
            parts.append(_rect(start, y, max(x + width - start - 1, 1), height, colour, 2))
            start, colour = x + stride, ""
        x += stride
    return parts


def _classes(plan: Plan, row: Ints) -> list[str]:
    names = map(_prompt_class, plan.rows.prompt_index[row].tolist())
    return ["dropped" if drop else name for name, drop in zip(names, np.isin(row, plan.dropped).tolist(), strict=True)]


def _draw_ribbons(plan: Plan, role: Role, bands: Mapping[int, _Span], panels: Sequence[_Span]) -> list[str]:
    """Ribbons from each prompt's band to its steps, as thick as its share of the band and of the step's tokens."""
    rows, right, parts = plan.rows, BAND + BAND_WIDTH, []
    tokens = np.zeros((len(panels), rows.num_prompts), dtype=np.int64)
    for number, step in enumerate(plan.steps(role)[: len(panels)]):
        real = step.row[step.row < len(rows)]
        tokens[number] = sum_by(rows.prompt_index[real], plan.lengths[real], rows.num_prompts)
    by_step, by_prompt = tokens.cumsum(axis=0), tokens.cumsum(axis=1)
    for prompt, band in bands.items():
        colour = f'class="band {_prompt_class(prompt)}"'
        round_left = f"H{BAND + 6}q-6 0-6 6V{coordinate(band.bottom - 6)}q0 6 6 6"
        parts.append(f'<path {colour} d="M{right} {coordinate(band.top)}{round_left}H{right}z"/>')
        for number in np.flatnonzero(tokens[:, prompt]).tolist():
            size = tokens[number, prompt]
            start = band.part(by_step[number, prompt], size, by_step[-1, prompt])
            panel = _Span(panels[number].top + 8, panels[number].bottom - 8)
            end = panel.part(by_prompt[number, prompt], size, by_prompt[number, -1])
            parts.append(f'<path {colour} d="{_ribbon(right, start, PANEL, end)}"/>')
    return parts


def _ribbon(x0: float, start: _Span, x1: float, end: _Span) -> str:
    left, middle, right = map(coordinate, (x0, (x0 + x1) / 2, x1))
    a, b, c, d = map(coordinate, (start.top, start.bottom, end.top, end.bottom))
    return f"M{left} {a}C{middle} {a} {middle} {c} {right} {c}V{d}C{middle} {d} {middle} {b} {left} {b}z"


def _draw_legend(plan: Plan, y: float) -> list[str]:
    padding_tokens = counted(plan.layout.min_row_tokens, "token")
    items = (
        ("p0", 26.0, "row: width is tokens, colour is prompt"),
        ("cell", 26.0, f"micro-batch: budget {budget_in_words(plan)}"),
        ("padding", PADDING_WIDTH, f"padding row: weight 0, {padding_tokens}, not to scale"),
    )
    parts, x = [], float(MARGIN)
    for name, width, words in items:
        parts += [_rect(x, y - 10, width, 12, name, 2), _text(x + width + 8, y, words, "m")]
        x += width + 8 + 5.8 * len(words) + 24
    return parts


def _document(body: Iterable[str], height: float, description: str, *, inline: str) -> str:
    """A whole SVG document; `description` is for screen readers. `inline` names one inside an HTML page."""
    end = f"-{inline}" if inline else ""
    parts = (
        f'<svg class="plan" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {coordinate(height)}" '
        f'width="{WIDTH}" height="{coordinate(height)}" role="img" aria-labelledby="title{end} desc{end}">',
        f'<title id="title{end}">From ragged sessions to a plan</title>',
        f'<desc id="desc{end}">{escape(description)}</desc>',
        *(() if inline else (f"<style>{STYLE}</style>", HATCH)),
        _rect(0.5, 0.5, WIDTH - 1, height - 1, "page", 12),
        *body,
        "</svg>\n",
    )
    return "\n".join(parts)


def _prompt_class(prompt: int) -> str:
    """The colour of a prompt by its number; colours repeat."""
    return f"p{prompt % len(LIGHT_PROMPTS)}"


def _text(x: float, y: float, words: str, classes: str) -> str:
    """Escaped text with its baseline at y."""
    return f'<text class="{classes}" x="{coordinate(x)}" y="{coordinate(y)}">{escape(words)}</text>'


def _rect(x: float, y: float, width: float, height: float, classes: str, radius: float) -> str:
    """A rectangle with round corners."""
    size = f'width="{coordinate(width)}" height="{coordinate(height)}" rx="{coordinate(radius)}"'
    return f'<rect class="{classes}" x="{coordinate(x)}" y="{coordinate(y)}" {size}/>'


def _short(name: str) -> str:
    """A name from outside in at most eight characters that are valid XML."""
    name = name if len(name) <= 8 else f"{name[:3]}…{name[-4:]}"
    return "".join(c if c.isprintable() else "?" for c in name)


def coordinate(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
