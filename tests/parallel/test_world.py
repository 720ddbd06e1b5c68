"""What ranks tell each other, in real processes."""

import pytest
import torch
import torch.distributed as dist

from parallel.launch import launch
from raggedright.train.world import TrainError, World

pytestmark = pytest.mark.xdist_group("gloo")


def run_exchanges(_data: None) -> dict:
    """The target: sums, gathered values and a disagreement."""
    world = World.of_group(torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)  # the same on all ranks
    sums, errors = [], []
    for size in (1, 7, 5_000, 300_000):
        of_ranks = torch.randn(world.dp_size, size, generator=draw)
        sums.append(world.sum(of_ranks[world.dp_rank].clone()))
        errors.append(float((sums[-1].double() - of_ranks.double().sum(0)).abs().max()))
    of_first = torch.cat(sums)
    dist.broadcast(of_first, src=0)
    try:
        world.check_same(f"of rank {world.dp_rank}", "a name")
    except TrainError as error:
        disagreement = str(error)
    else:
        disagreement = ""
    return {
        "same_bits": torch.equal(of_first, torch.cat(sums)),
        "sums": [float(values.double().sum()) for values in sums],
        "error": max(errors),
        "gathered": world.gather((world.dp_rank, "x" * world.dp_rank)),
        "any": [world.any(world.dp_rank == 1), world.any(False)],
        "disagreement": disagreement,
    }


@pytest.mark.parametrize("dp", [2, 3])
def test_sums_have_the_same_bits_on_every_rank_and_in_every_run(dp: int) -> None:
    first, again = (launch("parallel.test_world:run_exchanges", dp, timeout=120) for _ in range(2))
    assert first == again
    for answer in first:
        assert answer["same_bits"]
        assert answer["error"] < 1e-5
        assert answer["gathered"] == [[rank, "x" * rank] for rank in range(dp)]
        assert answer["any"] == [True, False]
        assert "a name (rank 0: of rank 0, rank 1: of rank 1" in answer["disagreement"]
