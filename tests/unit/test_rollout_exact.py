"""What the local engine generates is what the model says, and does not depend on the company of a request."""

import asyncio
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import full_log_probs, generate_all, local_engine, model_of, requests_of

from raggedright.rollout.engine import Generation, Request, Sampling
from raggedright.rollout.local_engine import LocalEngine

QWEN3 = model_of("qwen3")
MODELS = ["qwen3", "qwen3-moe", "qwen3-vl", "llama", "gpt2", "mistral", "gemma3_text"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_log_probs_are_those_of_a_full_pass_without_a_cache(name: str, dtype: str, tolerance: float) -> None:
    model = model_of(name, dtype)
    requests = requests_of(24)
    engine = local_engine(model, max_batch_rows=7)
    alone = [generate_all(engine, [request])[0] for request in requests[:6]]
    answers = generate_all(engine, requests)
    for request, answer in zip([*requests, *requests[:6]], [*answers, *alone], strict=True):
        assert answer.log_probs == pytest.approx(full_log_probs(model, request, answer), rel=0, abs=tolerance)


def test_eager_attention_in_float64_is_read_without_padding() -> None:
    """Its softmax is in float32, where the mask of a padded column's own query would make NaN of it."""
    model = model_of("gemma2")
    assert model.config._attn_implementation == "eager"
    requests = requests_of(24)
    for request, answer in zip(requests, generate_all(local_engine(model), requests), strict=True):
        assert answer.log_probs == pytest.approx(full_log_probs(model, request, answer), rel=0, abs=1e-6)


def test_a_whole_wave_in_one_pass_is_exact_too() -> None:
    model = model_of("qwen3")
    requests = requests_of(200, longest=9, most=2)
    for request, answer in zip(requests, generate_all(local_engine(model), requests), strict=True):
        assert answer.log_probs == pytest.approx(full_log_probs(model, request, answer), rel=0, abs=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_requests_with_one_context_are_exact_too(name: str) -> None:
    model = model_of(name)
    requests = [request._replace(noise=bytes([n, k])) for n, request in enumerate(requests_of(5)) for k in range(6)]
    for request, answer in zip(requests, generate_all(local_engine(model), requests), strict=True):
        assert answer.log_probs == pytest.approx(full_log_probs(model, request, answer), rel=0, abs=1e-12)


def test_long_and_short_contexts_are_read_in_passes_of_their_own() -> None:
    model = model_of("qwen3")
    few = Sampling(max_tokens=3)
    lengths = [200, 2, 190, 5, 130] * 25
    requests = [Request(ids=[n % 40] * length, sampling=few, noise=bytes([n])) for n, length in enumerate(lengths)]
    for request, answer in zip(requests, generate_all(local_engine(model), requests), strict=True):
        assert answer.log_probs == pytest.approx(full_log_probs(model, request, answer), rel=0, abs=1e-12)


async def _at_odd_times(engine: LocalEngine, requests: list[Request], seed: int) -> list[Generation]:
    rng = random.Random(seed)
    order = list(range(len(requests)))
    rng.shuffle(order)

    async def one(number: int) -> tuple[int, Generation]:
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        return number, await engine.generate(requests[number])

    answers = dict(await asyncio.gather(*(one(number) for number in order)))
    return [answers[number] for number in range(len(requests))]


async def _one_by_one(engine: LocalEngine, requests: list[Request]) -> list[Generation]:
    return [await engine.generate(request) for request in requests]


def _same(left: list[Generation], right: list[Generation]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        assert (mine.ids, mine.finish_reason) == (theirs.ids, theirs.finish_reason)
        assert mine.log_probs == pytest.approx(theirs.log_probs, rel=0, abs=1e-12)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), rows=st.sampled_from([1, 2, 3, 5, 16, 64]), count=st.integers(1, 16))
def test_tokens_do_not_depend_on_the_batch_that_a_request_lands_in(seed: int, rows: int, count: int) -> None:
    model = QWEN3
    requests = requests_of(count, seed=seed, cuts=True, most=9)
    alone = asyncio.run(_one_by_one(local_engine(model), requests))
    _same(generate_all(local_engine(model), requests), alone)
    _same(generate_all(local_engine(model), requests[::-1])[::-1], alone)
    _same(asyncio.run(_at_odd_times(local_engine(model, max_batch_rows=rows), requests, seed)), alone)


def test_greedy_tokens_are_those_of_transformers_own_generate() -> None:
    model = model_of("qwen3")
    requests = [
        Request(ids=request.ids, sampling=Sampling(max_tokens=15, temperature=0.0), noise=b"")
        for request in requests_of(20)
    ]
    for request, answer in zip(requests, generate_all(local_engine(model), requests), strict=True):
        ids = torch.tensor([request.ids])
        theirs = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=15,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.ids == theirs[0, len(request.ids) :].tolist()
        assert answer.log_probs == pytest.approx(full_log_probs(model, request, answer), rel=0, abs=1e-12)


def test_the_training_model_stays_as_it_is() -> None:
    model = model_of("gpt2").train()
    model.get_submodule("transformer.wte").eval()
    modes = [module.training for module in model.modules()]
    requests = requests_of(8)
    first = generate_all(local_engine(model), requests)
    assert [module.training for module in model.modules()] == modes
    assert not any(parameter.is_inference() or parameter.grad is not None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    _same(first, generate_all(local_engine(model.eval()), requests))
    model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
