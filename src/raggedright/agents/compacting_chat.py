"""A chat of several turns whose contexts stay below a limit: a full one ends with a summary, a fresh one continues.

In a config:

    agent.name = "compacting_chat"
    agent.options = { reward = "my_rewards:exact", step = "my_game:step", max_steps = 6, context_tokens = 2048 }

`step` is a "module:function" that gets (task, messages so far, which end with the model's reply) and returns the next
user's text, or None if the chat is over; it may be async. Without one there is one reply. The reward is that of the
last reply, as for `chat`; so are `answer`, `system`, `examples`, `column` and `chat_template_kwargs`.

Before a text that would pass `context_tokens`, the model is asked for a summary. The fresh trajectory has the system
message, the examples, the task, the summary and that text. A text that does not fit even then, such as a long task, is
read piece by piece: each piece with the summary so far, each in a trajectory of its own that ends with the next
summary. A task that is read in this way is not repeated. With `document`, the column of that name is read after the
task, which is repeated.

Invariants: no trajectory has more than `context_tokens` tokens; a summary is generated once, so its tokens carry loss
in one trajectory, and are part of the prompt of the next; messages alternate between user and assistant.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from types import MappingProxyType
from typing import cast

from raggedright.agents.agent_session import Session, Task
from raggedright.agents.chat import Reward, example_turns, opening, task_messages
from raggedright.agents.tokens import Message
from raggedright.agents.trajectory import Trajectory
from raggedright.errors import ConfigError
from raggedright.plugins import find_attribute

SUMMARY_REQUEST = (
    "Stop here: more follows, and this conversation is not kept. Write a short summary of everything that is needed to "
    "continue, and nothing else."
)
SUMMARY = "Summary so far:"
LEAST_PIECE = 8  # tokens of a text that a context must have room for next to two full summaries

Step = Callable[[Task, Sequence[Message]], str | Awaitable[str | None] | None]


class CompactingChat:
    """An agent with options: they are the arguments of its class. `max_steps` counts replies, not summaries."""

    def __init__(
        self,
        *,
        reward: str,
        answer: str = "whole",
        system: str = "",
        examples: Sequence[Sequence[str]] = (),
        column: str = "",
        document: str = "",
        step: str = "",
        max_steps: int = 8,
        max_tokens: int = 256,
        context_tokens: int | None = None,
        summary_tokens: int = 128,
        summary_request: str = SUMMARY_REQUEST,
        chat_template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.system, self.examples = system, example_turns(examples)
        self.column, self.document = column, document
        self.max_steps, self.max_tokens, self.context_tokens = max_steps, max_tokens, context_tokens
        self.summary_tokens, self.summary_request = summary_tokens, summary_request
        self.template = chat_template_kwargs
        self._reward, self._step = Reward(reward, answer), _find_step(step)
        counts = {"max_steps": max_steps, "max_tokens": max_tokens, "summary_tokens": summary_tokens}
        for name, value in (counts if context_tokens is None else counts | {"context_tokens": context_tokens}).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"agent.options.{name} is {value!r:.60}; it takes an integer from 1")
        if context_tokens is not None and context_tokens <= max_tokens + summary_tokens:
            raise ConfigError(
                f"agent.options.context_tokens is {context_tokens} and max_tokens + summary_tokens is "
                f"{max_tokens + summary_tokens}: no room for a prompt; raise the first, or lower one of the others"
            )

    async def __call__(self, task: Task, session: Session) -> float:
        """Replies until the environment ends the chat or the step limit is reached."""
        messages = task_messages(task, self.column)
        contexts = _Contexts(self, task, session, messages)
        text: str | None = contexts.first_text(can_continue=self._can_continue(1))
        number, reply = 0, ""
        while text is not None and number < self.max_steps:
            number += 1
            reply = await contexts.reply(text, can_continue=self._can_continue(number))
            messages.append({"role": "assistant", "content": reply})
            text = await self._next_text(task, messages) if self._can_continue(number) else None
            if text is not None:
                messages.append({"role": "user", "content": text})
        session.report(steps=number, summaries=contexts.num_summaries)
        return await self._reward(task, session, reply)

    def _can_continue(self, number: int) -> bool:
        """Whether another step may follow this one."""
        return self._step is not None and number < self.max_steps

    async def _next_text(self, task: Task, messages: Sequence[Message]) -> str | None:
        assert self._step is not None
        result = self._step(task, [*messages])
        text = await result if isawaitable(result) else result
        if text is not None and not isinstance(text, str):
            raise ValueError(f"agent.options.step returned a {type(text).__name__}; it takes text, or None at the end")
        return text


class _Contexts:
    """The trajectories of one session: each has a part of the chat, and all but the last end with a summary."""

    def __init__(self, agent: CompactingChat, task: Task, session: Session, messages: Sequence[Message]) -> None:
        *self._before, last = [*agent.examples, *messages]
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise ValueError(f"task {task.uid} ends with {last!r:.60}; its last message must be a user's text")
        self._agent, self._task, self._session = agent, task, session
        self._task_text = str(last["content"])
        self._limit = min(agent.context_tokens or session.max_row_tokens, session.max_row_tokens)
        self._summary: str | None = None
        self._trajectory: Trajectory | None = None
        self.num_summaries = 0

    def first_text(self, *, can_continue: bool) -> str:
        """What is read first: nothing but the task, or its document, or the task itself if it does not fit."""
        if self._agent.document:
            return _document(self._task, self._agent.document)
        self._summary = "" if can_continue else None  # room for one later
        fits = self._count("") + (self._agent.summary_tokens if can_continue else 0) <= self._room(can_continue)
        self._summary = None
        if fits:
            return ""
        text, self._task_text = self._task_text, ""
        return text

    async def reply(self, text: str, *, can_continue: bool) -> str:
        """The reply to a text, which is in the trajectory so far if it fits, else in a fresh one after a summary."""
        room, user = self._room(can_continue), [{"role": "user", "content": text}]
        current = self._trajectory
        if current is not None and len(current.ids) + current.count_tokens(user) <= room:
            current.observe(user)
        else:
            if current is not None:
                await self._end_with_summary(current)
            current = await self._open(text, room)
        self._trajectory = current
        return (await current.generate(max_tokens=self._agent.max_tokens)).text

    async def _open(self, text: str, room: int) -> Trajectory:
        """A fresh trajectory with a text; while it does not fit, its beginning is read in a trajectory before it."""
        while self._count(text) > room:
            piece, text = self._cut(text)
            await self._summarize(self._fresh(piece, self._agent.summary_request))
        return self._fresh(text)

    async def _end_with_summary(self, trajectory: Trajectory) -> None:
        request = [{"role": "user", "content": self._agent.summary_request}]
        if len(trajectory.ids) + trajectory.count_tokens(request) < self._limit:
            trajectory.observe(request)
            await self._summarize(trajectory)
        else:  # the template writes more after this reply than after the one that the room was computed with
            self._summary = ""

    async def _summarize(self, trajectory: Trajectory) -> None:
        room = self._limit - len(trajectory.ids)
        reply = await trajectory.generate(max_tokens=min(self._agent.summary_tokens, room))
        self._summary = reply.text.rpartition("</think>")[2].strip()
        self.num_summaries += 1

    def _fresh(self, *texts: str) -> Trajectory:
        return self._session.trajectory(self._prompt(*texts), chat_template_kwargs=self._agent.template)

    def _prompt(self, *texts: str) -> list[Message]:
        """The messages of a fresh context: the task, the summary and further texts are one message of the user."""
        summary = "" if self._summary is None else f"{SUMMARY} {self._summary or '(empty)'}"
        content = "\n\n".join(text for text in (self._task_text, summary, *texts) if text)
        messages: list[Message] = [*self._before, {"role": "user", "content": content}]
        return opening(self._session, self._agent.system, messages, self._agent.template)

    def _count(self, *texts: str) -> int:
        return self._session.count_tokens(self._prompt(*texts), chat_template_kwargs=self._agent.template)

    def _room(self, can_continue: bool) -> int:
        """The most tokens of a context before a reply: the reply must fit, and a summary if the chat may continue."""
        room = self._limit - self._agent.max_tokens
        if not can_continue:
            return room
        prompt = self._prompt("")
        request: Message = {"role": "user", "content": self._agent.summary_request}
        asked = [*prompt, {"role": "assistant", "content": "."}, request]
        count, kwargs = self._session.count_tokens, self._agent.template
        added = count(asked, chat_template_kwargs=kwargs) - count(prompt, chat_template_kwargs=kwargs)
        return room - added - 1 - self._agent.summary_tokens  # 1: a reply that was cut gets the end of its turn

    def _cut(self, text: str) -> tuple[str, str]:
        """The longest beginning of a text that a context with a summary after it can have, and the rest."""
        self._check_room()
        room = self._limit - self._agent.summary_tokens
        words = [match.end() for match in re.finditer(r"\S+\s*", text)]
        parts_of_word = [*range(1, words[0] if words else 0)]
        for ends in (words[:-1], words[-1:], parts_of_word):  # some words, all, or a part of a very long one
            low, high = 0, len(ends)
            while low < high:
                middle = (low + high + 1) // 2
                fits = self._count(text[: ends[middle - 1]].rstrip(), self._agent.summary_request) <= room
                low, high = (middle, high) if fits else (low, middle - 1)
            if low:
                return text[: ends[low - 1]].rstrip(), text[ends[low - 1] :]
        raise self._too_small(self._count("", self._agent.summary_request) + self._agent.summary_tokens)

    def _check_room(self) -> None:
        """A ValueError if a summary of full length would leave no room, so that it fails every session, or none."""
        summary, self._summary = self._summary, ""
        needed = self._count("", self._agent.summary_request) + 2 * self._agent.summary_tokens
        self._summary = summary
        if needed + LEAST_PIECE > self._limit:
            raise self._too_small(needed)

    def _too_small(self, needed: int) -> ValueError:
        return ValueError(
            f"a context has {self._limit:,} tokens, and its messages, the summary so far and the next one take "
            f"{needed:,}, so the task cannot be read in pieces; raise agent.options.context_tokens (and "
            "rollout.max_row_tokens), or lower agent.options.summary_tokens"
        )


def _document(task: Task, column: str) -> str:
    value = task.data.get(column)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"task {task.uid}: field {column} is {value!r:.60}; it takes text, or a list of texts")
    return "\n\n".join(texts)


def _find_step(name: str) -> Step | None:
    if not name:
        return None
    function = find_attribute(name, key="agent.options.step")
    if not callable(function):
        raise ConfigError(f"agent.options.step is {name!r}, which cannot be called; name a function")
    return cast(Step, function)
