"""Exchanges through shared memory, in real processes."""

import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import raggedright.train.shared_memory as shared_memory
from parallel.launch import RanksFailedError, launch
from raggedright.errors import RaggedRightError
from raggedright.train.shared_memory import ROOM, SharedMemory
from raggedright.train.world import TrainError, World

pytestmark = [
    pytest.mark.xdist_group("gloo"),
    pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="Linux on x86 alone has it"),
]
CPU, MINUTE = torch.device("cpu"), timedelta(minutes=1)
EXCHANGES = 300


def run_exchanges(_data: None) -> dict:
    """The target: many exchanges of all kinds in a row, with a rank that is late at each."""
    world = World.of_group(CPU, MINUTE)
    assert world.shared is not None
    draw = torch.Generator().manual_seed(0)  # the same on all ranks
    wrong, sums = 0, []
    for number in range(EXCHANGES):
        size = int(torch.randint(1, 5_000, (1,), generator=draw))
        given = torch.randn(world.dp_size, size, generator=draw)
        if number % world.dp_size == world.dp_rank:
            time.sleep(0.0005 * (number % 7))
        sums.append(world.sum(given[world.dp_rank].clone()))
        wrong += not torch.equal(sums[-1], sum(given[1:], start=given[0]))
        told = world.gather((world.dp_rank, number, "x" * size))
        wrong += told != [(rank, number, "x" * size) for rank in range(world.dp_size)]
        wrong += world.any(number % 5 == world.dp_rank) != (number % 5 < world.dp_size)
        world.check_same(f"{number}", "the number")
    by_group = [torch.cat(sums)]
    dist.broadcast(by_group[0], src=0)
    return {"wrong": wrong, "same_bits": torch.equal(by_group[0], torch.cat(sums)), "whole": _whole(world)}


def _whole(world: World) -> dict:
    """Tensors of other shapes and types, and what no room holds."""
    large = world.sum(torch.full((ROOM // 4 + 1,), float(world.dp_rank + 1)))
    table = world.sum(torch.full((3, 2), world.dp_rank + 1, dtype=torch.float64))
    texts = world.gather("y" * (ROOM + world.dp_rank))
    try:
        world.check_same(f"of rank {world.dp_rank}", "a name")
    except TrainError as error:
        told = str(error)
    else:
        told = ""
    after = world.sum(torch.ones(4, dtype=torch.int64))
    return {
        "large": large.unique().tolist(),
        "table": [[*table.shape], table.unique().tolist()],
        "texts": [len(text) - ROOM for text in texts],
        "told": told,
        "after": after.tolist(),
    }


@pytest.mark.parametrize("dp", [2, 3])
def test_every_exchange_gives_every_rank_the_same_and_right_bits(dp: int) -> None:
    for answer in launch("parallel.test_shared_memory:run_exchanges", dp, timeout=120):
        assert answer["wrong"] == 0
        assert answer["same_bits"]
        whole, total = answer["whole"], dp * (dp + 1) / 2
        assert whole["large"] == [total]
        assert whole["table"] == [[3, 2], [total]]
        assert whole["texts"] == [*range(dp)]
        assert whole["told"].startswith("ranks disagree on a name (rank 0: of rank 0, rank 1: of rank 1")
        assert whole["after"] == [dp] * 4


def run_with_a_death(_data: None) -> str:
    """The target: rank 1 is killed between two exchanges, one of which it came to."""
    world = World.of_group(CPU, MINUTE)
    world.sum(torch.ones(1))
    if world.dp_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    shared_memory.GRACE = 0.1
    began = time.monotonic()
    try:
        world.sum(torch.ones(1))
    except RaggedRightError as error:
        print(f"told after {time.monotonic() - began:.0f} s: {error}", flush=True)
        raise
    return "went on"


def test_a_rank_that_was_killed_is_named_in_time() -> None:
    with pytest.raises(RanksFailedError, match=r"told after 0 s: rank 1 has ended and the others wait for it"):
        launch("parallel.test_shared_memory:run_with_a_death", 2, timeout=60)


def run_with_a_late_rank(_data: None) -> str:
    """The target: rank 1 comes too late."""
    world = World.of_group(CPU, timedelta(seconds=0.5))
    if world.dp_rank == 1:
        dist.barrier()
        return ""
    try:
        world.sum(torch.ones(1))
    except RaggedRightError as error:
        told = str(error)
    else:
        told = ""
    dist.barrier()
    return told


def test_nobody_waits_longer_than_the_time_out() -> None:
    told = launch("parallel.test_shared_memory:run_with_a_late_rank", 2, timeout=60)[0]
    assert told == "rank 1 has not come within 0.5 s; see its output"


def run_without_memory(_data: None) -> list:
    """The target: rank 0 has none to share, as where ranks are on several machines."""
    if dist.get_rank() == 0:
        sys.platform = "plan9"
    world = World(dist.get_rank(), 2, CPU, SharedMemory.join(MINUTE))
    return [world.shared is None, world.sum(torch.ones(1)).item(), world.gather("x")]


def test_ranks_without_such_memory_use_their_process_group() -> None:
    assert launch("parallel.test_shared_memory:run_without_memory", 2, timeout=60) == [[True, 2.0, ["x", "x"]]] * 2
