"""The launcher itself: bounded in time, and every rank has its last words."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel.launch import RanksFailedError, launch, limit
from raggedright.tensors.parallel import shard

pytestmark = pytest.mark.xdist_group("gloo")


def test_a_rank_that_runs_one_micro_batch_less_is_found_out_in_time() -> None:
    """FSDP2 on gloo hangs with unequal counts: the reason why a plan gives every rank the same number."""
    with pytest.raises(RanksFailedError, match=r"rank 0 ended with [^0]") as failure:
        launch("parallel.test_launch:run_unequal_counts", 2, timeout=120)
    assert "rank 1 ended with" in str(failure.value)
    assert "2 ran" in str(failure.value)
    assert "in barrier" in str(failure.value)
    assert "all counts ran" not in str(failure.value)


def run_unequal_counts(_data: None) -> None:
    """The target: one micro-batch each, and then two on rank 1 and three on rank 0."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model._no_split_modules = ["Linear"]  # pyright: ignore[reportArgumentType]
    shard(model)
    for num_micro_batches in (1, 3 - dist.get_rank()):
        for _ in range(num_micro_batches):
            model(torch.ones(2, 4)).sum().backward()
        print(f"{num_micro_batches} ran", flush=True)
        limit(4)  # all that is imported at first use is there now
        dist.barrier()
    print("all counts ran", flush=True)
