"""A single-turn chat for real models: the task's messages in, one reply out, a reward from your function.

A task has "messages" (a list of role and content) or "prompt" (the user's text, or such a list). The reward function
is named in the options as "module:function" and takes (task, text of the reply); it returns a number, or an
awaitable of one. In a config:

    agent.name = "chat"
    agent.options = { reward = "my_rewards:exact", system = "Answer with a number.", max_tokens = 64 }

`chat_template_kwargs` are settings of the tokenizer's chat template, such as { enable_thinking = false }.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from types import MappingProxyType
from typing import cast

from raggedright.agents.agent_session import Session, Task
from raggedright.agents.tokens import Message
from raggedright.errors import ConfigError
from raggedright.plugins import find_attribute

Reward = Callable[[Task, str], float | Awaitable[float]]


class Chat:
    """An agent with options: they are the arguments of its class."""

    def __init__(
        self,
        *,
        reward: str,
        system: str = "",
        max_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        function = find_attribute(reward, key="agent.options.reward")
        if not callable(function):
            raise ConfigError(f"agent.options.reward is {reward!r}, which cannot be called; name a function")
        self._reward = cast(Reward, function)
        self._system, self._max_tokens, self._template = system, max_tokens, chat_template_kwargs

    async def __call__(self, task: Task, session: Session) -> float:
        """One trajectory with one reply."""
        trajectory = session.trajectory(self._messages(task), chat_template_kwargs=self._template)
        reply = await trajectory.generate(max_tokens=self._max_tokens)
        reward = self._reward(task, reply.text)
        return await reward if isawaitable(reward) else reward

    def _messages(self, task: Task) -> list[Message]:
        prompt = task.data.get("messages", task.data.get("prompt"))
        if not prompt or not isinstance(prompt, Sequence):
            raise ValueError(f"task {task.uid} has no messages and no prompt; its fields are {', '.join(task.data)}")
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        return [{"role": "system", "content": self._system}, *messages] if self._system else messages
