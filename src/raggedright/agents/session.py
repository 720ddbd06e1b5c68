"""A session: what an agent holds while it runs on a task.

Trajectories are numbered in the order they are opened, and their randomness is named by that number, so what a session
records depends on its names and on the weights alone.

The surprise: a session ends. Once its agent has returned, failed or run out of time, opening, generating, observing and
reporting raise a SessionError, so that a task which goes on regardless adds nothing to it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from raggedright.agents.settings import RolloutSettings
from raggedright.agents.tokens import Message, Tokens
from raggedright.agents.trajectory import Generate, Reply, Trajectory
from raggedright.agents.values import SessionError, finite
from raggedright.agents.vision import Picture, Vision
from raggedright.sessions import Session as RecordedSession
from raggedright.sessions import SessionKey, is_text

__all__ = ["Agent", "Message", "Reply", "Session", "SessionError", "Task", "Trajectory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent is to do; `uid` names the prompt, `data` is whatever the source has for it."""

    uid: str
    data: Mapping[str, object]


class Session:
    """One run of an agent on a task; `random` is seeded by the session's names: draw every choice from it.

    - `task`, `key` (round, prompt, session, attempt) and `tokenizer` are attributes.
    """

    __slots__ = (
        "_context_tokens", "_ended", "_generate", "_metrics", "_most_tokens", "_random", "_settings", "_trajectories",
        "_vision", "key", "task", "tokenizer",
    )  # fmt: skip

    def __init__(
        self,
        task: Task,
        key: SessionKey,
        *,
        tokenizer: PreTrainedTokenizerBase,
        settings: RolloutSettings,
        generate: Generate,
        context_tokens: int,
        vision: Vision | None = None,
    ) -> None:
        self.task, self.key, self.tokenizer = task, key, tokenizer
        self._random: Random | None = None
        self._settings, self._generate, self._context_tokens = settings, generate, context_tokens
        self._most_tokens = min(settings.max_row_tokens, context_tokens)  # of a trajectory
        self._vision = vision
        self._trajectories: list[Trajectory] = []
        self._metrics: dict[str, float] = {}
        self._ended = ""

    def trajectory(
        self,
        prompt: Tokens,
        *,
        images: Sequence[Picture] = (),
        role: str = "agent",
        tools: Sequence[object] | None = None,
        chat_template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Trajectory:
        """Open a fresh context; text is encoded without special tokens, messages by the tokenizer's template.

        A text has a placeholder (`session.image`) for each of `images`; messages have theirs in parts. The template
        gets `tools` (JSON schemas, or functions with type hints and docstrings) and `chat_template_kwargs`, such as
        enable_thinking, in every turn.
        """
        self.check_open()
        number, most = len(self._trajectories), self._settings.max_trajectories
        if number >= most:
            raise SessionError(
                f"session {self.name} opens trajectory {number:,} and may have {most:,}; "
                "open fewer, or raise rollout.max_trajectories"
            )
        if not is_text(role):
            raise SessionError(f"row {self.name}/{number}: role is {role!r:.60}; it takes text")
        trajectory = Trajectory(self, number, role, prompt, images, tools or (), chat_template_kwargs)
        self._trajectories.append(trajectory)
        return trajectory

    def report(self, **metrics: float) -> None:
        """Add numbers of the session beside its reward, e.g. exact_match; the last of a name counts."""
        self.check_open()
        for name, value in metrics.items():
            if (number := finite(value)) is None or not is_text(name):
                raise SessionError(f"session {self.name}: report({name!r:.60}) has {value!r:.60}; give finite numbers")
            self._metrics[name] = number

    @property
    def random(self) -> Random:
        """Where its choices are drawn from; seeded when it is first asked for, as not every agent draws."""
        if self._random is None:
            round, prompt, session, attempt = self.key
            self._random = Random(f"{self._settings.seed}/{round}/{session}/{attempt}/{prompt}".encode())
        return self._random

    @property
    def image(self) -> str:
        """What stands for one image in a text."""
        if self._vision is None:
            raise SessionError(f"session {self.name}: the model sees no images; use a vision-language model")
        return self._vision.placeholder

    @property
    def name(self) -> str:
        """What messages call it: prompt/session."""
        return f"{self.key.prompt:.60}/{self.key.session}"

    @property
    def num_trajectories(self) -> int:
        """How many trajectories were opened."""
        return len(self._trajectories)

    def check_open(self) -> None:
        """Refuse once the session has ended."""
        if self._ended:
            raise SessionError(f"session {self.name} has ended ({self._ended}); await all it does before you return")

    def end(self, why: str) -> None:
        """Let nothing more be added; for the runner."""
        self._ended = self._ended or why

    def record(self, score: float) -> RecordedSession:
        """What was recorded, with its score; for the runner."""
        trajectories = [trajectory.record() for trajectory in self._trajectories]
        return RecordedSession(key=self.key, score=score, metrics={**self._metrics}, trajectories=trajectories)

    def let_go(self, forget: Callable[[bytes], None]) -> None:
        """Forget its trajectories, here and in the engine; for the runner, at last.

        They know their session, so that all would wait for the garbage collector.
        """
        for trajectory in self._trajectories:
            if trajectory.noise:
                forget(trajectory.noise)
        self._trajectories = []


Agent = Callable[[Task, Session], Awaitable[float]]
