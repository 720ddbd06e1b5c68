"""Keys and values that are kept between the turns of a trajectory change how much is read, and nothing else."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from rollout_cases import TEXT, full_log_probs, generate_all, key, local_engine, model_of
from transformers import PreTrainedModel
from vision_cases import load
from vision_cases import requests_of as image_requests_of

from raggedright.agents.agent_session import Session, Task
from raggedright.rollout.engine import Generation, Request, Sampling
from raggedright.rollout.kv_cache import MIN_KEPT_TOKENS, KeptRows, PastRow
from raggedright.rollout.local_engine import LocalEngine
from raggedright.tensors.routing import find_routers
from unit.agents.scripted import NoiseEngine, run, tasks_of

MODELS = ["qwen3", "qwen3-moe", "qwen3-vl", "llama", "gpt2", "mistral", "gemma2", "gemma3_text"]
Turn = tuple[Request, Generation]


async def talk(engine: LocalEngine, number: int, *, turns: int, waits: random.Random | None = None) -> list[Turn]:
    """A trajectory whose turns are generated tokens, then some that are observed; its length varies with its number."""
    rng = np.random.default_rng(number)
    ids = rng.integers(0, TEXT, rng.integers(8, 60)).tolist()
    answers = []
    for _ in range(turns):
        sampling = Sampling(max_tokens=int(rng.integers(1, 8)), stop_ids=frozenset(rng.integers(0, TEXT, 2).tolist()))
        request = Request([*ids], sampling, key(number))
        for _ in range(waits.randrange(30) if waits else 0):
            await asyncio.sleep(0)
        answers.append((request, await engine.generate(request)))
        ids += [*answers[-1][1].ids, *rng.integers(0, TEXT, rng.integers(0, 20)).tolist()]
    return answers


def talk_all(
    engine: LocalEngine, count: int = 9, *, turns: int = 5, waits: random.Random | None = None
) -> list[list[Turn]]:
    async def together() -> list[list[Turn]]:
        return await asyncio.gather(*(talk(engine, number, turns=turns, waits=waits) for number in range(count)))

    return asyncio.run(together())


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """The tokens of each pass, as rows x columns."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, given: sizes.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield sizes
    finally:
        hook.remove()


def same(mine: Sequence[list[Turn]], theirs: Sequence[list[Turn]], tolerance: float) -> None:
    for left, right in zip(mine, theirs, strict=True):
        for (_, kept), (_, read) in zip(left, right, strict=True):
            assert (kept.ids, kept.finish_reason) == (read.ids, read.finish_reason)
            assert kept.log_probs == pytest.approx(read.log_probs, rel=0, abs=tolerance)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_turns_are_as_if_every_context_was_read_whole(name: str, dtype: str, tolerance: float) -> None:
    """gemma2 in float64 computes its attention in float32."""
    tolerance = max(tolerance, 1e-6) if name == "gemma2" else tolerance
    model = model_of(name, dtype)
    with counted(model) as read_whole:
        plain = talk_all(local_engine(model, kept_bytes=0, max_batch_rows=5))
    with counted(model) as read_new:
        kept = talk_all(local_engine(model, max_batch_rows=5))
    same(kept, plain, tolerance)
    assert sum(read_new) < 0.7 * sum(read_whole)
    for request, answer in (turn for trajectory in kept for turn in trajectory):
        assert answer.log_probs == pytest.approx(full_log_probs(model, request, answer), rel=0, abs=tolerance)


@pytest.mark.parametrize("seed", range(4))
def test_turns_do_not_depend_on_the_company_of_a_trajectory(seed: int) -> None:
    model = model_of("mistral")
    plain = talk_all(local_engine(model, kept_bytes=0), 12)
    for kept_bytes in (1 << 30, 40_000):  # the second holds a few rows
        engine = local_engine(model, max_batch_rows=4, kept_bytes=kept_bytes)
        same(talk_all(engine, 12, waits=random.Random(seed)), plain, 1e-12)
        assert engine._kept_rows.num_bytes <= kept_bytes


def test_a_turn_reads_what_is_new() -> None:
    model = model_of("qwen3")
    few = Sampling(max_tokens=3)
    engine = local_engine(model)
    ids = [n % TEXT for n in range(60)]
    with counted(model) as sizes:
        for _ in range(4):
            (answer,) = generate_all(engine, [Request([*ids], few, key(0))])
            ids += [*answer.ids, 1, 2, 3]
    assert sizes == [60, 1, 1, *[4, 1, 1] * 3]  # the last token that was generated was not fed


def test_a_context_that_does_not_go_on_from_the_last_is_read_whole() -> None:
    model = model_of("qwen3")
    few = Sampling(max_tokens=2)
    engine = local_engine(model)
    ids = [n % TEXT for n in range(50)]
    first = Request(ids, few, key(0))
    (answer,) = generate_all(engine, [first])
    with counted(model) as sizes:
        assert generate_all(engine, [Request([1, *ids], few, key(0))])[0].ids
        assert sizes == [51, 1]
        assert generate_all(engine, [Request([1, *ids], few, key(1))])[0].ids
        assert sizes[2:] == [51, 1]
        (again,) = generate_all(local_engine(model), [first])
        assert again == answer


