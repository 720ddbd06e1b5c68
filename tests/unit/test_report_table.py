"""A plan in the terminal: every figure, a grid that reads without colours, and no line wider than the terminal."""

import io

import numpy as np
import pytest
from rich.console import Console

from raggedright import Layout, Plan, Rows, make_plan, measure_imbalance
from raggedright.report.plan_output import print_plan


def _rows(num_prompts: int, *, sessions: int = 4, tokens: int = 100) -> Rows:
    """Sessions of one row, and one session of two, like an agent that compacted its context once."""
    names = [(p, s, 0) for p in range(num_prompts) for s in range(sessions)] + [(0, 0, 1)] * (num_prompts > 0)
    prompt, session, trajectory = zip(*names, strict=True) if names else ((), (), ())
    return Rows.from_columns(
        prompt=[f"p{i}" for i in prompt],
        session=session,
        trajectory=trajectory,
        prompt_tokens=[10] * len(names),
        response_tokens=[tokens - 10] * len(names),
    )


def _printed(plan: Plan, *, width: int = 80, encoding: str = "utf-8", colour: bool = False) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    color_system = "truecolor" if colour else None
    print_plan(plan, 0.0123, Console(file=file, width=width, color_system=color_system, force_terminal=colour))
    file.flush()
    return raw.getvalue().decode(encoding)


def _lanes(printed: str) -> list[list[str]]:
    """The cells of each rank's line."""
    return [line.split()[2:] for line in printed.splitlines() if line.startswith("  rank ")]


def test_summary_counts_rows_sessions_prompts_padding_and_time():
    plan = make_plan(_rows(3), Layout(dp_size=4, batch_size=3, mini_batch_size=1, micro_batch_tokens=150))
    printed = _printed(plan)
    assert "13 rows of 12 sessions, 3 prompts" in printed
    assert "3 padding rows, 6 tokens" in printed
    assert "align    steps\n" in printed
    assert "150 tokens per micro-batch, packed" in printed
    assert "in 0.012 s, for 4 ranks" in printed
    assert "dropped" not in printed


def test_lcm_names_its_multiple():
    plan = make_plan(_rows(3), Layout(dp_size=2, batch_size=3, mini_batch_size=2, rollout_n=4, align="lcm"))
    assert "lcm, to a multiple of 8 rows" in _printed(plan)


def test_each_role_has_its_steps_micro_batches_padding_and_imbalance():
    layout = Layout(dp_size=4, batch_size=3, mini_batch_size=1, critic_mini_batch_size=3, micro_batch_tokens=150)
    plan = make_plan(_rows(3), layout)
    lines = {words[0]: words[1:] for words in map(str.split, _printed(plan).splitlines()) if words}
    assert lines["actor"][:3] == ["3", "16", "3"]
    assert lines["critic"][:3] == ["1", "16", "3"]
    assert lines["forward"][:3] == ["-", "16", "3"]
    for role in plan.roles:
        imbalance = measure_imbalance(plan, role)
        assert lines[role][3:] == [f"{imbalance.rank:.3f}", f"{imbalance.slot:.3f}"]


def test_grid_has_a_cell_for_every_micro_batch_and_padding_reads_without_colour():
    plan = make_plan(_rows(3), Layout(dp_size=4, batch_size=3, mini_batch_size=1, micro_batch_tokens=150))
    printed = _printed(plan)
    lanes = _lanes(printed)
    assert len(lanes) == 3 * 4
    assert sum(map(len, lanes)) == sum(step.num_micro_batches for step in plan.steps("actor"))
    assert sum(cells.count("░░") for cells in lanes) == plan.num_padding_rows == 3
    assert "5 rows, 3 padding rows" in printed


def test_padding_has_a_colour_of_its_own():
    plan = make_plan(_rows(1), Layout(dp_size=4, batch_size=1, mini_batch_size=1, micro_batch_tokens=150))
    printed = _printed(plan, colour=True)
    assert "\x1b[1;33m░░" in printed
    assert "\x1b[36m▅▅" in printed


