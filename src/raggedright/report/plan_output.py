"""A plan as a table in the terminal and as JSON, and the comparison with the rules of other trainers.

In the table's grid of steps x ranks x micro-batches a cell is one micro-batch, and its height is how much of the budget
it fills. Padding has its own colour and its own glyph, so that it can be recognised without colours. What does not fit
the terminal is left out and counted. In JSON, every `rows` counts or lists real rows only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from raggedright.arrays import Bools, Ints
from raggedright.ledger import close_ledger
from raggedright.plan.cut import Step
from raggedright.plan.measure import WhatIf, measure_imbalance, tokens_of
from raggedright.plan.planner import Plan, Role
from raggedright.report.text import counted, more

MAX_STEPS, MAX_RANKS = 4, 8
NAME_WIDTH, CELL_WIDTH = 10, 3  # columns of `  rank 0`, and of a cell with the gap after it
ROW_STYLE, PADDING_STYLE, QUIET = "cyan", "bold yellow", "bright_black"
ROLE_HEADINGS = (
    "role", "optimizer\nsteps", "micro-\nbatches", "padding\nrows", "imbalance\nrank", "imbalance\nslot",
)  # fmt: skip
COMPARISON_HEADINGS = (
    "rule", "padding\nrows", "padding\ntokens", "rows\nlost", "rows\ncopied", "steps", "fewest\nrows", "rank", "slot",
)  # fmt: skip


def print_plan(plan: Plan, seconds: float, console: Console) -> None:
    """Print the summary, one line per role, and the grid of the first role that trains."""
    for label, words in _summary(plan, seconds):
        console.print(Text(f"{label:<9}", style="bold"), Text(words), sep="", soft_wrap=True)
    console.print()
    _print_table(console, 2, ROLE_HEADINGS, _role_lines(plan))
    console.print(Text("imbalance: slowest / mean; 1.000 is perfectly balanced", style=QUIET))
    console.print()
    role = plan.trained_roles[0]
    glyphs = _ASCII if console.options.ascii_only else _BLOCKS
    for line in _grid(plan, role, console.width, glyphs):
        console.print(line, no_wrap=True, overflow="crop")
    console.print(glyphs.legend())


def _print_table(
    console: Console, padding: int, headings: Sequence[str], lines: Iterable[Sequence[str | Text]]
) -> None:
    """Print a table completely: on a terminal that is too narrow its lines are longer, and no number is cut."""
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0), header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(width=10_000), table).maximum)
    console.print(table)
    console.width = width


def _summary(plan: Plan, seconds: float) -> Iterable[tuple[str, str]]:
    layout = plan.layout
    yield "batch", rows_in_words(plan)
    if len(plan.dropped):
        yield "dropped", f"{counted(len(plan.dropped), 'row')} over {budget_in_words(plan)}"
    tokens = plan.num_padding_rows * layout.min_row_tokens
    yield "padding", f"{counted(plan.num_padding_rows, 'padding row')}, {counted(tokens, 'token')}"
    yield "align", layout.align + (f", to a multiple of {plan.multiple:,} rows" if plan.multiple is not None else "")
    yield "budget", f"{budget_in_words(plan)} per micro-batch, {layout.collate}"
    yield "planned", f"in {seconds:.3f} s, for {counted(layout.dp_size, 'rank')}"


def _role_lines(plan: Plan) -> Iterable[Sequence[str]]:
    for role, steps in plan.roles.items():
        skipped = sum(step.skipped for step in steps)
        imbalance = measure_imbalance(plan, role)
        yield (
            role,
            "-" if role == "forward" else f"{len(steps):,}" + (f" ({skipped:,} skipped)" if skipped else ""),
            f"{sum(step.num_micro_batches for step in steps):,}",
            f"{num_padding_rows(plan, steps):,}",
            f"{imbalance.rank:.3f}",
            f"{imbalance.slot:.3f}",
        )


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
    """The lines of the grid, one block per step."""
    steps = plan.steps(role)
    for number, step in enumerate(steps[:MAX_STEPS]):
        facts = ", ".join(step_facts(plan, step))
        yield Text.assemble((step_name(plan, number, step), "bold"), ("  " + facts, QUIET))
        num_ranks = min(step.dp_size, MAX_RANKS) if step.num_slots else 0
        yield from _lanes(plan, step, num_ranks, width, glyphs)
        if num_ranks and step.dp_size > num_ranks:
            yield Text("  " + more(step.dp_size - num_ranks, "rank"), style=QUIET)
        yield Text()
    if len(steps) > MAX_STEPS:
        yield Text(more(len(steps) - MAX_STEPS, "step"), style=QUIET)
        yield Text()


def _lanes(plan: Plan, step: Step, num_ranks: int, width: int, glyphs: _Glyphs) -> Iterable[Text]:
    """One line per rank, with as many cells as fit the terminal."""
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


def print_comparison(rules: Sequence[WhatIf], console: Console) -> None:
    """Print one line per rule: our alignments first, then the rules of other trainers, with their faults in red."""
    lines = [
        (
            Text(rule.rule, style="bold" if rule.rule.startswith("align ") else ""),
            f"{rule.padding_rows:,}",
            f"{rule.padding_tokens:,}",
            _fault(rule.lost_rows, rule.lost_rows > 0),
            _fault(rule.copied_rows, rule.copied_rows > 0),
            f"{rule.steps:,}",
            _fault(rule.fewest_rows, rule.fewest_rows < 2),
            f"{rule.imbalance.rank:.3f}",
            f"{rule.imbalance.slot:.3f}",
        )
        for rule in rules
    ]
    console.print(Text("The same rows under every rule", style="bold"))
    _print_table(console, 1, COMPARISON_HEADINGS, lines)
    console.print(Text("rank, slot: imbalance, slowest / mean; 1.000 is perfectly balanced", style=QUIET))


def _fault(count: int, bad: bool) -> Text:
    return Text(f"{count:,}", style="red" if bad else "")


def plan_to_dict(plan: Plan, seconds: float) -> Mapping[str, object]:
    """The whole plan: totals, imbalance, ledger, and each role's steps down to the weight of each row."""
    imbalance = measure_imbalance(plan)
    return {
        "rows": int((~plan.rows.is_padding).sum()) - len(plan.dropped),
        "padding_rows": plan.num_padding_rows,
        "padding_tokens": plan.num_padding_rows * plan.layout.min_row_tokens,
        "dropped_rows": len(plan.dropped),
        "warnings": list(plan.warnings),
        "align": plan.layout.align,
        "multiple": plan.multiple,
        "seconds": round(seconds, 6),
        "digest": plan.digest(),
        "imbalance": {"rank": imbalance.rank, "slot": imbalance.slot},
        "ledger": close_ledger(plan).to_dict(),
        "roles": {role: {"steps": [_step_to_dict(plan, step) for step in steps]} for role, steps in plan.roles.items()},
    }


