"""Sums over ranks, on parameters and metrics small enough to be written out."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel.gradients import gather_gradients
from parallel.launch import launch
from raggedright.errors import ConfigError
from raggedright.tensors.parallel import shard, sum_gradients, sum_metrics
from raggedright.train.world import TrainError, World

pytestmark = pytest.mark.xdist_group("gloo")


class Small(nn.Module):
    """Two dtypes, a frozen parameter, and one that no loss reaches."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(2, 3))
        self.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.rank_1_only = nn.Parameter(torch.zeros(2))
        self.nowhere = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def run_sums(_data: None) -> dict:
    """The target: each kind of sum, on ranks 0 and 1."""
    rank = dist.get_rank()
    own_groups = [dist.new_group([0]), dist.new_group([1])]
    model = Small()
    (model.both.sum() * (rank + 1) + model.wide.sum() * 0.5).backward()
    if rank == 1:
        (7 * model.rank_1_only.sum()).backward()
    sum_gradients(model, own_groups[rank])  # pyright: ignore[reportArgumentType]
    alone = {name: grad.tolist() for name, grad in gather_gradients(model).items()}
    all_reduce, calls = dist.all_reduce, []
    dist.all_reduce = lambda tensor, *args, **kwargs: (calls.append(tensor.dtype), all_reduce(tensor, *args, **kwargs))
    sum_gradients(model)
    dist.all_reduce = all_reduce
    names = ("a", "b") if rank else ("b", "a")
    values = {"a": torch.tensor(0.25), "b": torch.tensor(rank, dtype=torch.float64)}
    metrics = sum_metrics({name: values[name] for name in names})
    return {
        "alone": alone,
        "gradients": {name: grad.tolist() for name, grad in gather_gradients(model).items()},
        "all_reduces": len(calls),
        "metrics": {name: value.item() for name, value in metrics.items()},
        "metric_dtypes": sorted({str(value.dtype) for value in metrics.values()}),
        "sharded": _sharded_gradient(rank),
        "disagreement": _disagreement(rank),
    }


def _disagreement(rank: int) -> str:
    """What a rank is told when it gives another value than the other, after they gave the same."""
    world = World(rank, 2, torch.device("cpu"))
    world.check_same("both", "nothing")
    try:
        world.check_same(f"of rank {rank}", "the plan of round 3")
    except TrainError as error:
        return str(error)
    return ""


def _sharded_gradient(rank: int) -> list[float]:
    """Summed in the backward pass, in float32 too, and left alone by sum_gradients."""
    model = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1, bias=False))
    model._no_split_modules = ["Linear"]  # pyright: ignore[reportArgumentType]
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    shard(model, dist.new_group([0, 1]))  # pyright: ignore[reportArgumentType]
    assert all(isinstance(module, FSDPModule) for module in model.modules())
    for _ in range(2):
        model(torch.tensor([[rank + 1.0]])).sum().backward()
    sum_gradients(model)
    return [grad.sum().item() for grad in gather_gradients(model).values()]


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    return launch("parallel.test_summing:run_sums", 2, timeout=120)


def test_gradients_are_summed_and_a_missing_one_counts_as_zero_on_every_rank(answers: list[dict]) -> None:
    for answer in answers:
        assert answer["gradients"] == {
            "both": [[3.0] * 3] * 2,
            "wide": [1.0, 1.0],
            "rank_1_only": [7.0, 7.0],
            "nowhere": [0.0, 0.0],
        }


def test_gradients_take_one_all_reduce_a_dtype(answers: list[dict]) -> None:
    assert [answer["all_reduces"] for answer in answers] == [2, 2]


def test_a_group_of_one_keeps_its_own_gradients(answers: list[dict]) -> None:
    assert [answer["alone"]["both"][0][0] for answer in answers] == [1.0, 2.0]
    assert [answer["alone"]["rank_1_only"] for answer in answers] == [[0.0, 0.0], [7.0, 7.0]]


def test_metrics_are_summed_by_name_in_float64(answers: list[dict]) -> None:
    for answer in answers:
        assert answer["metrics"] == {"a": 0.5, "b": 1.0}
        assert answer["metric_dtypes"] == ["torch.float64"]


def test_a_sharded_model_sums_gradients_over_ranks_and_micro_batches_in_the_backward_pass(answers: list[dict]) -> None:
    for answer in answers:
        assert answer["sharded"] == [2 * (1.0 + 2.0) * 3] * 2


def test_ranks_that_disagree_are_told_so_on_each_of_them(answers: list[dict]) -> None:
    for answer in answers:
        given = "rank 0: of rank 0, rank 1: of rank 1"
        assert answer["disagreement"].startswith(f"ranks disagree on the plan of round 3 ({given}); please report")


def test_a_model_that_does_not_name_its_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear does not name its blocks.*sum_in_backward"):
        shard(nn.Linear(2, 2))
