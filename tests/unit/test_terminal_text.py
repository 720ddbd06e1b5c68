"""What comes from prompts, agents and files reaches a terminal as text, never as a command to it."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from raggedright.cli import main
from raggedright.config import dump_config, load_config
from raggedright.report.events import EventLog, Failure, RoundEvent
from raggedright.report.text import terminal_text
from raggedright.train.progress import Progress
from unit.test_config import config_with

HOSTILE = "p\x1b[31m\x1b]0;title\x07\x1b]8;;http://x\x1b\\\u202e\u2066\0\x9b2J\x7f\r\ud800"


def is_safe(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_lines_stay_and_escape_sequences_lose_their_effect():
    text = terminal_text(f"one\n\ttwo {HOSTILE} é 文 🙂")
    assert is_safe(text)
    assert text.startswith("one\n\ttwo p⟨U+001B⟩[31m")
    assert text.endswith("é 文 🙂")


def test_an_error_that_quotes_a_prompt_is_safe_to_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = {"prompt": HOSTILE, "session": 0, "trajectory": 0, "prompt_tokens": 5, "response_tokens": 999}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    sizes = {"dp": 1, "batch-size": 1, "mini-batch-size": 1, "rollout-n": 1, "micro-batch-tokens": 100}
    assert main(["plan", str(file), *(f"--{name}={value}" for name, value in sizes.items())]) == 1
    error = capsys.readouterr().err
    assert "1,004 tokens" in error
    assert is_safe(error)


def test_the_path_of_a_report_is_safe_to_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "run\x1b[31m\x07\u202e"
    folder.mkdir()
    with EventLog(folder / "events.jsonl") as log:
        log.write(RoundEvent(round=1, rows=3))
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "run⟨U+001B⟩[31m⟨U+0007⟩⟨U+202E⟩/report.html" in out
    assert is_safe(out)


def test_the_config_of_a_dry_run_is_safe_to_print_and_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    hostile = HOSTILE.removesuffix("\ud800")
    config = config_with(agent={"options": {hostile: hostile, "tab": "\t", "plain": "é 文 🙂"}})
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    assert main(["train", str(file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "\\U0000202E" in out
    assert "é 文 🙂" in out
    assert is_safe(out)
    assert load_config(file) == config


def test_a_failure_that_is_shown_while_training_is_safe_to_print():
    out = io.StringIO()
    progress = Progress(2, console=Console(file=out, width=200))
    failure = Failure(prompt=HOSTILE, session=0, cause=HOSTILE)
    progress.show(RoundEvent(round=1, rows=3, padding_rows=1, failed=(failure,)))
    progress.close()
    assert "first session that failed" in out.getvalue()
    assert is_safe(out.getvalue())
