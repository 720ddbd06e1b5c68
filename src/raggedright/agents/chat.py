"""A single-turn chat for real models: the task's messages in, one reply out, a reward from your function or a package.

A task has "messages" (a list of role and content), "prompt" or "question" (the user's text, or such a list), or the
column that the option of that name says. In a config:

    agent.name = "chat"
    agent.options = { reward = "my_rewards:exact", system = "Answer with a number.", max_tokens = 64 }

The reward is "module:function", which takes (task, text of the reply) and returns a number or an awaitable of one, or
"reasoning_gym": the verifier of the task's dataset. `answer` says which part of a reply it gets: "whole", "last_line",
or "tag", the text between the last <answer> and </answer>. `examples` are pairs of a question and a reply that come
before the task. `chat_template_kwargs` are settings of the tokenizer's chat template, such as { enable_thinking =
false }. A template that takes no system message gets it in the user's.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, cast

from raggedright.agents import gym_tasks
from raggedright.agents.agent_session import Session, Task
from raggedright.agents.tokens import ChatTemplate, Message
from raggedright.errors import ConfigError
from raggedright.plugins import find_attribute

COLUMNS = ("messages", "prompt", "question")


class Chat:
    """An agent with options: they are the arguments of its class."""

    def __init__(
        self,
        *,
        reward: str,
        answer: str = "whole",
        system: str = "",
        examples: Sequence[Sequence[str]] = (),
        column: str = "",
        max_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._reward = Reward(reward, answer)
        self._system, self._examples, self._column = system, example_turns(examples), column
        self._max_tokens, self._template = max_tokens, chat_template_kwargs

    async def __call__(self, task: Task, session: Session) -> float:
        """One trajectory with one reply."""
        messages = [*self._examples, *task_messages(task, self._column)]
        messages = opening(session, self._system, messages, self._template)
        trajectory = session.trajectory(messages, chat_template_kwargs=self._template)
        reply = await trajectory.generate(max_tokens=self._max_tokens)
        return await self._reward(task, session, reply.text)


class Reward:
    """The reward of a reply: a function's, or the verifier's of reasoning-gym."""

    def __init__(self, name: str, answer: str) -> None:
        if answer not in _ANSWERS:
            raise ConfigError(f"agent.options.answer is {answer!r:.60}; it takes {', '.join(_ANSWERS)}")
        self._answer = _ANSWERS[answer]
        self._function: Callable[[Task, str], float | Awaitable[float]] | None = None
        if name != gym_tasks.NAME:
            function = find_attribute(name, key="agent.options.reward")
            if not callable(function):
                raise ConfigError(f"agent.options.reward is {name!r}, which cannot be called; name a function")
            self._function = cast(Callable[[Task, str], float], function)

    async def __call__(self, task: Task, session: Session, reply: str) -> float:
        """The reward; a verifier also reports whether there was an answer, and whether it is fully right.

        An answer on which the verifier fails scores 0 and is counted as `verifier_failed`.
        """
        answer = self._answer(reply)
        if self._function is not None:
            reward = self._function(task, answer)
            return await reward if isawaitable(reward) else reward
        score, failed = 0.0, 0.0
        try:
            score = gym_tasks.verify(task, answer.strip())
        except gym_tasks.VerifierError:
            failed = 1.0
        session.report(exact_match=float(score >= 1), answered=float(bool(answer.strip())), verifier_failed=failed)
        return score


def _last_line(reply: str) -> str:
    return reply.strip().rpartition("\n")[2]


def _tag(reply: str) -> str:
    found = re.findall(r"<answer>(.*?)</answer>", reply, re.DOTALL)
    return found[-1] if found else ""


_ANSWERS: Mapping[str, Callable[[str], str]] = {"whole": str, "last_line": _last_line, "tag": _tag}


def example_turns(examples: Sequence[Sequence[str]]) -> list[Message]:
    """Turns of a user and an assistant that come before the task, from pairs of texts."""
    turns: list[Message] = []
    for i, pair in enumerate(examples):
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ConfigError(f"agent.options.examples: number {i} is {pair!r:.60}; give pairs of question and reply")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def task_messages(task: Task, column: str = "") -> list[Message]:
    """The messages of a task, from a column or from the first of COLUMNS that it has."""
    name = column or next((each for each in COLUMNS if task.data.get(each)), "")
    prompt = task.data.get(name)
    if not prompt or not isinstance(prompt, Sequence):
        missing = f"no {column}" if column else "no messages, no prompt and no question"
        raise ValueError(f"task {task.uid} has {missing}; its fields are {', '.join(task.data)}")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]


def opening(
    session: Session, system: str, messages: Sequence[Message], arguments: Mapping[str, object]
) -> list[Message]:
    """Messages after a system message; as part of the user's message if the chat template takes no system message."""
    given: list[Message] = [{"role": "system", "content": system}, *messages] if system else [*messages]
    if len(given) < 2 or given[0].get("role") != "system":
        return given
    template = ChatTemplate(tokenizer=session.tokenizer, tools=(), arguments=arguments, keeps_parts=False)
    if template.takes_system():
        return given
    text, first = given[0].get("content"), given[1]
    content: Any = first.get("content")  # text, or parts
    joined = f"{text}\n\n{content}" if isinstance(content, str) else [{"type": "text", "text": text}, *content]
    return [{**first, "content": joined}, *given[2:]]
