"""report.html: one page about a run, made from its events.jsonl alone.

The page loads nothing: style and pictures are inline, there is no script, and its content security policy forbids
other sources. Text from outside is made visible here and escaped by the template. The page stays small for any run:
charts have limited resolution, and lists and texts are cut with a note about what is left out.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from math import ceil, lcm
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from raggedright.errors import RaggedRightError
from raggedright.files import write_file
from raggedright.plan.layout import Layout
from raggedright.plan.plan import make_plan
from raggedright.report import plan_svg
from raggedright.report.events import EVENTS_FILE, EventsError, Failure, RowsEvent, RunEvents, read_events
from raggedright.report.plan_svg import draw_plan
from raggedright.report.run_charts import loss_panels, row_panels, score_panel, time_panel
from raggedright.report.run_numbers import (
    headline,
    ledger_lines,
    name_of,
    parts_total,
    row_outcomes,
    session_outcomes,
    shown_warnings,
)
from raggedright.report.run_samples import SHADES, shown_samples
from raggedright.report.text import duration, more, number, share, value_text, visible

PAGE = "report.html"
MAX_OUTCOMES, MAX_CAUSES, MAX_EXAMPLES, MAX_SETTINGS = 12, 40, 3, 400
MAX_CAUSE, MAX_VALUE = 300, 300
MAX_PLANNED = 2_000_000  # rows and micro-batches of a plan that is drawn


class Grid(NamedTuple):
    """The plan of a round as a picture, or the reason why there is none."""

    round: int
    picture: Markup
    why_not: str


def write_report(run_folder: Path) -> Path:
    """Write the page of a run folder and return its path; an existing page is replaced atomically."""
    if not run_folder.is_dir():
        raise EventsError(f"{run_folder}: no such folder; pass the run folder that contains {EVENTS_FILE}")
    if not (run_folder / EVENTS_FILE).is_file():
        raise EventsError(
            f"{run_folder}: the folder has no {EVENTS_FILE}, so it is not a run folder; pass the folder of a run"
        )
    page = render_report(read_events(run_folder / EVENTS_FILE))
    path = run_folder / PAGE
    try:
        write_file(path, page.encode(errors="replace"))
    except OSError as error:
        raise EventsError(f"{path}: {error.strerror}; the report could not be written") from None
    return path


def render_report(events: RunEvents) -> str:
    """The page as HTML."""
    sessions, rows = session_outcomes(events), row_outcomes(events)
    samples, largest = shown_samples(events.samples)
    parts = parts_total(events)
    causes = _causes(events)
    return _template().render(
        name=name_of(events),
        stats=headline(events),
        warnings=shown_warnings(events),
        num_rounds=len(events.rounds),
        score=score_panel(events),
        row_panels=row_panels(events),
        loss_panels=loss_panels(events),
        time=time_panel(events),
        parts=_part_lines(parts),
        grids=[_grid(events, each) for each in _ends(events.rows)],
        session_lines=ledger_lines(sessions, MAX_OUTCOMES),
        row_lines=ledger_lines(rows, MAX_OUTCOMES),
        num_sessions=sum(sessions.values()),
        num_rows=sum(rows.values()),
        num_padding=sum(each.padding_rows or 0 for each in events.rounds),
        num_reused=sum(each.ledger.reused_sessions for each in events.rounds),
        causes=causes[:MAX_CAUSES],
        causes_left=max(len(causes) - MAX_CAUSES, 0),
        samples=samples,
        largest=number(largest) if largest else "",
        shades=[*(f"down{i}" for i in range(SHADES, 0, -1)), "flat", *(f"up{i}" for i in range(1, SHADES + 1))],
        settings=_settings(events.start.config if events.start else {}),
        light=(plan_svg.LIGHT, plan_svg.LIGHT_PROMPTS),
        dark=(plan_svg.DARK, plan_svg.DARK_PROMPTS),
        plan_style=Markup(plan_svg.inline_style()),
        hatch=Markup(plan_svg.HATCH),
    )


class Cause(NamedTuple):
    """A cause of failed sessions, their number, and a few of them."""

    num_sessions: int
    words: str
    examples: str


def _causes(events: RunEvents) -> list[Cause]:
    """The causes of failed sessions, the most frequent first."""
    sessions: dict[str, list[tuple[int, Failure]]] = {}
    for each in events.rounds:
        for failed in each.failed:
            sessions.setdefault(failed.cause, []).append((each.round, failed))
    causes = []
    for cause, failures in sessions.items():
        shown = [f"{visible(f.prompt, 40)}/{f.session} in round {number:,}" for number, f in failures[-MAX_EXAMPLES:]]
        rest = more(len(failures) - len(shown), "session")
        causes.append(Cause(len(failures), visible(cause, MAX_CAUSE), ", ".join([*shown, *([rest] if rest else [])])))
    return sorted(causes, key=lambda cause: -cause.num_sessions)


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("raggedright.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")


def _ends(rows: tuple[RowsEvent, ...]) -> list[RowsEvent]:
    return [rows[0], rows[-1]] if len(rows) > 1 else list(rows)


def _grid(events: RunEvents, rows: RowsEvent) -> Grid:
    """The plan of a round, computed again from its rows."""
    layout = rows.layout or (events.start.layout if events.start else None)
    if layout is None:
        return Grid(rows.round, Markup(), "The events do not contain the layout of the run.")
    if _planned(layout, len(rows.rows)) > MAX_PLANNED:
        return Grid(rows.round, Markup(), "The plan is too large to draw.")
    try:
        plan = make_plan(rows.rows, layout)
    except RaggedRightError as error:
        return Grid(rows.round, Markup(), visible(str(error), MAX_CAUSE))
    return Grid(rows.round, Markup(draw_plan(plan, inline=f"round-{rows.round}")), "")


def _planned(layout: Layout, num_rows: int) -> int:
    """An estimate of the rows and micro-batches of a plan: a layout in a file from outside may require any number."""
    sizes = [layout.mini_batch_size, layout.critic_mini_batch_size or layout.mini_batch_size]
    lanes = layout.dp_size * layout.micro_batch_multiple
    multiple = lcm(layout.dp_size, *(size * layout.rollout_n for size in sizes)) if layout.align == "lcm" else 0
    steps = sum(ceil(layout.batch_size / size) for size in sizes) if layout.align == "steps" else num_rows
    return layout.epochs * (num_rows + multiple + steps * lanes)


def _part_lines(parts: list[tuple[str, float]]) -> list[tuple[str, str, str, float]]:
    total = sum(seconds for _, seconds in parts)
    longest = max((seconds for _, seconds in parts), default=1.0) or 1.0
    return [
        (visible(part, 40), duration(seconds), share(seconds, total), 100 * seconds / longest)
        for part, seconds in parts[: len(plan_svg.LIGHT_PROMPTS)]
    ]


def _settings(config: Mapping[str, object]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The config by section; keys of nested tables are joined with dots."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for path, value in islice(_leaves(config, ()), MAX_SETTINGS):
        section = path[0] if len(path) > 1 else ""
        key = ".".join(path[1:] if len(path) > 1 else path)
        sections.setdefault(visible(section, 60), []).append((visible(key, 80), value_text(value, MAX_VALUE)))
    return sorted(sections.items(), key=lambda item: item[0] != "")


def _leaves(table: Mapping[str, object], path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value and len(path) < 3:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value
