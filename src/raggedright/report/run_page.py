"""report.html: one page about a run, made from its events.jsonl alone.

The page loads nothing: style and pictures are inline, there is no script, and its content security policy forbids
other sources. Text from outside is made visible here and escaped by the template. The page stays small for any run:
charts have limited resolution, and lists and texts are cut with a note about what is left out.

Trajectories are shown token by token. Prompt tokens and observations carry no loss. A loss token is shaded by its
advantage, in four steps up to the largest advantage on the page. A token without loss that repeats, such as the
placeholder of an image, is shown once with its count.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from raggedright.errors import RaggedRightError
from raggedright.files import write_file
from raggedright.ledger import without_details
from raggedright.plan.layout import Layout
from raggedright.plan.planner import make_plan
from raggedright.report import plan_svg
from raggedright.report.events import (
    EVENTS_FILE,
    EventsError,
    Failure,
    RowsEvent,
    RunEvents,
    SampledSession,
    SampledTrajectory,
    SamplesEvent,
    read_events,
)
from raggedright.report.run_charts import MAX_PARTS, metric_panels, row_panels, score_panel, time_panel
from raggedright.report.run_numbers import headline, parts_total, row_outcomes, session_outcomes, shown_warnings
from raggedright.report.text import counted, duration, more, number, share, signed, value_text, visible

PAGE = "report.html"
STATES = {"finished": "✓", "interrupted": "■", "failed": "✕", "running": "…"}
MAX_OUTCOMES, MAX_CAUSES, MAX_EXAMPLES, MAX_SETTINGS = 12, 40, 3, 400
MAX_NAME, MAX_CAUSE, MAX_VALUE = 80, 300, 300
MAX_PLANNED = 2_000_000  # rows and micro-batches of a plan that is drawn
LAST_SESSIONS, FIRST_SESSIONS, MAX_TRAJECTORIES = 4, 2, 12
MAX_TRAJECTORY_TOKENS, MAX_PAGE_TOKENS = 400, 6000
MAX_TOKEN, MAX_TASK = 60, 400
SHADES = 4
MIN_REPEATS = 4  # fewer repeats of a token are shown one by one


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
    environment = Environment(
        loader=PackageLoader("raggedright.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"counted": counted, "duration": duration, "share": share, "visible": visible}
    config = events.start.config if events.start else {}
    state = events.end.reason if events.end else "running"
    sessions, rows = session_outcomes(events.rounds), row_outcomes(events.rounds)
    samples, largest = shown_samples(events.samples)
    causes = _causes(events)
    return environment.get_template("report.html").render(
        agent=visible(_setting(config, "agent", "name") or "A run", MAX_NAME),
        model=visible(_model_name(config), MAX_NAME),
        state=state if state in STATES else "ended",
        sign=STATES.get(state, "■"),
        facts=[*_facts(events, config)],
        small_facts=[*_small_facts(events)],
        stats=headline(events),
        warnings=shown_warnings(events),
        num_rounds=len(events.rounds),
        score=score_panel(events),
        row_panels=row_panels(events),
        metric_panels=metric_panels(events),
        time=time_panel(events),
        parts=parts_total(events),
        max_parts=MAX_PARTS,
        grids=[_grid(events, each) for each in _ends(events.rows)],
        session_outcomes=_outcome_lines(sessions),
        row_outcomes=_outcome_lines(rows),
        num_padding=sum(each.padding_rows or 0 for each in events.rounds),
        num_reused=sum(each.ledger.reused_sessions for each in events.rounds),
        causes=causes[:MAX_CAUSES],
        causes_left=max(len(causes) - MAX_CAUSES, 0),
        samples=samples,
        largest=number(largest) if largest else "",
        shades=[*(f"down{i}" for i in range(SHADES, 0, -1)), "flat", *(f"up{i}" for i in range(1, SHADES + 1))],
        settings=_settings(config),
        light=(plan_svg.LIGHT, plan_svg.LIGHT_PROMPTS),
        dark=(plan_svg.DARK, plan_svg.DARK_PROMPTS),
        plan_style=Markup(plan_svg.STYLE),
        hatch=Markup(plan_svg.HATCH),
    )


def _facts(events: RunEvents, config: Mapping[str, object]) -> Iterable[str]:
    planned, done = _setting(config, "train", "rounds"), len(events.rounds)
    yield f"{done:,} of {visible(planned, 20)} rounds" if planned else counted(done, "round")
    start = events.start
    layout = start.layout if start else None
    dp = (start.world.dp if start else None) or (layout.dp_size if layout else None)
    if dp:
        yield f"dp {dp:,}" + (f" on {visible(start.world.device, 20)}" if start and start.world.device else "")
    if layout:
        prompts, sessions = counted(layout.batch_size, "prompt"), counted(layout.rollout_n, "session")
        yield f"{prompts} \N{MULTIPLICATION SIGN} {sessions} per round"
        critic = layout.critic_mini_batch_size
        yield f"mini-batches of {layout.mini_batch_size:,}" + (f", critic {critic:,}" if critic else "")
        yield f"align {layout.align}"
        yield layout.loss_agg


def _small_facts(events: RunEvents) -> Iterable[str]:
    start, end = events.start, events.end
    if start and start.time:
        times = [start.time, *([end.time] if end and end.time else [])]
        yield " to ".join(visible(time.replace("T", " ")[: len("2000-01-01 00:00:00")], 24) for time in times)
    if start and start.num_parameters:
        yield counted(start.num_parameters, "parameter")
    if start and start.version:
        yield f"raggedright {visible(start.version, 20)}"
    if end is None:
        yield "no end is recorded: the run is still running, or was killed"


def _setting(config: Mapping[str, object], *path: str) -> str:
    """A setting as text; empty if it is not set."""
    value: object = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return str(value) if isinstance(value, str | int | float) else ""


def _model_name(config: Mapping[str, object]) -> str:
    path = _setting(config, "model", "path").rstrip("/")
    return path.rpartition("/")[2] or _setting(config, "model", "made", "model_type") or _setting(config, "model")


def _outcome_lines(outcomes: Counter[str]) -> list[tuple[str, int]]:
    """Outcomes with their counts, trained first, then by count; those after MAX_OUTCOMES are summed."""
    ordered = sorted(outcomes.items(), key=lambda item: (item[0] != "trained", -item[1], item[0]))
    lines = [(visible(name, 120), count) for name, count in ordered[:MAX_OUTCOMES]]
    rest = ordered[MAX_OUTCOMES:]
    return [*lines, *([(f"{len(rest):,} other outcomes", sum(count for _, count in rest))] if rest else [])]


def _causes(events: RunEvents) -> list[tuple[int, str, str]]:
    """The causes of failed sessions, the most frequent first: the number of sessions, the cause, a few sessions.

    Causes that differ only in numbers and quoted text are one, with the first of them as an example.
    """
    by_cause: dict[str, list[tuple[int, Failure]]] = {}
    for each in events.rounds:
        for failed in each.failed:
            by_cause.setdefault(without_details(failed.cause), []).append((each.round, failed))
    causes = []
    for failures in by_cause.values():
        cause = failures[0][1].cause
        if any(failed.cause != cause for _, failed in failures):
            cause = f"such as {cause}"
        examples = [f"{visible(f.prompt, 40)}/{f.session} in round {round:,}" for round, f in failures[-MAX_EXAMPLES:]]
        examples += filter(None, [more(len(failures) - len(examples), "session")])
        causes.append((len(failures), visible(cause, MAX_CAUSE), ", ".join(examples)))
    return sorted(causes, key=lambda cause: -cause[0])


def _ends(rows: tuple[RowsEvent, ...]) -> tuple[RowsEvent, ...]:
    return (rows[0], rows[-1]) if len(rows) > 1 else rows


def _grid(events: RunEvents, rows: RowsEvent) -> tuple[int, Markup, str]:
    """The plan of a round, computed again from its rows: the round, the picture, or why there is none."""
    layout = rows.layout or (events.start.layout if events.start else None)
    if layout is None:
        return rows.round, Markup(), "The events do not contain the layout of the run."
    if _plan_size(layout, len(rows.rows)) > MAX_PLANNED:
        return rows.round, Markup(), "The plan is too large to draw."
    try:
        plan = make_plan(rows.rows, layout)
    except RaggedRightError as error:
        return rows.round, Markup(), visible(str(error), MAX_CAUSE)
    return rows.round, Markup(plan_svg.draw_plan(plan, inline=f"round-{rows.round}")), ""


def _plan_size(layout: Layout, num_rows: int) -> int:
    """An estimate of the rows and micro-batches of a plan: a layout in a file from outside may require any number."""
    sizes = [layout.mini_batch_size, layout.critic_mini_batch_size or layout.mini_batch_size]
    lanes = layout.dp_size * layout.micro_batch_multiple
    multiple = math.lcm(layout.dp_size, *(size * layout.rollout_n for size in sizes)) if layout.align == "lcm" else 0
    steps = sum(-(-layout.batch_size // size) for size in sizes) if layout.align == "steps" else num_rows
    return layout.epochs * (num_rows + multiple + steps * lanes)


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


class Token(NamedTuple):
    """A token on the page: its text, classes and tooltip, and whether a line ends with it."""

    text: str
    kind: str
    title: str
    ends_line: bool


class ShownTrajectory(NamedTuple):
    """A trajectory on the page."""

    role: str
    facts: list[str]
    tokens: list[Token]
    note: str


class ShownSession(NamedTuple):
    """A session on the page."""

    name: str
    score: str
    task: str
    trajectories: list[ShownTrajectory]
    note: str


def shown_samples(samples: Sequence[SamplesEvent]) -> tuple[list[tuple[int, list[ShownSession]]], float]:
    """The sessions of the last sampled round and, for comparison, of the first; and the largest advantage in them."""
    last = [(each.round, each.sessions[:LAST_SESSIONS]) for each in samples[-1:] if each.sessions]
    first = [(each.round, each.sessions[:FIRST_SESSIONS]) for each in samples[:-1][:1] if each.sessions]
    trajectories = [
        trajectory
        for _, sessions in (*last, *first)
        for session in sessions
        for trajectory in session.trajectories[:MAX_TRAJECTORIES]
    ]
    largest = max((abs(a) for t in trajectories for a in t.advantages if math.isfinite(a)), default=0.0)
    room, shown = MAX_PAGE_TOKENS, []
    for round, sessions in (*last, *first):
        shown.append((round, []))
        for session in sessions:
            shown[-1][1].append(_session(session, largest, room))
            room -= sum(len(trajectory.tokens) for trajectory in shown[-1][1][-1].trajectories)
    return shown, largest


def _session(session: SampledSession, largest: float, room: int) -> ShownSession:
    shown = []
    for trajectory in session.trajectories[:MAX_TRAJECTORIES]:
        shown.append(_trajectory(trajectory, largest, min(room, MAX_TRAJECTORY_TOKENS)))
        room -= len(shown[-1].tokens)
    return ShownSession(
        name=f"{visible(session.prompt, 40)} / {session.session}",
        score=number(session.score),
        task=value_text(dict(session.task), MAX_TASK) if session.task else "",
        trajectories=shown,
        note=more(len(session.trajectories) - len(shown), "row"),
    )


def _trajectory(trajectory: SampledTrajectory, largest: float, room: int) -> ShownTrajectory:
    runs = _runs(trajectory)
    tokens = [_token(trajectory, start, largest, count) for start, count in runs[: max(room, 0)]]
    left = sum(count for _, count in runs[len(tokens) :])
    loss_tokens = sum(1 for value in trajectory.mask if value > 0)
    facts = [counted(len(trajectory.tokens), "token"), f"{loss_tokens:,} with loss"]
    facts += [f"reward {number(trajectory.reward)}"] if trajectory.reward is not None else []
    facts += [_advantages(trajectory)] if loss_tokens and trajectory.advantages else []
    facts += [f"ended: {visible(trajectory.finish_reason, 20)}"] if trajectory.finish_reason else []
    return ShownTrajectory(visible(trajectory.role or "agent", 40), facts, tokens, more(left, "token"))


def _runs(trajectory: SampledTrajectory) -> list[tuple[int, int]]:
    """The position of each shown token, and how many tokens it represents."""
    runs: list[tuple[int, int]] = []
    kinds = [(t, i < trajectory.prompt_tokens, _has_loss(trajectory, i)) for i, t in enumerate(trajectory.tokens)]
    for (_, _, has_loss), group in groupby(range(len(kinds)), kinds.__getitem__):
        positions = [*group]
        repeats = not has_loss and len(positions) >= MIN_REPEATS
        runs += [(positions[0], len(positions))] if repeats else [(i, 1) for i in positions]
    return runs


def _has_loss(trajectory: SampledTrajectory, i: int) -> bool:
    j = i - trajectory.prompt_tokens
    return 0 <= j < len(trajectory.mask) and trajectory.mask[j] > 0


def _advantages(trajectory: SampledTrajectory) -> str:
    pairs = zip(trajectory.advantages, trajectory.mask, strict=False)
    values = [value for value, mask in pairs if mask > 0 and math.isfinite(value)]
    if not values:
        return "no advantage"
    low, high = min(values), max(values)
    return f"advantage {signed(low)}" if number(low) == number(high) else f"advantage {signed(low)} to {signed(high)}"


def _token(trajectory: SampledTrajectory, i: int, largest: float, count: int) -> Token:
    text = trajectory.tokens[i]
    shown, ends_line, j = visible(text, MAX_TOKEN), text.endswith("\n"), i - trajectory.prompt_tokens
    if not _has_loss(trajectory, i):
        shown += f" x {count:,}" if count > 1 else ""
        return Token(shown, "prompt" if j < 0 else "seen", "", ends_line)
    advantage = trajectory.advantages[j] if j < len(trajectory.advantages) else math.nan
    words = [f"advantage {signed(advantage)}"]
    words += [f"log-prob {number(trajectory.log_probs[j])}"] if j < len(trajectory.log_probs) else []
    return Token(shown, f"loss {shade(advantage, largest)}", ", ".join(words), ends_line)


def shade(advantage: float, largest: float) -> str:
    """The class of an advantage: up1 to up4, down1 to down4, or flat."""
    if not math.isfinite(advantage) or advantage == 0 or largest == 0:
        return "flat"
    level = min(max(math.ceil(abs(advantage) / largest * SHADES), 1), SHADES)
    return f"{'up' if advantage > 0 else 'down'}{level}"