@pytest.mark.parametrize(("tokens", "glyph"), [(100, "▁"), (500, "▄"), (1000, "█")])
def test_a_cell_is_as_high_as_the_budget_it_fills(tokens: int, glyph: str):
    rows = _rows(1, sessions=1, tokens=tokens).take(np.array([0]))
    plan = make_plan(rows, Layout(dp_size=1, batch_size=1, mini_batch_size=1, micro_batch_tokens=1000))
    assert _lanes(_printed(plan)) == [[glyph * 2]]


def test_a_budget_in_rows_is_filled_by_rows():
    plan = make_plan(_rows(1, sessions=3), Layout(dp_size=1, batch_size=1, mini_batch_size=1, micro_batch_rows=8))
    assert _lanes(_printed(plan)) == [["▄▄"]]
    assert "8 rows per micro-batch" in _printed(plan)


def test_rows_beside_padding_show_both():
    plan = make_plan(_rows(3), Layout(dp_size=2, batch_size=3, mini_batch_size=3, rollout_n=8, align="lcm"))
    assert _lanes(_printed(plan)) == [["▁░"], ["▁░"]]


def test_a_micro_batch_without_a_row_is_shown_as_such():
    layout = Layout(dp_size=2, batch_size=1, mini_batch_size=1, rollout_n=2, align="lcm", micro_batch_multiple=2)
    assert _lanes(_printed(make_plan(_rows(1, sessions=1), layout))) == [["▁▁", "··"], ["▁▁", "··"]]


def test_dropped_rows_are_counted_with_their_cause():
    layout = Layout(dp_size=1, batch_size=1, mini_batch_size=1, micro_batch_tokens=50, over_long="drop")
    assert "dropped  5 rows over 50 tokens" in _printed(make_plan(_rows(1), layout))


def test_skipped_steps_are_counted_and_marked():
    printed = _printed(make_plan(_rows(1), Layout(dp_size=2, batch_size=3, mini_batch_size=1)))
    assert "3 (2 skipped)" in printed
    assert printed.count("0 rows, skipped\n") == 2


@pytest.mark.parametrize("align", ["steps", "lcm"])
def test_no_rows_are_printed_as_none(align: str):
    layout = Layout(dp_size=2, batch_size=2, mini_batch_size=1, align="lcm" if align == "lcm" else "steps")
    printed = _printed(make_plan(_rows(0), layout))
    assert "0 rows of 0 sessions, 0 prompts" in printed
    assert _lanes(printed) == []


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_large_plan_fits_the_terminal_and_says_what_it_leaves_out(width: int):
    rows = _rows(600)
    plan = make_plan(rows, Layout(dp_size=20, batch_size=600, mini_batch_size=100, micro_batch_tokens=100))
    printed = _printed(plan, width=width)
    assert max(map(len, printed.splitlines())) <= width
    assert printed.count("+ 12 more ranks") == 4
    assert "+ 2 more steps" in printed
    step = plan.steps("actor")[0]
    lane = _lanes(printed)[0]
    shown = sum(cell == "██" for cell in lane)
    assert 10 <= shown < step.num_slots if width == 60 else shown == step.num_slots
    assert " ".join(lane[shown:]) == (f"+ {step.num_slots - shown} more slots" if width == 60 else "")
    assert len(printed.splitlines()) < 70


def test_epochs_are_named_where_there_are_several():
    printed = _printed(make_plan(_rows(2), Layout(dp_size=1, batch_size=2, mini_batch_size=1, epochs=2)))
    assert "step 3, epoch 2" in printed


def test_a_terminal_without_unicode_gets_plain_characters():
    plan = make_plan(_rows(1), Layout(dp_size=4, batch_size=1, mini_batch_size=1, micro_batch_tokens=150))
    assert [cells for cells in _lanes(_printed(plan, encoding="ascii")) if "//" in cells]
