"""The local rollout engine compared with transformers' `generate`, on the same requests of different lengths.

    make bench-rollout

Every request has its own number of tokens. `generate` takes requests in batches of equal size, left-padded, and runs
each batch until its longest row has ended; the engine removes a row when it ends and takes in the next one. Tokens are
those that were requested. Bare passes are the model calls of `generate` without sampling or anything else.

Then sessions of 16 turns, in which a trajectory generates and observes alternately, with and without the keys and
values that the engine keeps between turns. `--large` uses a model of SmolLM2-135M's size, with random weights.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from raggedright.rollout.engine import EngineContext, Request, Sampling
from raggedright.rollout.local_engine import LocalEngine
from raggedright.rollout.sampling import noise_key


class Case(NamedTuple):
    what: str
    hidden: int
    layers: int
    vocabulary: int
    requests: int
    prompt: tuple[int, int]
    tokens: Callable[[np.random.Generator], int]
    batch_rows: int
    repeats: int


class Talk(NamedTuple):
    """Trajectories of 16 turns."""

    what: str
    sizes: dict[str, int]
    trajectories: int
    prompt: int
    generated: int
    observed: int


TURNS = 16
TALKS = [
    Talk("1 trajectory", {"hidden_size": 256, "num_hidden_layers": 4}, 1, 256, 16, 48),
    Talk("8 trajectories", {"hidden_size": 256, "num_hidden_layers": 4}, 8, 256, 16, 48),
]
LARGE = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49_152}
LARGE |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}

CASES = [
    Case("a wave of 180 x 2 tokens", 64, 2, 18, 180, (2, 9), lambda rng: 2, 180, 10),
    Case("64 x 4-64 tokens, 16 rows", 256, 4, 1_000, 64, (8, 64), lambda rng: _skewed(rng), 16, 1),
    Case("64 x 4-64 tokens, 64 rows", 256, 4, 1_000, 64, (8, 64), lambda rng: _skewed(rng), 64, 1),
]


def _skewed(rng: np.random.Generator) -> int:
    return int(np.clip(rng.lognormal(2.5, 1), 4, 64))


def model_of(**sizes: int) -> PreTrainedModel:
    torch.manual_seed(0)
    hidden = sizes["hidden_size"]
    plain = {"intermediate_size": 2 * hidden, "num_attention_heads": 4, "num_key_value_heads": 4}
    plain |= {"head_dim": hidden // 4, "vocab_size": 1_000, "max_position_embeddings": 2_048}
    config = AutoConfig.for_model("qwen3", initializer_range=0.1, **{**plain, **sizes})
    return AutoModelForCausalLM.from_config(config).eval()


def requests_of(case: Case) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            ids=rng.integers(0, case.vocabulary, rng.integers(case.prompt[0], case.prompt[1] + 1)).tolist(),
            sampling=Sampling(max_tokens=case.tokens(rng)),
            noise=noise_key(seed=0, round=0, prompt=str(number), session=0, attempt=0, trajectory=0),
        )
        for number in range(case.requests)
    ]


def padded(requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor, int]:
    columns = max(len(request.ids) for request in requests)
    ids = torch.tensor([[0] * (columns - len(request.ids)) + list(request.ids) for request in requests])
    mask = torch.tensor([[0] * (columns - len(r.ids)) + [1] * len(r.ids) for r in requests])
    return ids, mask, max(request.sampling.max_tokens for request in requests)


def ours(engine: LocalEngine, requests: list[Request]) -> None:
    async def together() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    asyncio.run(together())


def talk(model: PreTrainedModel, case: Talk, *, kept_bytes: int) -> None:
    """All trajectories at once, each with all its turns."""
    engine = LocalEngine(EngineContext(model=model, kept_bytes=kept_bytes))

    async def turns(number: int) -> None:
        rng = np.random.default_rng(number)
        ids = rng.integers(0, 1_000, case.prompt).tolist()
        for _ in range(TURNS):
            noise = noise_key(seed=0, round=0, prompt=str(number), session=0, attempt=0, trajectory=0)
            answer = await engine.generate(Request(ids, Sampling(max_tokens=case.generated), noise))
            ids = [*ids, *answer.ids, *rng.integers(0, 1_000, case.observed).tolist()]

    async def together() -> None:
        await asyncio.gather(*(turns(number) for number in range(case.trajectories)))

    asyncio.run(together())


def theirs(model: PreTrainedModel, requests: list[Request], batch_rows: int) -> None:
    for start in range(0, len(requests), batch_rows):
        ids, mask, tokens = padded(requests[start : start + batch_rows])
        model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )


@torch.no_grad()
def least(model: PreTrainedModel, requests: list[Request], batch_rows: int) -> None:
    """Only the passes of a static batch; every token repeats the last one of its row."""
    for start in range(0, len(requests), batch_rows):
        ids, mask, tokens = padded(requests[start : start + batch_rows])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).past_key_values
        token, position = ids[:, -1:], positions[:, -1:]
        for _ in range(tokens - 1):
            position = position + 1
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            model(input_ids=token, attention_mask=mask, position_ids=position, past_key_values=cache)


def best_of(repeats: int, works: list[Callable[[], object]]) -> list[float]:
    """The best time of each; they take turns, so that other load on the machine affects all of them."""
    seconds = [[0.0] * repeats for _ in works]
    for turn in range(repeats):
        for number, work in enumerate(works):
            start = time.perf_counter()
            work()
            seconds[number][turn] = time.perf_counter() - start
    return [min(each) for each in seconds]


def show_talks(talks: list[Talk], repeats: int) -> None:
    table = Table("16 turns", "tokens read and generated", "kept, s", "read again, s", "keeping is", box=None)
    for case in talks:
        model = model_of(**case.sizes)
        kept, plain = best_of(repeats, [partial(talk, model, case, kept_bytes=most) for most in (1 << 30, 0)])
        last = case.prompt + TURNS * (case.generated + case.observed)
        tokens = f"{case.prompt:,} + 16 x ({case.generated} + {case.observed}) = {last:,}"
        table.add_row(case.what, tokens, f"{kept:.2f}", f"{plain:.2f}", f"{plain / kept:.1f} x as fast")
    Console(width=140).print(table)


def main() -> None:
    torch.set_num_threads(1)
    if "--large" in sys.argv[1:]:
        show_talks([Talk("1 trajectory, 135M", LARGE, 1, 256, 16, 48)], 1)
        return
    table = Table(
        "what", "tokens", "engine, s", "tokens/s", "generate, s", "tokens/s", "engine is", "bare passes, s", box=None
    )
    for case in CASES:
        model = model_of(vocab_size=case.vocabulary, hidden_size=case.hidden, num_hidden_layers=case.layers)
        requests = requests_of(case)
        engine = LocalEngine(EngineContext(model=model, max_batch_rows=case.batch_rows))
        tokens = sum(request.sampling.max_tokens for request in requests)
        mine, other, bound = best_of(
            case.repeats,
            [
                partial(ours, engine, requests),
                partial(theirs, model, requests, case.batch_rows),
                partial(least, model, requests, case.batch_rows),
            ],
        )
        figures = (f"{mine:.3f}", f"{tokens / mine:,.0f}", f"{other:.3f}", f"{tokens / other:,.0f}")
        table.add_row(case.what, f"{tokens:,}", *figures, f"{other / mine:.2f} x as fast", f"{bound:.3f}")
    Console(width=140).print(table)
    show_talks(TALKS, 2)


if __name__ == "__main__":
    main()
