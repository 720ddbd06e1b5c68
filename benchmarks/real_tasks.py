"""Our side of the comparison on a real model: prompts, agents, and an engine that replays completions."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from raggedright.agents.agent_session import Session, Task
from raggedright.rollout.engine import EngineContext, Generation, Request
from real_rows import FIRST_ID, SESSIONS, SHAPES, TURNS, completion_ids, prompt_ids


def tasks(index: int, seed: int) -> dict[str, object]:
    """A task is its index."""
    return {"index": index % FIRST_ID}


class Single:
    """One trajectory with one completion."""

    def __init__(self, *, shape: str) -> None:
        self._shape = SHAPES[shape]

    async def __call__(self, task: Task, session: Session) -> float:
        """Generate once; the reward is random."""
        index = task.data["index"]
        assert isinstance(index, int)
        trajectory = session.trajectory(prompt_ids(index, self._shape))
        await trajectory.generate(max_tokens=self._shape.completion)
        return session.random.random()


class Turns:
    """Eight turns, each a trajectory of its own whose context has all turns before it."""

    def __init__(self, *, shape: str) -> None:
        self._shape = SHAPES[shape]

    async def __call__(self, task: Task, session: Session) -> float:
        """Generate once per turn; the reward is random."""
        index = task.data["index"]
        assert isinstance(index, int)
        ids = prompt_ids(index, self._shape)
        for _ in range(TURNS):
            generation = await session.trajectory(ids).generate(max_tokens=32)
            ids = [*ids, *generation.ids]
        return session.random.random()


class Replay:
    """An engine that answers at once with the completions of the benchmark, so that only training takes time."""

    def __init__(self, context: EngineContext, shape: str) -> None:
        self._shape = SHAPES[shape]
        self._sessions: Counter[int] = Counter()
        self._version = 0

    @property
    def context_tokens(self) -> int:
        """The maximum tokens of a context with its generation."""
        return 2_048

    async def generate(self, request: Request) -> Generation:
        """The next completion of the prompt."""
        index = request.ids[0]
        session = self._sessions[index] % SESSIONS
        self._sessions[index] += 1
        ids = completion_ids(index, session, self._shape)[: request.sampling.max_tokens]
        return Generation(ids, [-10.0] * len(ids), "length", self._version)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """The weights do not matter."""
        self._version = version

    def forget(self, noise: bytes) -> None:
        """Nothing is kept."""

    def abort(self) -> None:
        """Every generation has returned already."""

    def close(self) -> None:
        """Nothing is open."""