def test_the_same_request_again_is_answered_the_same() -> None:
    engine = local_engine(model_of("qwen3"))
    request = Request([n % TEXT for n in range(50)], Sampling(max_tokens=1), key(0))
    (first,), (second,) = generate_all(engine, [request]), generate_all(engine, [request])
    assert first.ids == second.ids
    assert second.log_probs == pytest.approx(first.log_probs, rel=0, abs=1e-12)


def test_an_update_of_the_weights_forgets_all() -> None:
    model = model_of("qwen3")
    engine = local_engine(model)
    talk_all(engine, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights((), version=1)
    assert (len(engine._kept_rows), engine._kept_rows.num_bytes) == (0, 0)
    same(talk_all(engine, 3), talk_all(local_engine(model, kept_bytes=0), 3), 1e-12)


def test_what_was_read_with_other_weights_is_not_kept() -> None:
    engine = local_engine(model_of("qwen3"))
    request = Request([n % TEXT for n in range(50)], Sampling(max_tokens=30), key(0))

    async def update_under_way() -> Generation:
        waiting = asyncio.ensure_future(engine.generate(request))
        for _ in range(20):
            await asyncio.sleep(0)
        engine.update_weights((), version=1)
        return await waiting

    assert asyncio.run(update_under_way()).weight_version == 1
    assert len(engine._kept_rows) == 0


def test_experts_are_those_of_contexts_read_whole() -> None:
    model = model_of("qwen3-moe")
    engines = [local_engine(model, routers=find_routers(model), kept_bytes=most) for most in (1 << 30, 0)]
    kept, plain = (talk_all(engine, 6) for engine in engines)
    same(kept, plain, 1e-12)
    for left, right in zip(kept, plain, strict=True):
        for (request, mine), (_, theirs) in zip(left, right, strict=True):
            assert mine.routed_experts is not None
            assert len(mine.routed_experts) == len(request.ids) + len(mine.ids) - 1
            np.testing.assert_array_equal(mine.routed_experts, theirs.routed_experts)


def test_rows_with_images_are_not_kept_and_share_passes_with_those_that_are() -> None:
    model, _, vision = load("qwen3_vl")
    images = [request for request in image_requests_of(vision, 18) if request.media]
    engine, plain = local_engine(model), local_engine(model, kept_bytes=0)
    generate_all(engine, images)
    assert len(engine._kept_rows) == 0
    text = [n % 10 for n in range(50)]
    (first,) = generate_all(engine, [Request(text, Sampling(max_tokens=3), key(0))])
    assert len(engine._kept_rows) == 1
    mixed = [*images, Request([*text, *first.ids, 1, 2], Sampling(max_tokens=3), key(0))]
    for mine, theirs in zip(generate_all(engine, mixed), generate_all(plain, mixed), strict=True):
        assert mine.ids == theirs.ids
        assert mine.log_probs == pytest.approx(theirs.log_probs, rel=0, abs=1e-12)


def past_of(num_tokens: int, first: int = 0) -> PastRow:
    ids = np.arange(first, first + num_tokens)
    return PastRow(ids, [(torch.zeros(num_tokens, 1, 1), torch.zeros(num_tokens, 1, 1))], None)


def test_rows_that_were_not_used_for_longest_go_first_when_there_is_no_room() -> None:
    cache = KeptRows(3 * past_of(10).num_bytes)
    for name in (b"a", b"b", b"c"):
        cache.put(name, past_of(10))
    row = cache.take(b"a", past_of(11).ids)
    assert row is not None
    cache.put(b"a", row)
    cache.put(b"d", past_of(10))
    assert [cache.take(name, past_of(11).ids) is not None for name in (b"a", b"b", b"c", b"d")] == [
        True, False, True, True,
    ]  # fmt: skip
    assert (len(cache), cache.num_bytes) == (0, 0)
    cache.put(b"e", past_of(31))
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_what_is_kept_holds_no_more_memory_than_is_counted() -> None:
    engine = local_engine(model_of("qwen3"), kept_bytes=1 << 17)
    talk_all(engine, 30, turns=2)
    kept = engine._kept_rows
    parts = [part for row in kept._rows.values() for layer in row.layers for part in layer]
    assert len(kept) > 1
    assert sum(part.untyped_storage().nbytes() for part in parts) <= kept.num_bytes <= 1 << 17


def test_short_rows_are_not_kept_nor_any_without_bytes() -> None:
    assert [KeptRows(1 << 20).wants(MIN_KEPT_TOKENS - 1), KeptRows(1 << 20).wants(MIN_KEPT_TOKENS)] == [False, True]
    assert not KeptRows(0).wants(10_000)


def test_the_engine_forgets_a_session_that_has_ended() -> None:
    async def agent(task: Task, session: Session) -> float:
        for _ in range(2):
            trajectory = session.trajectory("1:2=")
            await trajectory.generate()
            await trajectory.generate()
        session.trajectory("3=")
        return 1.0

    engine = NoiseEngine()
    run(agent, [(task, 0) for task in tasks_of("ab")], engine=engine)
    assert sorted(engine.forgotten) == sorted({request.noise for request in engine.requests})
    assert len(engine.forgotten) == 4
    local = local_engine(model_of("qwen3"))
    local._kept_rows.put(key(0), past_of(40))
    local.forget(key(0))
    assert len(local._kept_rows) == 0
