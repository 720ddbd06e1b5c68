"""A run on a full disk, and one that a rank's expected failure ends: the last line is the cause and the remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from integration.test_train import run
from raggedright.files import disk_fault, write_file
from raggedright.train.checkpoint import _cause


def check_last_line(err: str) -> str:
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("raggedright: ")
    return last


@pytest.mark.parametrize("kilobytes", [0, 200, 600, 900])
def test_a_full_disk_ends_with_the_cause_and_the_remedy(mount: Callable[[int], Path], tmp_path: Path, kilobytes: int):
    """It fills up while the run starts, in a put, at a checkpoint, in the export and in the report."""
    disk = mount(2)
    (disk / "ballast").write_bytes(b"\0" * (2**21 - 4096 - 1024 * kilobytes))
    options = ("--out", str(disk / "run"), "--checkpoint.every", "1", "--logging.trackers", '["tensorboard"]')
    code, _, err = run(tmp_path, "healthy", *options)
    assert code == 1
    last = check_last_line(err)
    assert "No space left on device" in last or "the disk is full" in last, last
    assert "make room" in last


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("kilobytes", [100, 1200])
def test_so_does_one_of_two_ranks(mount: Callable[[int], Path], tmp_path: Path, kilobytes: int):
    """It was 94 lines with the cause in the middle."""
    disk = mount(2)
    (disk / "ballast").write_bytes(b"\0" * (2**21 - 4096 - 1024 * kilobytes))
    options = ("--out", str(disk / "run"), "--checkpoint.every", "1", "--parallel.dp", "2")
    code, _, err = run(tmp_path, "healthy", *options)
    assert code == 1
    last = check_last_line(err)
    assert "rank " in last
    assert "No space left on device" in last or "the disk is full" in last, last
    assert "make room" in last


@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("dp", ["1", "2"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model.made", "null", "--model.symbols", "null", "--model.path", "nowhere"), "nowhere"),
        (("--agent.name", "integration.train_agents:raises"), "sessions failed"),
        (("--agent.name", "integration.no_such_module:agent"), "no_such_module"),
        (("--agent.name", "integration.broken_agent:agent"), "integration.broken_agent"),
    ],
)
def test_an_expected_failure_of_a_rank_ends_with_one_sentence(tmp_path: Path, dp: str, options, words: str):
    code, _, err = run(tmp_path, "healthy", "--parallel.dp", dp, *options)
    assert code == 1
    assert words in check_last_line(err)


def test_the_fault_of_a_disk_is_found_behind_other_errors(mount: Callable[[int], Path]):
    disk = mount(1)
    with pytest.raises(OSError, match="file") as full:
        write_file(disk / "file", b"\0" * 2**21)
    assert disk_fault(full.value) == "No space left on device"
    assert not list(disk.iterdir())
    error = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert disk_fault(error) == "No space left on device"
    error = ValueError("cannot save")
    error.__cause__ = full.value
    assert disk_fault(error) == "No space left on device"
    assert disk_fault(FileNotFoundError(2, "No such file or directory")) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kilobytes", [0, 4, 40, 100])
def test_so_is_that_of_a_checkpoint_which_torch_reports_as_an_unexpected_position(
    mount: Callable[[int], Path], kilobytes: int
):
    disk = mount(1)
    (disk / "ballast").write_bytes(b"\0" * (2**20 - 4096 - 1024 * kilobytes))
    with pytest.raises(CheckpointException) as full:
        save({str(i): torch.zeros(500 * i) for i in range(20)}, checkpoint_id=disk / "new", no_dist=True)
    assert _cause(full.value) == "rank 0: No space left on device"
    of_another_rank = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert disk_fault(of_another_rank) == "No space left on device"
