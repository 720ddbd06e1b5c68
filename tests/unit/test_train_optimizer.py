"""The schedule over the true number of steps, and one optimizer step."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from raggedright.config.sections import Optimizer
from raggedright.train.update import Learner, schedule
from raggedright.train.world import TrainError, World

ALONE = World(0, 1, torch.device("cpu"))


def test_a_linear_schedule_ends_at_its_final_share_with_the_run():
    settings = Optimizer(warmup=0.2, decay="linear", final=0.1)
    rates = [schedule(settings, step / 10) for step in range(1, 11)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert [a - b for a, b in pairwise(rates[1:])] == pytest.approx([0.9 / 8] * 8)


def test_a_cosine_schedule_is_halfway_at_half_time():
    settings = Optimizer(decay="cosine", final=0.0)
    assert [schedule(settings, done) for done in (0.5, 1.0)] == pytest.approx([0.5, 0.0])
    assert schedule(Optimizer(), 0.7) == 1.0


def test_a_step_clips_the_norm_and_says_what_it_was():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    learner = Learner("actor", model, Optimizer(lr=0.1, betas=(0.0, 0.0), grad_clip=1.0), ALONE)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    metrics = learner.step(0.5)
    assert metrics == {"actor/grad_norm": pytest.approx(5.0), "actor/lr": pytest.approx(0.1)}
    assert torch.allclose(before - model.weight, torch.full((1, 2), 0.1))  # without memory AdamW steps by the sign
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_on_a_gradient_that_is_no_number_is_not_taken(bad: float):
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    learner = Learner("actor", model, Optimizer(), ALONE)
    model.weight.grad = torch.tensor([[bad, 1.0]])
    with pytest.raises(TrainError, match="actor, optimizer step 1: the gradient's norm is"):
        learner.step(0.5)
    assert torch.equal(model.weight, before)
