"""Counts in words, the same in every report."""

from collections.abc import Sequence

import numpy as np

from raggedright.plan.cut import Step
from raggedright.plan.plan import Plan


def counted(count: int, noun: str) -> str:
    """`1 row`, `1,024 rows`, `2 micro-batches`."""
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural}"


def more(hidden: int, noun: str) -> str:
    """What a report leaves out: `+ 12 more ranks`, or nothing."""
    return f"+ {hidden:,} more {counted(hidden, noun).split(maxsplit=1)[1]}" if hidden > 0 else ""


def rows_in_words(plan: Plan) -> str:
    """`361 rows of 360 sessions, 45 prompts`: what the plan was given, input padding left out."""
    real = ~plan.rows.is_padding
    num_sessions, num_prompts = (len(np.unique(i[real])) for i in (plan.rows.session_index, plan.rows.prompt_index))
    rows, sessions = counted(int(real.sum()), "row"), counted(num_sessions, "session")
    return f"{rows} of {sessions}, {counted(num_prompts, 'prompt')}"


def num_padding_rows(plan: Plan, steps: Sequence[Step]) -> int:
    """Padding rows that these steps need; epochs share them."""
    return max(0, max((int(step.row.max(initial=-1)) for step in steps), default=-1) + 1 - len(plan.rows))


def step_name(plan: Plan, number: int, step: Step) -> str:
    """`step 3`, with its epoch where there are several."""
    return f"step {number + 1}" + (f", epoch {step.epoch + 1}" if plan.layout.epochs > 1 else "")


def step_facts(plan: Plan, step: Step) -> list[str]:
    """What a step holds, and whether it is skipped."""
    num_padding = int((step.row >= len(plan.rows)).sum())
    num_rows = len(step.row) - num_padding
    facts = [counted(num_rows, "row")]
    facts += [counted(num_padding, "padding row")] if num_padding else []
    facts += ["skipped: no loss token" if num_rows else "skipped"] if step.skipped else []
    return facts
