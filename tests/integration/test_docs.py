"""What README and docs say to run runs, and what they link to is there.

Python blocks run page by page, in order, in a folder of their own. Commands run where that is cheap; a training run
is begun as a dry run, so that its config and keys are true. `OTHERS` says who runs the rest.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raggedright.cli import main, make_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text()
OTHERS = {
    "sqlite3": "tests/store/test_store_page.py",
    "torchrun": "tests/parallel/test_own_trainer.py",
    "touch": "a shell",
    ".": "a shell",
    "pip": "a fresh environment",
    "export": "a shell",
    "python": "tests/verl/test_end_to_end.py",
    "VERL_USE_EXTERNAL_MODULES=raggedright.verl": "tests/verl/test_end_to_end.py",
    "git": "a fresh clone",
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands() -> list[tuple[str, str]]:
    """Each command of each page, with its page."""
    found = {}
    for page in PAGES:
        for line in "".join(blocks(page.read_text(), "sh")).replace("\\\n", " ").splitlines():
            if line.strip():
                found.setdefault(" ".join(shlex.split(line, comments=True)), name(page))
    return [(page, line) for line, page in found.items()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the clone's files that pages name, in which nothing of the clone is written."""
    for part in ("configs", "examples"):
        (tmp_path / part).symlink_to(ROOT / part)
    (tmp_path / "my.toml").write_text((ROOT / "configs" / "compaction.toml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text(), "python")], ids=name)
def test_python_blocks_run(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks(page.read_text(), "python"):
        exec(compile(code, name(page), "exec"), {"__name__": "__page__"})
    if page == PAGES[0]:
        assert "rows: 47 = 47 trained" in capsys.readouterr().out


def test_the_agent_of_its_page_trains_with_the_config_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    (tmp_path / "my_module.py").write_text(blocks(page, "python")[0])
    (tmp_path / "my.toml").write_text(blocks(page, "toml")[0])
    command = [sys.executable, "-m", "raggedright", "train", "my.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, "")
    assert "finished after 2 rounds" in done.stdout
    assert "events of 2 rounds, the checkpoint of round 2, the model" in done.stdout


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_of_a_page_is_accepted(page: str, line: str, folder: Path) -> None:
    program, *words = shlex.split(line)
    if program == "make":
        (target,) = (word for word in words if "=" not in word)
        assert re.search(rf"^{target}:.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), f"{page}: no {line}"
    elif program == "raggedright" and words[0] == "plan":
        assert main(words[: words.index(">")] if ">" in words else words) == 0
    elif program == "raggedright" and words[0] == "train":
        assert main([*(word for word in words if word not in ("--fresh", "--dry-run")), "--dry-run"]) == 0
    elif program == "raggedright":
        make_parser(words).parse_args(words)
    else:
        assert program in OTHERS, f"{page}: say in OTHERS who runs {line!r}"


@pytest.mark.parametrize(
    "line", [line for page, line in commands() if page == "README.md" and line.startswith("raggedright ")]
)
def test_the_readmes_commands_run_to_their_end(line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readmes_picture_is_what_its_command_draws() -> None:
    line = next(line for _, line in commands() if line.startswith("raggedright plan examples/rows.jsonl"))
    command = [sys.executable, "-m", *shlex.split(line.replace("--compare", "--format svg"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.stdout == (ROOT / "docs" / "plan.svg").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_something(page: Path) -> None:
    targets = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    local = [target for target in targets if target and ":" not in target]
    assert [target for target in local if not os.path.exists(page.parent / target)] == []


def test_every_file_that_contributing_says_to_open_is_there() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| to change |")[2]
    paths = [path for path in re.findall(r"`([\w*./]+)`", table) if path.endswith((".py", "/")) or "*" in path]
    assert len(paths) > 60
    roots = (ROOT, ROOT / "src" / "raggedright", ROOT / "tests" / "unit")
    assert [path for path in paths if not any([*root.glob(path.rstrip("/"))] for root in roots)] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = {target for page in PAGES for target in re.findall(r"([\w-]+\.md)\b", page.read_text())}
    assert [name(page) for page in PAGES[1:] if page.parent.name != "design" and page.name not in linked] == []
