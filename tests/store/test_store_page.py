"""docs/store.md: its Python code runs, and its queries work in the sqlite3 shell."""

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "store.md").read_text()


def blocks(language: str) -> list[str]:
    return [block.partition("```")[0] for block in PAGE.split(f"```{language}\n")[1:]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which the first code block of the page was run."""
    subprocess.run([sys.executable, "-c", blocks("python")[0]], cwd=tmp_path, check=True)
    return tmp_path


def test_arrays_are_read_back_without_the_store(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", blocks("python")[1]], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "input_ids int64 (12,)" in done.stdout
    assert "teacher_log_probs float32 (10,)" in done.stdout


def test_the_queries_work(folder: Path) -> None:
    commands = blocks("sh")[0].strip().splitlines()
    answers = []
    for command in commands:
        query = command.split('"')[1]
        connection = sqlite3.connect(folder / "run" / "rows.db")
        answers.append(connection.execute(query).fetchall())
        connection.close()
        if shutil.which("sqlite3"):
            done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True)
            assert len(done.stdout.splitlines()) == len(answers[-1])
    assert answers == [[(0, 1, 0.5)], [], [(0, "agent", 10)]]
