"""The what-if table: one line per rule, faults in red."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from raggedright.plan.what_if import WhatIf


def print_comparison(rules: Sequence[WhatIf], console: Console) -> None:
    """Our alignments above, the rules of other trainers below; a figure that costs something is red."""
    table = Table(
        title="The same rows under every rule", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("\nrule", no_wrap=True)
    headings = ("padding\nrows", "\ntokens", "rows\nlost", "\ncopied", "\nsteps", "fewest\nrows")
    for heading in (*headings, "imbalance\nrank", "\nslot"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rule in rules:
        ours = rule.rule.startswith("align ")
        table.add_row(
            f"[bold]{rule.rule}[/]" if ours else rule.rule,
            f"{rule.padding_rows:,}",
            f"{rule.padding_tokens:,}",
            _fault(rule.lost_rows, rule.lost_rows > 0),
            _fault(rule.copied_rows, rule.copied_rows > 0),
            f"{rule.steps:,}",
            _fault(rule.fewest_rows, rule.fewest_rows < 2),
            f"{rule.imbalance.rank:.3f}",
            f"{rule.imbalance.slot:.3f}",
        )
    console.print(table)


def _fault(count: int, bad: bool) -> str:
    return f"[red]{count:,}[/]" if bad else f"{count:,}"
