"""An engine that answers by noise alone, a tokenizer of digits, and a round to run: what agents' tests share."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from raggedright.agents.agent_session import Agent, Task
from raggedright.agents.digits import SYMBOLS
from raggedright.agents.runner import RolloutSettings, Runner
from raggedright.agents.vision import Vision
from raggedright.rollout.engine import Generation, Request, Sampling
from raggedright.sessions import TOKEN_FIELDS, Trajectory
from raggedright.store.memory import MemoryStore
from raggedright.store.session_store import Store
from raggedright.train.load_models import make_tokenizer
from recorded import recorded_sessions

TOKENIZER = make_tokenizer(SYMBOLS)
EOS: int = TOKENIZER.eos_token_id  # type: ignore[assignment]


class NoiseEngine:
    """Every token and log-prob is a hash of (noise, position): digits, and one time in three the end of text."""

    def __init__(self, context_tokens: int = 4096) -> None:
        self.context_tokens = context_tokens
        self.requests: list[Request] = []
        self.forgotten: list[bytes] = []

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        ids: list[int] = []
        log_probs: list[float] = []
        while len(ids) < request.sampling.max_tokens:
            await asyncio.sleep(0)
            position = len(request.ids) + len(ids)
            draw = hashlib.sha256(request.noise + position.to_bytes(8, "little")).digest()
            ids.append(EOS if draw[0] < 85 else draw[1] % 10)
            log_probs.append(-1.0 - draw[2] / 100)
            if ids[-1] in request.sampling.stop_ids:
                return Generation(ids, log_probs, "stop", 7)
        return Generation(ids, log_probs, "length", 7)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        raise NotImplementedError

    def forget(self, noise: bytes) -> None:
        self.forgotten.append(noise)

    def abort(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class ScriptEngine(NoiseEngine):
    """Answers with the next of these lists of ids, whoever asks."""

    def __init__(self, *replies: Sequence[int]) -> None:
        super().__init__()
        self._replies = iter(replies)

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        ids = [*next(self._replies)][: request.sampling.max_tokens]
        is_stop = bool(ids) and ids[-1] in request.sampling.stop_ids
        return Generation(ids, [-0.5] * len(ids), "stop" if is_stop else "length", 3)


def settings(**changes) -> RolloutSettings:
    sampling = Sampling(max_tokens=8, stop_ids=frozenset([EOS]))
    return RolloutSettings(**{"sampling": sampling, "max_row_tokens": 64, "timeout": 0.3, **changes})


def tasks_of(kinds: Iterable[str]) -> list[Task]:
    return [Task(uid=kind, data={"kind": kind, "digits": [*"31415"]}) for kind in kinds]


def run(
    agent: Agent,
    sessions: Sequence[tuple[Task, int]],
    *,
    engine: NoiseEngine | None = None,
    store: Store | None = None,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    vision: Vision | None = None,
    **changes,
) -> Store:
    store = store or MemoryStore()
    engine = engine or NoiseEngine()
    runner = Runner(agent=agent, engine=engine, tokenizer=tokenizer, settings=settings(**changes), vision=vision)
    runner.run(store, round=1, sessions=sessions)
    return store


def recorded(store: Store, prompts: Iterable[str] | None = None) -> list[tuple[object, ...]]:
    """Every bit of the sessions of these prompts, to compare."""
    wanted = None if prompts is None else {*prompts}
    return [
        (each.key, each.score, each.cause, {**each.metrics}, *map(_values, each.trajectories))
        for each in recorded_sessions(store)
        if wanted is None or each.key.prompt in wanted
    ]


def rows(store: Store) -> list[dict[str, list]]:
    """The token fields of all rows, as lists."""
    trajectories = [trajectory for session in recorded_sessions(store) for trajectory in session.trajectories]
    return [{name: each.fields[name].tolist() for name in TOKEN_FIELDS} for each in trajectories]


def causes(store: Store, round: int = 1) -> dict[tuple[str, int, int], str]:
    return {each.key[1:]: each.cause for each in recorded_sessions(store, round) if each.cause}


def _values(row: Trajectory) -> tuple[object, ...]:
    said = (row.role, row.reward, row.finish_reason, row.generations, row.cut_generations, row.weight_version)
    return (*said, *((name, str(value.dtype), value.tolist()) for name, value in sorted(row.fields.items())))
