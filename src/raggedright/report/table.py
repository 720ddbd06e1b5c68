"""A plan in the terminal: what it holds, what each role's cut costs, and the grid of steps x ranks x micro-batches.

A cell is one micro-batch; its height is how much of the budget it fills. Padding has a colour and a glyph of its own,
so that it reads without colours too. What does not fit the terminal is left out and counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raggedright.arrays import Bools, Ints
from raggedright.plan.cut import Step
from raggedright.plan.measure import measure_imbalance, tokens_of
from raggedright.plan.plan import Plan, Role
from raggedright.report.words import counted, more, num_padding_rows, rows_in_words, step_facts, step_name

MOST_STEPS, MOST_RANKS = 4, 8
NAME_WIDTH, CELL_WIDTH = 10, 3  # columns of `  rank 0`, and of a cell with the gap after it
ROW_STYLE, PADDING_STYLE, QUIET = "cyan", "bold yellow", "bright_black"


def print_plan(plan: Plan, seconds: float, console: Console) -> None:
    """Print the summary, one line per role, and the grid of the first role that trains."""
    for label, words in _summary(plan, seconds):
        console.print(Text(f"{label:<9}", style="bold"), Text(words), sep="", soft_wrap=True)
    console.print()
    console.print(_roles(plan))
    console.print(Text("imbalance: the slowest over the mean, 1.000 is level", style=QUIET))
    console.print()
    role = plan.trained_roles[0]
    glyphs = _ASCII if console.options.ascii_only else _BLOCKS
    for line in _grid(plan, role, console.width, glyphs):
        console.print(line, no_wrap=True, overflow="crop")
    console.print(glyphs.legend())


def _summary(plan: Plan, seconds: float) -> Iterable[tuple[str, str]]:
    layout = plan.layout
    yield "batch", rows_in_words(plan)
    if len(plan.dropped):
        yield "dropped", f"{counted(len(plan.dropped), 'row')} over {_budget(plan)}"
    tokens = plan.num_padding_rows * layout.min_row_tokens
    yield "padding", f"{counted(plan.num_padding_rows, 'padding row')}, {counted(tokens, 'token')}"
    yield "align", layout.align + (f", to a multiple of {plan.multiple:,} rows" if plan.multiple is not None else "")
    yield "budget", f"{_budget(plan)} a micro-batch, {layout.collate}"
    yield "planned", f"in {seconds:.3f} s, for {counted(layout.dp_size, 'rank')}"


def _budget(plan: Plan) -> str:
    tokens = plan.layout.micro_batch_tokens is not None
    return counted(plan.layout.capacity, "token" if tokens else "row")


def _roles(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("role", overflow="fold")
    for heading in ("optimizer\nsteps", "micro-\nbatches", "padding\nrows", "imbalance\nrank", "imbalance\nslot"):
        table.add_column(heading, justify="right", overflow="fold")
    for role, steps in plan.roles.items():
        skipped = sum(step.skipped for step in steps)
        imbalance = measure_imbalance(plan, role)
        table.add_row(
            role,
            "-" if role == "forward" else f"{len(steps):,}" + (f" ({skipped:,} skipped)" if skipped else ""),
            f"{sum(step.num_micro_batches for step in steps):,}",
            f"{num_padding_rows(plan, steps):,}",
            f"{imbalance.rank:.3f}",
            f"{imbalance.slot:.3f}",
        )
    return table


@dataclass(frozen=True, slots=True)
class _Glyphs:
    """The characters of a cell: eight heights of rows, padding, and a micro-batch without a row."""

    heights: str
    padding: str
    empty: str

    def cell(self, fill: float, num_rows: int, num_padding: int) -> Text:
        """Two characters: the height of the fill, and padding in place of one or both."""
        if num_rows == num_padding == 0:
            return Text(self.empty * 2, style=QUIET)
        height = self.heights[min(max(round(fill * len(self.heights)), 1), len(self.heights)) - 1]
        width = 2 if not num_padding else 1 if num_rows else 0
        return Text.assemble((height * width, ROW_STYLE), (self.padding * (2 - width), PADDING_STYLE))

    def legend(self) -> Text:
        """What the characters mean."""
        words = (
            (self.cell(1, 1, 0), "rows (height: budget filled)"),
            (self.cell(1, 1, 1), "with padding"),
            (self.cell(0, 0, 1), "padding"),
            (self.cell(0, 0, 0), "no row"),
        )
        return Text("   ").join(Text.assemble(cell, " ", name) for cell, name in words)


_BLOCKS, _ASCII = _Glyphs("▁▂▃▄▅▆▇█", "░", "·"), _Glyphs("12345678", "/", ".")


def _grid(plan: Plan, role: Role, width: int, glyphs: _Glyphs) -> Iterable[Text]:
    """The lines of the picture, a block for each step."""
    steps = plan.steps(role)
    for number, step in enumerate(steps[:MOST_STEPS]):
        yield _caption(plan, number, step)
        num_ranks = min(step.dp_size, MOST_RANKS) if step.num_slots else 0
        yield from _lanes(plan, step, num_ranks, width, glyphs)
        if num_ranks and step.dp_size > num_ranks:
            yield Text("  " + more(step.dp_size - num_ranks, "rank"), style=QUIET)
        yield Text()
    if len(steps) > MOST_STEPS:
        yield Text(more(len(steps) - MOST_STEPS, "step"), style=QUIET)
        yield Text()


def _caption(plan: Plan, number: int, step: Step) -> Text:
    facts = ", ".join(step_facts(plan, step))
    return Text.assemble((step_name(plan, number, step), "bold"), ("  " + facts, QUIET))


def _lanes(plan: Plan, step: Step, num_ranks: int, width: int, glyphs: _Glyphs) -> Iterable[Text]:
    """One line per rank, as many cells as the terminal is wide."""
    room = max((width - NAME_WIDTH) // CELL_WIDTH, 1)
    note = -(-len(more(step.num_slots, "slot")) // CELL_WIDTH)
    num_slots = step.num_slots if step.num_slots <= room else max(room - note, 1)
    is_padding = step.row >= len(plan.rows)
    rows, padding = _count(step, ~is_padding), _count(step, is_padding)
    filled = rows + padding if plan.layout.micro_batch_tokens is None else tokens_of(plan, step)
    fill = filled / plan.layout.capacity
    for dp_rank in range(num_ranks):
        cells = zip(fill[dp_rank].tolist(), rows[dp_rank].tolist(), padding[dp_rank].tolist(), strict=True)
        line = Text(" ").join(glyphs.cell(*cell) for cell in islice(cells, num_slots))
        hidden = more(step.num_slots - num_slots, "slot")
        yield Text.assemble(
            (f"  rank {dp_rank}".ljust(NAME_WIDTH), QUIET), line, (f" {hidden}" if hidden else "", QUIET)
        )


def _count(step: Step, chosen: Bools) -> Ints:
    """How many of the chosen rows each micro-batch holds, [dp_size, num_slots]."""
    counts = np.bincount(step.micro_batch_index[chosen], minlength=step.num_micro_batches)
    return counts.reshape(step.dp_size, step.num_slots)
