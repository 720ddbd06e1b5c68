"""The wheel, installed in a fresh environment with numpy alone, and used from outside the clone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAN = """
import sys
from raggedright import Layout, Rows, make_plan

columns = zip(*[("a", 0, 0, 3, 5, 5), ("a", 1, 0, 3, 2, 2), ("b", 0, 0, 4, 6, 6), ("b", 1, 0, 4, 1, 1)])
names = ("prompt", "session", "trajectory", "prompt_tokens", "response_tokens", "loss_tokens")
rows = Rows.from_columns(**{name: list(column) for name, column in zip(names, columns)})
plan = make_plan(rows, Layout(dp_size=2, batch_size=2, mini_batch_size=1, rollout_n=2))
assert "site-packages" in sys.modules["raggedright"].__file__
print(len(plan.rows), len(plan.steps("actor")))
"""


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, folder=folder)
    if built.returncode and "No matching distribution" in built.stderr:
        pytest.skip("there is no package index to build the wheel with")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("raggedright-*.whl")
    assert run(sys.executable, "-m", "venv", folder / "venv", folder=folder).returncode == 0
    pip = folder / "venv" / "bin" / "pip"
    installed = run(pip, "install", "-q", "-c", ROOT / "constraints.txt", wheel, folder=folder)
    assert installed.returncode == 0, installed.stderr
    return folder


@pytest.mark.slow
def test_the_library_needs_numpy_only_and_plans(environment: Path) -> None:
    listed = run(environment / "venv/bin/pip", "list", "--format=freeze", folder=environment).stdout.splitlines()
    assert {line.partition("==")[0] for line in listed} - {"pip", "setuptools"} == {"numpy", "raggedright"}
    planned = run(environment / "venv/bin/python", "-c", PLAN, folder=environment)
    assert (planned.stdout, planned.stderr) == ("4 2\n", "")


@pytest.mark.slow
def test_the_command_says_which_extra_it_needs(environment: Path) -> None:
    for command in (["raggedright"], ["python", "-m", "raggedright"]):
        told = run(environment / "venv/bin" / command[0], *command[1:], "plan", "--help", folder=environment)
        assert told.returncode == 1
        assert "[cli]" in told.stderr
        assert "Traceback" not in told.stderr
