"""examples/own_trainer.py, as its page says to start it: the library alone in a plain loop, on two real processes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_trainer.py"
ROUNDS = 3


@pytest.mark.xdist_group("launch")
def test_two_ranks_train_every_row_and_end_with_the_weights_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *ranks, EXAMPLE, "--rounds", str(ROUNDS), "--out", tmp_path / "two.pt"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    of_one = train_alone(tmp_path)
    assert capsys.readouterr().out == done.stdout  # scores, metrics and ledgers
    scores = [float(score) for score in re.findall(r"score (\d\.\d+)", done.stdout)]
    assert len(scores) == ROUNDS
    assert scores == sorted(scores)
    assert scores[-1] - scores[0] > 0.2
    ledgers = re.findall(r"^rows: (\d+) = (.+)$", done.stdout, flags=re.MULTILINE)
    assert [trained for _, trained in ledgers] == [f"{count} trained" for count, _ in ledgers]
    assert "failed (the tool timed out)" in done.stdout
    of_two = torch.load(tmp_path / "two.pt")
    for name, weight in of_one.items():
        torch.testing.assert_close(of_two[name], weight, rtol=0, atol=1e-12)


def train_alone(folder: Path) -> dict[str, torch.Tensor]:
    spec = importlib.util.spec_from_file_location("own_trainer", EXAMPLE)
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    sys.modules["own_trainer"] = example  # its dataclass looks itself up
    spec.loader.exec_module(example)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    try:
        return example.train(ROUNDS).state_dict()
    finally:
        dist.destroy_process_group()


def test_the_loop_stays_short_enough_to_copy():
    assert len(EXAMPLE.read_text().splitlines()) < 150
