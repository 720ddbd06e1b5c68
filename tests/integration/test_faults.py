"""`make faults` on a case or two of kinds that take no second process of a rank: nothing lost, wrong or unclear."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("with one rank", "a full disk, then", "damaged files", "hostile inputs", "agents one")


@pytest.mark.xdist_group("launch")
def test_what_is_broken_on_purpose_is_survived():
    command = [sys.executable, "verification/faults.py", "--first", "1", "--jobs", "2"]
    for kind in KINDS:
        command += ["--only", kind]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    total = ended.stdout.splitlines()[-1].split()
    assert total[0] == "all"
    assert int(total[1]) >= len(KINDS)
    assert total[3:] == ["0", "0", "0"]