def _step_to_dict(plan: Plan, step: Step) -> Mapping[str, object]:
    num_rows, tokens = len(plan.rows), tokens_of(plan, step).tolist()
    row, weight, bounds = step.row.tolist(), step.weight.tolist(), step.bounds.tolist()
    keys = plan.rows.key
    micro_batches = [
        {
            "tokens": tokens[b // step.num_slots][b % step.num_slots],
            "padding_rows": sum(i >= num_rows for i in row[first:last]),
            "rows": [
                {"key": keys[i], "weight": w}
                for i, w in zip(row[first:last], weight[first:last], strict=True)
                if i < num_rows
            ],
        }
        for b, (first, last) in enumerate(pairwise(bounds))
    ]
    return {
        "epoch": step.epoch,
        "rows": int((step.row < num_rows).sum()),
        "padding_rows": int((step.row >= num_rows).sum()),
        "skipped": step.skipped,
        "ranks": [
            {"micro_batches": micro_batches[dp_rank * step.num_slots : (dp_rank + 1) * step.num_slots]}
            for dp_rank in range(step.dp_size)
        ],
    }


def rows_in_words(plan: Plan) -> str:
    """`361 rows of 360 sessions, 45 prompts`: the input of the plan without its padding rows."""
    real = ~plan.rows.is_padding
    num_sessions, num_prompts = (len(np.unique(i[real])) for i in (plan.rows.session_index, plan.rows.prompt_index))
    rows, sessions = counted(int(real.sum()), "row"), counted(num_sessions, "session")
    return f"{rows} of {sessions}, {counted(num_prompts, 'prompt')}"


def budget_in_words(plan: Plan) -> str:
    """`2,048 tokens` or `8 rows`: the maximum of a micro-batch."""
    return counted(plan.layout.capacity, "row" if plan.layout.micro_batch_tokens is None else "token")


def num_padding_rows(plan: Plan, steps: Sequence[Step]) -> int:
    """Padding rows that these steps need; epochs share them."""
    return max(0, max((int(step.row.max(initial=-1)) for step in steps), default=-1) + 1 - len(plan.rows))


def step_name(plan: Plan, number: int, step: Step) -> str:
    """`step 3`, with its epoch where there are several."""
    return f"step {number + 1}" + (f", epoch {step.epoch + 1}" if plan.layout.epochs > 1 else "")


def step_facts(plan: Plan, step: Step) -> list[str]:
    """The contents of a step, and whether it is skipped."""
    num_padding = int((step.row >= len(plan.rows)).sum())
    num_rows = len(step.row) - num_padding
    facts = [counted(num_rows, "row")]
    facts += [counted(num_padding, "padding row")] if num_padding else []
    facts += ["skipped: no loss token" if num_rows else "skipped"] if step.skipped else []
    return facts
