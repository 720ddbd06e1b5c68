"""What commands print fits the terminal, is not cut and has no markup left in it, in a terminal and in a pipe."""

import re
import sys
from pathlib import Path

import pytest

from raggedright.cli.train_command import CHANGED_OFTEN
from raggedright.config.load import keys
from unit.terminals import raggedright, run_in_pipe, run_in_terminal

ROOT = Path(__file__).parents[2]
EXAMPLE = (str(ROOT / "examples" / "rows.jsonl"), "--dp", "2", "--batch-size", "6", "--mini-batch-size", "2",
           "--rollout-n", "4", "--micro-batch-tokens", "2048")  # fmt: skip
EVERYWHERE = pytest.mark.parametrize(
    ("where", "width"), [("terminal", 80), ("terminal", 140), ("pipe", 80), ("pipe", 140)]
)
MARKUP = re.compile(r"\[/?(bold|red|green|dim|/)?\]")


def check(lines: list[str], width: int) -> None:
    for line in lines:
        assert not MARKUP.search(line), line
        assert "…" not in line, line
        assert len(line) <= width, line


@EVERYWHERE
def test_a_plan_and_the_comparison_are_whole(where: str, width: int):
    """README's own example printed `[bold]align steps[/]` and `fewe…`."""
    code, lines = raggedright(where, "plan", *EXAMPLE, "--compare", width=width)
    assert code == 0
    check(lines, width)
    cells = {tuple(line.split()) for line in lines}
    assert ("rule", "rows", "tokens", "lost", "copied", "steps", "rows", "rank", "slot") in cells
    assert ("drop", "the", "remainder", "0", "0", "7", "0", "5", "8", "1.231", "1.242") in cells
    assert ("align", "steps", "1", "2", "0", "0", "3", "7", "1.042", "1.055") in cells


HELP = [("--help",), *((name, "--help") for name in ("plan", "check", "train", "report")), ("train", "--help-all")]


@EVERYWHERE
@pytest.mark.parametrize("args", HELP, ids=" ".join)
def test_help_fits_the_width(where: str, width: int, args: tuple[str, ...]):
    code, lines = raggedright(where, *args, width=width)
    assert code == 0
    check(lines, width)
    assert any("{{" not in line and line.startswith("usage: raggedright") for line in lines)


def test_the_short_help_of_train_fits_a_screen_and_points_to_the_long_one():
    """It was 240 lines."""
    _, lines = raggedright("pipe", "train", "--help", width=80)
    assert len(lines) < 60
    for key in CHANGED_OFTEN:
        assert any(line.startswith(f"  --{key} ") for line in lines), key
    assert any("--help-all shows" in line for line in lines)


def test_the_long_help_of_train_has_every_key_in_words_that_a_user_knows():
    _, lines = raggedright("pipe", "train", "--help-all", width=120)
    text = "\n".join(lines)
    for key in keys():
        assert f"  --{key} " in text, key
    assert not re.search(r"\{\{|dict\[|None|\bnull\)|\bstr\b|\bint\b|\bbool\b|False|True", text)
    assert "--algorithm.advantages NAME" in text
    assert "One of grpo, rloo, reinforce++, reinforce++-baseline, gae." in " ".join(text.split())


def test_a_fault_is_red_in_a_terminal_and_plain_in_a_pipe():
    code, text = run_in_terminal(sys.executable, "-m", "raggedright", "plan", *EXAMPLE, "--compare", width=80)
    assert code == 0
    assert "\x1b[31m   7\x1b[0m" in text or re.search(r"\x1b\[31m *7", text)
    assert not any("\x1b" in line for line in raggedright("pipe", "plan", *EXAMPLE, "--compare", width=80)[1])


@pytest.mark.parametrize("width", [30, 60])
def test_a_terminal_that_is_too_narrow_cuts_no_figure(width: int):
    _, lines = raggedright("pipe", "plan", *EXAMPLE, "--compare", width=width)
    assert ["drop", "the", "remainder", "0", "0", "7", "0", "5", "8", "1.231", "1.242"] in [x.split() for x in lines]
    assert not any("…" in line for line in lines)


SLOW_WORK = """
import time
from raggedright.cli import arguments
arguments.DELAY_SECONDS = {delay}
with arguments.progress_bar() as report:
    report("reading rows", 1, 2)
    time.sleep(0.5)
print("done")
"""


def test_long_work_shows_its_progress_in_a_terminal_and_erases_it():
    code, text = run_in_terminal(sys.executable, "-c", SLOW_WORK.format(delay=0), width=80)
    assert code == 0
    assert "reading rows" in text
    assert text.endswith("\x1b[2Kdone\r\n")


@pytest.mark.parametrize(("where", "delay"), [("terminal", 60), ("pipe", 0)])
def test_short_work_and_a_pipe_show_no_progress(where: str, delay: int):
    run = run_in_terminal if where == "terminal" else run_in_pipe
    code, text = run(sys.executable, "-c", SLOW_WORK.format(delay=delay), width=80)
    assert (code, text.split()) == (0, ["done"])
