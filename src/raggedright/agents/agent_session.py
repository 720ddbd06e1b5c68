"""What an agent gets: its task and the session, in which it opens trajectories; and the limits of a session.

Trajectories are numbered in the order in which they are opened. Random numbers are derived from a hash of (seed, round,
prompt, session, attempt, trajectory, position), so what a session records depends on these and on the weights only.

Note: once its agent has returned, failed or run out of time, a session is closed: opening, generating, observing and
reporting raise a SessionError, so that a task that still runs adds nothing to it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from raggedright.agents.tokens import ChatTemplate, Tokens, encode, is_chat
from raggedright.agents.trajectory import Generate, Trajectory, as_finite_float
from raggedright.agents.vision import Picture, Vision, pictures_of
from raggedright.errors import ConfigError
from raggedright.rollout.engine import Sampling
from raggedright.sessions import Session as RecordedSession
from raggedright.sessions import SessionError, SessionKey, is_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent has to do; `uid` names the prompt, `data` has the fields of the task source."""

    uid: str
    data: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Limits of a session and of a round, made from the config's section `rollout`.

    `sampling.max_tokens` limits a generation for which the agent sets no limit; `timeout` is in seconds per session;
    `attempts` is the most times that a session is run if it fails.
    """

    sampling: Sampling
    max_row_tokens: int
    max_trajectories: int = 1024
    concurrency: int = 1024
    timeout: float = 300.0
    attempts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_row_tokens < 2:
            raise ConfigError(f"rollout.max_row_tokens is {self.max_row_tokens}; a row has 2 tokens or more")


class Session:
    """One run of an agent on a task; `random` is seeded by the session's names: draw every choice from it.

    - `task`, `key` (round, prompt, session, attempt), `tokenizer` and `random` are attributes.
    """

    __slots__ = (
        "_context_tokens", "_ended", "_generate", "_max_row_tokens", "_metrics", "_settings", "_trajectories",
        "_vision", "key", "random", "task", "tokenizer",
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
        self.random = Random(f"{settings.seed}/{key.round}/{key.session}/{key.attempt}/{key.prompt}".encode())
        self._settings, self._generate, self._context_tokens = settings, generate, context_tokens
        self._max_row_tokens = min(settings.max_row_tokens, context_tokens)
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
        number, limit = len(self._trajectories), self._settings.max_trajectories
        if number >= limit:
            raise SessionError(
                f"session {self.name} opens trajectory {number:,} and may have {limit:,}; "
                "open fewer, or raise rollout.max_trajectories"
            )
        if not is_text(role):
            raise SessionError(f"row {self.name}/{number}: role is {role!r:.60}; it takes text")
        trajectory = Trajectory(self, number, role, prompt, images, tools or (), chat_template_kwargs)
        self._trajectories.append(trajectory)
        return trajectory

    def count_tokens(
        self,
        prompt: Tokens,
        *,
        tools: Sequence[object] | None = None,
        chat_template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> int:
        """How many tokens a trajectory with this prompt, without images, begins with; also if they fit no row."""
        self.check_open()
        if not isinstance(prompt, str) and pictures_of(prompt, ()):
            raise SessionError(f"session {self.name}: count_tokens is given images; it counts text only")
        template = None
        if is_chat(prompt):
            template = ChatTemplate(
                tokenizer=self.tokenizer, tools=tools or (), arguments=chat_template_kwargs, keeps_parts=False
            )
        return len(encode(self.tokenizer, prompt, limit=self.max_row_tokens, template=template))

    def report(self, **metrics: float) -> None:
        """Add numbers to the session next to its reward, e.g. exact_match; a later value replaces an earlier one."""
        self.check_open()
        for name, value in metrics.items():
            if (number := as_finite_float(value)) is None or not is_text(name):
                raise SessionError(f"session {self.name}: report({name!r:.60}) has {value!r:.60}; give finite numbers")
            self._metrics[name] = number

    @property
    def max_row_tokens(self) -> int:
        """The most tokens that a trajectory can have: rollout.max_row_tokens, or the model's context."""
        return self._max_row_tokens

    @property
    def image(self) -> str:
        """The placeholder for one image in a text."""
        if self._vision is None:
            raise SessionError(f"session {self.name}: the model takes no images; use a vision-language model")
        return self._vision.placeholder

    @property
    def name(self) -> str:
        """Its name in messages: prompt/session."""
        return f"{self.key.prompt:.60}/{self.key.session}"

    @property
    def num_trajectories(self) -> int:
        """The number of trajectories that were opened."""
        return len(self._trajectories)

    def check_open(self) -> None:
        """A SessionError once the session has ended."""
        if self._ended:
            raise SessionError(f"session {self.name} has ended ({self._ended}); await all it does before you return")

    def end(self, why: str) -> None:
        """Close it; for the runner."""
        self._ended = self._ended or why

    def record(self, score: float) -> RecordedSession:
        """The recorded session with its score; for the runner."""
        trajectories = [trajectory.record() for trajectory in self._trajectories]
        return RecordedSession(key=self.key, score=score, metrics={**self._metrics}, trajectories=trajectories)

    def release(self, forget: Callable[[bytes], None]) -> None:
        """Release its trajectories, here and in the engine; for the runner, when it has ended.

        They refer to their session, so without this all would stay in memory until the garbage collector runs.
        """
        for trajectory in self._trajectories:
            if trajectory.noise:
                forget(trajectory.noise)
        self._trajectories = []


Agent = Callable[[Task, Session], Awaitable[float]]
