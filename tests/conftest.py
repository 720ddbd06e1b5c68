"""Hypothesis profiles, whose examples are the same in every run so that a failure is one everywhere; real mounts."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    max_examples=45,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2_000)
settings.load_profile("default")
NEEDS_TORCH = re.compile(
    r"^ *(import|from) (torch|transformers|raggedright\.(tensors|train|engines|rollout|check))\b", re.M
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-torch", action="store_true", help="leave out test files that import torch: seconds, not minutes"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a file; None leaves the decision to pytest."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if is_test and config.getoption("--no-torch") and NEEDS_TORCH.search(collection_path.read_text()):
        return True
    return None


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount_it(megabytes: int) -> Path:
        told = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", disk], capture_output=True, text=True
        )
        if told.returncode:
            pytest.skip(f"mounting is not permitted here: {told.stderr.strip()}")
        return disk

    yield mount_it
    subprocess.run(["umount", "-l", disk], capture_output=True)
