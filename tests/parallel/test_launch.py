"""The launcher of the parallel tests: which failures it repeats, and which it reports at once."""

import os
import signal
from pathlib import Path

import pytest

from parallel.launch import NativeCrashError, RanksFailedError, launch

pytestmark = pytest.mark.xdist_group("gloo")


def crash(data: dict) -> int:
    """Abort in the first `crashes` launches; count launches in a file."""
    count = Path(data["folder"]) / f"launches-{os.environ.get('RANK', 'x')}"
    launches = len(count.read_text()) + 1 if count.exists() else 1
    count.write_text("x" * launches)
    if launches <= data["crashes"]:
        os.kill(os.getpid(), signal.SIGABRT)
    return launches


def fail(_data: object) -> None:
    """Fail with an ordinary exception."""
    raise ValueError("7 is not 8")


def test_a_native_crash_is_repeated_once(tmp_path: Path) -> None:
    assert launch("parallel.test_launch:crash", 1, {"folder": str(tmp_path), "crashes": 1}) == [2]


def test_a_second_native_crash_fails_with_the_stack(tmp_path: Path) -> None:
    with pytest.raises(NativeCrashError, match="in crash"):
        launch("parallel.test_launch:crash", 1, {"folder": str(tmp_path), "crashes": 2})


def test_an_exception_is_not_repeated() -> None:
    with pytest.raises(RanksFailedError, match="7 is not 8"):
        launch("parallel.test_launch:fail", 1)
