"""report.html: one page about a run, made from its events.jsonl alone.

The page asks for nothing: style and pictures are inside it, there is no script, and its content security policy forbids
both. Whatever comes from outside is made visible here and escaped by the template. It stays small for any run: charts
are cut to pixels, lists and texts have an end and say what they leave out.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from math import ceil, lcm
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from raggedright.errors import RaggedRightError
from raggedright.plan.layout import Layout
from raggedright.plan.plan import make_plan
from raggedright.report import axes, svg_page
from raggedright.report.event_fields import EventsError
from raggedright.report.events import read_events
from raggedright.report.run_charts import loss_panels, row_panels, score_panel, time_panel
from raggedright.report.run_events import RoundRows, RunEvents
from raggedright.report.run_numbers import headline, ledger_lines, name_of, parts_total, row_outcomes, session_outcomes
from raggedright.report.run_samples import SHADES, shown_samples
from raggedright.report.svg import draw_plan
from raggedright.report.visible import value_text, visible

EVENTS, PAGE = "events.jsonl", "report.html"
MOST_OUTCOMES, MOST_FAILURES, MOST_SETTINGS = 12, 40, 400
MOST_CAUSE, MOST_VALUE = 300, 300
MOST_PLANNED = 2_000_000  # rows and micro-batches of a plan that is drawn


class Grid(NamedTuple):
    """A round's plan as a picture, or why there is none."""

    round: int
    picture: Markup
    why_not: str


def write_report(run_folder: Path) -> Path:
    """Make the page of a run folder; where it stands. One that is there stays until the new one is whole."""
    if not run_folder.is_dir():
        raise EventsError(f"{run_folder}: no such folder; give the folder of a run, the one with {EVENTS} in it")
    if not (run_folder / EVENTS).is_file():
        raise EventsError(
            f"{run_folder}: there is no {EVENTS} in it, so it is not the folder of a run; give one that is"
        )
    page = render_report(read_events(run_folder / EVENTS))
    path, new = run_folder / PAGE, run_folder / f".{PAGE}.{os.getpid()}"
    try:
        new.write_bytes(page.encode(errors="replace"))
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise EventsError(f"{path}: {error.strerror}; the page could not be written") from None
    return path


def render_report(events: RunEvents) -> str:
    """The page as HTML."""
    sessions, rows = session_outcomes(events), row_outcomes(events)
    samples, largest = shown_samples(events.samples)
    parts = parts_total(events)
    failures = [(each.round, failure) for each in events.rounds for failure in each.failed]
    return _template().render(
        name=name_of(events),
        stats=headline(events),
        num_rounds=len(events.rounds),
        score=score_panel(events),
        row_panels=row_panels(events),
        loss_panels=loss_panels(events),
        time=time_panel(events),
        parts=_part_lines(parts),
        grids=[_grid(events, each) for each in _ends(events.rows)],
        session_lines=ledger_lines(sessions, MOST_OUTCOMES),
        row_lines=ledger_lines(rows, MOST_OUTCOMES),
        num_sessions=sum(sessions.values()),
        num_rows=sum(rows.values()),
        num_padding=sum(each.padding_rows or 0 for each in events.rounds),
        num_reused=sum(each.reused_sessions for each in events.rounds),
        failures=[
            (number, visible(f.prompt, 40), f.session, visible(f.cause, MOST_CAUSE))
            for number, f in failures[-MOST_FAILURES:]
        ],
        failures_left=max(len(failures) - MOST_FAILURES, 0),
        samples=samples,
        largest=axes.number(largest),
        shades=[*(f"down{i}" for i in range(SHADES, 0, -1)), "flat", *(f"up{i}" for i in range(1, SHADES + 1))],
        settings=_settings(events.start.config if events.start else {}),
        light=(svg_page.LIGHT, svg_page.LIGHT_PROMPTS),
        dark=(svg_page.DARK, svg_page.DARK_PROMPTS),
        plan_style=Markup(svg_page.inline_style()),
        hatch=Markup(svg_page.HATCH),
    )


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("raggedright.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")


def _ends(rows: tuple[RoundRows, ...]) -> list[RoundRows]:
    return [rows[0], rows[-1]] if len(rows) > 1 else list(rows)


def _grid(events: RunEvents, rows: RoundRows) -> Grid:
    """The plan of a round, made again."""
    layout = rows.layout or (events.start.layout if events.start else None)
    if layout is None:
        return Grid(rows.round, Markup(), "The run's layout is not written down.")
    if _planned(layout, len(rows.rows)) > MOST_PLANNED:
        return Grid(rows.round, Markup(), "Its plan is too large to draw.")
    try:
        plan = make_plan(rows.rows, layout)
    except RaggedRightError as error:
        return Grid(rows.round, Markup(), visible(str(error), MOST_CAUSE))
    return Grid(rows.round, Markup(draw_plan(plan, inline=f"round-{rows.round}")), "")


def _planned(layout: Layout, num_rows: int) -> int:
    """About how many rows and micro-batches a plan would hold: a stranger's layout may ask for any number."""
    sizes = [layout.mini_batch_size, layout.critic_mini_batch_size or layout.mini_batch_size]
    lanes = layout.dp_size * layout.micro_batch_multiple
    multiple = lcm(layout.dp_size, *(size * layout.rollout_n for size in sizes)) if layout.align == "lcm" else 0
    steps = sum(ceil(layout.batch_size / size) for size in sizes) if layout.align == "steps" else num_rows
    return layout.epochs * (num_rows + multiple + steps * lanes)


def _part_lines(parts: list[tuple[str, float]]) -> list[tuple[str, str, str, float]]:
    total = sum(seconds for _, seconds in parts)
    longest = max((seconds for _, seconds in parts), default=1.0) or 1.0
    return [
        (visible(part, 40), axes.duration(seconds), axes.share(seconds, total), 100 * seconds / longest)
        for part, seconds in parts[: len(svg_page.LIGHT_PROMPTS)]
    ]


def _settings(config: Mapping[str, object]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The config by section; keys of tables within are joined with dots."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for path, value in islice(_leaves(config, ()), MOST_SETTINGS):
        section = path[0] if len(path) > 1 else ""
        key = ".".join(path[1:] if len(path) > 1 else path)
        sections.setdefault(visible(section, 60), []).append((visible(key, 80), value_text(value, MOST_VALUE)))
    return sorted(sections.items(), key=lambda item: item[0] != "")


def _leaves(table: Mapping[str, object], path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value and len(path) < 3:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value
