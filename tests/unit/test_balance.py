"""The balance loss is the usual product of means, and padding has no say in loads, losses or experts' gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raggedright.check.cases import Case
from raggedright.check.compare import batch_of, load_case
from raggedright.errors import RowsError
from raggedright.tensors.routing import (
    NOT_ROUTED,
    Routers,
    balance_loss,
    count_experts,
    find_routers,
    load_metrics,
    routings_of,
)
from raggedright.tensors.tensor_batch import TensorBatch

MODEL, MADE_UP = load_case(Case(model="qwen3-moe"))
FOUND = find_routers(MODEL)
assert FOUND is not None
ROUTERS: Routers = FOUND  # 2 layers, 4 experts, 2 of them a token


def routing(*experts: list[int]) -> Tensor:
    """The same in both layers."""
    return torch.tensor(experts)[:, None].expand(-1, 2, -1)


def step_counts(batch: TensorBatch, dp: int) -> Tensor:
    (step, *_) = batch.plan.steps("actor")
    return torch.stack([count_experts(routings_of(batch, step, rank), ROUTERS) for rank in range(dp)]).sum(0)


def step_balance(batch: TensorBatch, dp: int) -> tuple[float, dict[str, Tensor]]:
    """The loss of the first step over all ranks and micro-batches, and its gradient."""
    (step, *_) = batch.plan.steps("actor")
    counts, total = step_counts(batch, dp), 0.0
    for rank in range(dp):
        for _, micro in batch.micro_batches(step, rank):
            with ROUTERS.replaying(micro.routing) as logits:
                MODEL(**micro.inputs, use_cache=False)
                loss = balance_loss(logits, micro, counts, ROUTERS).loss
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
    gradient = {name: p.grad for name, p in MODEL.named_parameters() if p.grad is not None}
    MODEL.zero_grad(set_to_none=True)
    return total, gradient


def test_choices_are_counted_by_layer_and_tokens_without_a_record_are_not() -> None:
    counts = count_experts([routing([0, 1], [0, 2]), routing([3, 0], [NOT_ROUTED, NOT_ROUTED]).to(torch.int8)], ROUTERS)
    assert counts.tolist() == [[3, 1, 1, 1]] * 2
    assert count_experts([], ROUTERS).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("wrong", [4, -2])
def test_experts_that_the_model_does_not_have_are_refused(wrong: int) -> None:
    with pytest.raises(RowsError, match=r"routed_experts names experts .* and the model has 4, from 0"):
        count_experts([routing([0, wrong])], ROUTERS)


def test_balance_is_one_where_all_experts_are_alike() -> None:
    """Whatever the router says: the shares are equal, and probabilities add up to one."""
    batch = batch_of(Case(model="qwen3-moe", dp=1, cut="one"), MADE_UP, MODEL)
    (step, *_) = batch.plan.steps("actor")
    (_, micro), *_ = batch.micro_batches(step, 0)
    with torch.no_grad(), ROUTERS.replaying(micro.routing) as logits:
        MODEL(**micro.inputs, use_cache=False)
        even = torch.full((2, 4), float(step_counts(batch, 1).sum()) / 8, dtype=torch.float64)
        assert balance_loss(logits, micro, even, ROUTERS).loss.item() == pytest.approx(1)


@pytest.mark.parametrize(
    "other",
    [
        {"dp": 3, "cut": "pipeline"},
        {"dp": 4, "cut": "rows", "collate": "padded"},
        {"dp": 2, "cut": "context", "order": 1},
        {"dp": 2, "cut": "pipeline", "collate": "padded"},
    ],
    ids=str,
)
def test_ranks_cuts_collations_and_padding_change_neither_loads_nor_balance_nor_its_gradient(other: dict) -> None:
    case = Case(model="qwen3-moe", dp=1, cut="one")
    alone, cut = batch_of(case, MADE_UP, MODEL), batch_of(replace(case, **other), MADE_UP, MODEL)
    assert torch.equal(step_counts(alone, 1), step_counts(cut, other["dp"]))
    (loss, gradient), (other_loss, other_gradient) = step_balance(alone, 1), step_balance(cut, other["dp"])
    assert loss > 1
    assert other_loss == pytest.approx(loss, rel=1e-12)
    assert gradient.keys() == other_gradient.keys()
    for name, expected in gradient.items():
        torch.testing.assert_close(other_gradient[name], expected, rtol=0, atol=1e-9)


def test_padding_rows_have_a_legal_routing_and_no_expert_counts_it_or_learns_from_it() -> None:
    batch = batch_of(Case(model="qwen3-moe", dp=4, align="lcm", cut="pipeline"), MADE_UP, MODEL)
    (step, *_) = batch.plan.steps("actor")
    num_rows, met = len(batch.plan.rows), 0
    for rank in range(4):
        for position, micro in batch.micro_batches(step, rank):
            if not len(position) or (position < num_rows).any():
                continue
            met += 1
            assert micro.routing is not None
            assert micro.real is not None
            assert micro.routing.unique(dim=-1).shape == micro.routing.shape
            assert 0 <= int(micro.routing.min()) <= int(micro.routing.max()) < 4
            assert not micro.real.any()
            with ROUTERS.replaying(micro.routing) as logits:
                MODEL(**micro.inputs, use_cache=False)
            (balance_loss(logits, micro, torch.ones(2, 4).double(), ROUTERS).loss + 0 * logits[0].sum()).backward()
            assert not any(p.grad.any() for p in MODEL.parameters() if p.grad is not None)
            MODEL.zero_grad(set_to_none=True)
    assert met


def test_loads_are_means_over_steps_of_the_busiest_and_the_idlest_expert() -> None:
    counts = torch.tensor([[[4.0, 4, 4, 4], [8, 8, 0, 0]], [[10, 2, 2, 2], [4, 4, 4, 4]], [[0, 0, 0, 0], [0, 0, 0, 0]]])
    assert load_metrics(counts) == pytest.approx(
        {
            "actor/experts/load_max": (2 + 2.5) / 2,
            "actor/experts/load_min": (0 + 0.5) / 2,
            "actor/experts/dead": 2 / 16,
        }
    )
    assert load_metrics(counts[2:]) == {}
