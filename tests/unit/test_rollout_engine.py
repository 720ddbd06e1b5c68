"""The local engine as agents meet it: batches, ends, cancellation, failures, event loops."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from rollout_cases import VOCABULARY, generate_all, key, local_engine, model_of, requests_of
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from raggedright.rollout.engine import EngineError, Generation, Request, Sampling
from raggedright.rollout.local_engine import LocalEngine

MODEL = model_of("qwen3")


def _request(number: int, max_tokens: int, ids: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request(ids=ids, sampling=Sampling(max_tokens=max_tokens), noise=key(number))


@contextmanager
def _passes(model: nn.Module) -> Iterator[list[tuple[int, int, int]]]:
    """Rows, new columns and columns in all of every pass."""
    seen: list[tuple[int, int, int]] = []

    def note(module: nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        rows, columns = kwargs["input_ids"].shape
        seen.append((rows, columns, kwargs["attention_mask"].shape[1]))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def test_requests_of_one_moment_share_their_passes() -> None:
    requests = [_request(number, 3, ids=(number,) * (1 + number % 9)) for number in range(30)]
    with _passes(MODEL) as seen:
        generate_all(local_engine(MODEL), requests)
    assert seen == [(30, 9, 9), (30, 1, 10), (30, 1, 11)]


def test_a_context_that_several_requests_have_is_read_once() -> None:
    requests = [_request(number, 3, ids=(1,) * (1 + number % 9)) for number in range(30)]
    with _passes(MODEL) as seen:
        generate_all(local_engine(MODEL), requests)
    assert seen == [(9, 9, 9), (30, 1, 10), (30, 1, 11)]


def test_a_finished_request_is_handed_out_at_once_and_its_agent_joins_again() -> None:
    done: list[str] = []

    async def agent(engine: LocalEngine, name: str, lengths: list[int]) -> None:
        for turn, length in enumerate(lengths):
            await engine.generate(_request(turn, length))
            done.append(f"{name}{turn}")

    async def run() -> None:
        engine = local_engine(MODEL)
        await asyncio.gather(agent(engine, "long", [20]), agent(engine, "short", [2, 3, 4]))

    with _passes(MODEL) as seen:
        asyncio.run(run())
    assert done == ["short0", "short1", "short2", "long0"]
    assert sum(columns == 1 for _, columns, _ in seen) == 19


def test_rows_and_columns_leave_with_the_requests_that_needed_them() -> None:
    requests = [_request(0, 3, ids=(1,) * 50), _request(1, 6, ids=(1, 2))]
    with _passes(MODEL) as seen:
        generate_all(local_engine(MODEL), requests)
    assert seen == [(2, 50, 50), (2, 1, 51), (2, 1, 52), (1, 1, 5), (1, 1, 6), (1, 1, 7)]


def test_a_batch_has_no_more_rows_than_it_may() -> None:
    with _passes(MODEL) as seen:
        answers = generate_all(local_engine(MODEL, max_batch_rows=4), requests_of(30))
    assert max(rows for rows, _, _ in seen) == 4
    assert answers == generate_all(local_engine(MODEL, max_batch_rows=4), requests_of(30))


def test_a_stop_token_ends_a_generation_and_is_part_of_it() -> None:
    (whole,) = generate_all(local_engine(MODEL), [_request(0, 30)])
    assert (len(whole.ids), whole.finish_reason) == (30, "length")
    stop = whole.ids[11]
    sampling = Sampling(max_tokens=30, stop_ids=frozenset({stop, VOCABULARY + 5}))
    (ended,) = generate_all(local_engine(MODEL), [Request(ids=(1, 2, 3), sampling=sampling, noise=key(0))])
    assert ended.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert ended.log_probs == whole.log_probs[: len(ended.ids)]
    assert ended.finish_reason == "stop"


def _letters() -> PreTrainedTokenizerFast:
    words = {chr(ord("A") + number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="A"))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_stop_text_ends_a_generation_also_across_tokens() -> None:
    engine = local_engine(MODEL, tokenizer=_letters())
    (whole,) = generate_all(engine, [_request(0, 60)])
    text = "".join(chr(ord("A") + token) for token in whole.ids)
    stop = text[40:43]
    sampling = Sampling(max_tokens=60, stop_texts=("never", stop))
    (ended,) = generate_all(engine, [Request(ids=(1, 2, 3), sampling=sampling, noise=key(0))])
    assert ended.ids == whole.ids[: text.index(stop) + 3]
    assert ended.finish_reason == "stop"
    with pytest.raises(EngineError, match="no tokenizer"):
        generate_all(local_engine(MODEL), [Request(ids=(1,), sampling=sampling, noise=key(0))])


def test_abort_returns_everything_under_way_with_what_it_has() -> None:
    async def run() -> tuple[list[Generation], Generation]:
        engine = local_engine(MODEL, max_batch_rows=2)
        tasks = [asyncio.ensure_future(engine.generate(_request(number, 200))) for number in range(3)]
        for _ in range(60):
            await asyncio.sleep(0)
        engine.abort()
        later = await engine.generate(_request(7, 5))
        return await asyncio.gather(*tasks), later

    aborted, later = asyncio.run(run())
    whole = generate_all(local_engine(MODEL), [_request(number, 200) for number in (0, 1, 7)])
    assert [each.finish_reason for each in aborted] == ["abort"] * 3
    assert [bool(each.ids) for each in aborted] == [True, True, False]
    for mine, all_of_it in zip(aborted, whole[:2], strict=False):
        assert mine.ids == all_of_it.ids[: len(mine.ids)]
        assert len(mine.log_probs) == len(mine.ids) < 200
    assert (later.ids, later.finish_reason) == (whole[2].ids[:5], "length")


def test_abort_works_from_another_thread() -> None:
    async def run(engine: LocalEngine) -> list[Generation]:
        task = asyncio.gather(*(engine.generate(_request(number, 250)) for number in range(3)))
        await asyncio.sleep(0)
        threading.Thread(target=engine.abort).start()
        return await task

    engine = local_engine(MODEL)
    engine.abort()
    assert [each.finish_reason for each in asyncio.run(run(engine))] == ["abort"] * 3
    engine.abort()


def test_a_closed_engine_fails_what_waits_and_refuses_the_rest() -> None:
    async def run(engine: LocalEngine) -> list[Generation | BaseException]:
        tasks = [asyncio.ensure_future(engine.generate(_request(number, 200))) for number in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        engine.close()
        return await asyncio.gather(*tasks, engine.generate(_request(4, 1)), return_exceptions=True)

    errors = asyncio.run(run(local_engine(MODEL, max_batch_rows=2)))
    assert [type(error) for error in errors] == [EngineError] * 4
    assert ["under way" in str(error) for error in errors] == [True] * 3 + [False]
    assert "closed and takes no more" in str(errors[3])


def test_a_cancelled_request_leaves_the_batch_and_the_others_go_on() -> None:
    async def run(engine: LocalEngine) -> tuple[list[int], Generation]:
        tasks = [asyncio.ensure_future(engine.generate(_request(number, 40))) for number in range(4)]
        for _ in range(30):
            await asyncio.sleep(0)
        rows = [seen[-1][0]]
        for task in tasks[:3]:
            task.cancel()
        answer = await tasks[3]
        assert all(task.cancelled() for task in tasks[:3])
        return [*rows, seen[-1][0]], answer

    with _passes(MODEL) as seen:
        rows, answer = asyncio.run(run(local_engine(MODEL, max_batch_rows=3)))
    assert rows == [3, 1]
    assert answer == generate_all(local_engine(MODEL), [_request(3, 40)])[0]


def test_a_time_out_acts_while_the_engine_decodes() -> None:
    async def run(engine: LocalEngine) -> None:
        async with asyncio.timeout(0.001):
            await engine.generate(_request(0, 250))

    engine = local_engine(MODEL)
    with pytest.raises(TimeoutError), _passes(MODEL) as seen:
        asyncio.run(run(engine))
    assert len(seen) < 250
    assert generate_all(engine, [_request(0, 3)])[0].finish_reason == "length"


def test_diverged_weights_reach_every_request_as_an_error() -> None:
    model = model_of("qwen3")
    engine = local_engine(model, max_batch_rows=2)
    head = model.get_parameter("lm_head.weight").detach()
    good = head.clone()

    async def run() -> list[Generation | BaseException]:
        head[3] = torch.nan
        return await asyncio.gather(*(engine.generate(_request(n, 9)) for n in range(5)), return_exceptions=True)

    errors = asyncio.run(run())
    assert [type(error) for error in errors] == [EngineError] * 5
    assert all("diverged" in str(error) for error in errors)
    assert len({id(error) for error in errors}) == 5
    head.copy_(good)
    assert generate_all(engine, [_request(0, 4)])[0].finish_reason == "length"


@pytest.mark.parametrize("at_pass", [1, 5])
def test_a_failing_model_reaches_every_request_as_an_error(at_pass: int) -> None:
    left = [at_pass]

    def explode(module: nn.Module, args: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of memory: tried to allocate 7 GB\nmore words")

    async def run() -> list[Generation | BaseException]:
        return await asyncio.gather(*(engine.generate(_request(n, 40)) for n in range(5)), return_exceptions=True)

    engine = local_engine(MODEL, max_batch_rows=3)
    handle = MODEL.register_forward_pre_hook(explode)
    try:
        errors = asyncio.run(run())
    finally:
        handle.remove()
    assert [type(error) for error in errors] == [EngineError] * 5
    assert all("RuntimeError: out of memory: tried to allocate 7 GB; lower max_batch_rows" in str(e) for e in errors)
    assert all(isinstance(error.__cause__, RuntimeError) for error in errors if isinstance(error, EngineError))
    assert generate_all(engine, [_request(0, 4)]) == generate_all(local_engine(MODEL), [_request(0, 4)])


def test_the_engines_task_may_be_cancelled_and_nobody_waits_for_ever() -> None:
    async def run(engine: LocalEngine) -> list[Generation | BaseException]:
        mine = asyncio.all_tasks()
        waiting = [asyncio.ensure_future(engine.generate(_request(n, 200))) for n in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - mine - set(waiting):
            task.cancel()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        return [*errors, await engine.generate(_request(0, 2))]

    *errors, answer = asyncio.run(run(local_engine(MODEL)))
    assert ["task was cancelled" in str(error) for error in errors] == [True, True]
    assert isinstance(answer, Generation)


def test_event_loops_may_use_an_engine_one_after_another() -> None:
    engine = local_engine(MODEL)
    requests = requests_of(10)
    assert generate_all(engine, requests) == generate_all(engine, requests)

    async def leave_early() -> None:
        task = asyncio.ensure_future(engine.generate(_request(0, 200)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(leave_early())
    with _passes(MODEL) as seen:
        assert len(generate_all(engine, [_request(1, 2)])[0].ids) == 2
    assert [rows for rows, _, _ in seen] == [1, 1]


def test_two_event_loops_at_once_are_refused() -> None:
    engine = local_engine(MODEL)
    errors: list[str] = []

    def other() -> None:
        with pytest.raises(EngineError) as caught:
            generate_all(engine, [_request(1, 2)])
        errors.append(str(caught.value))

    async def run() -> Generation:
        task = asyncio.ensure_future(engine.generate(_request(0, 200)))
        for _ in range(10):
            await asyncio.sleep(0)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return await task

    assert len(asyncio.run(run()).ids) == 200
    assert "another event loop" in errors[0]


@pytest.mark.parametrize(
    ("ids", "max_tokens", "words"),
    [
        ([], 1, "no ids"),
        ([1] * 250, 7, r"250 tokens and max_tokens = 7 make 257, and the model has 256 positions"),
        ([1, VOCABULARY], 1, r"token id 40 is outside the model's vocabulary of 40"),
        ([1, -1], 1, r"token id -1 is outside"),
        ([1.5], 1, "not integers"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_in_words(ids: list, max_tokens: int, words: str) -> None:
    engine = local_engine(MODEL)
    assert engine.context_tokens == 256
    request = Request(ids=ids, sampling=Sampling(max_tokens=max_tokens), noise=b"")
    with pytest.raises(EngineError, match=words):
        generate_all(engine, [request])
    assert len(generate_all(engine, [_request(0, 6, ids=(1,) * 250)])[0].ids) == 6
