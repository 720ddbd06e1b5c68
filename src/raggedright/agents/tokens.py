"""Text, token ids and chat messages as token ids, for a prompt and for what follows a reply.

A chat's first context is its template with the generation prompt. What follows a reply is cut out of the template: the
conversation is rendered with a marker in place of the reply, and the text after the marker is encoded. So the generated
tokens stay as they are, whatever the template does to earlier turns. The text after the marker must not depend on the
reply: the conversation is also rendered with the reply itself, and refused where the two differ.

If tool messages come, the marker is in the arguments of the calls that they answer, because many templates refuse tool
messages without calls. Then the cut begins with the special token that ends the turn. A template that writes no calls
gets the reply as text.

Note: the cut begins with the token that ends a turn. A model that has generated it already must not see it
twice; one that was stopped by its length has not, and gets it as an observation.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from operator import index
from typing import Any

from jinja2 import TemplateError, meta
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from raggedright.sessions import SessionError

Message = Mapping[str, object]
Tokens = str | Sequence[int] | Sequence[Message]

Encode = Callable[[str], list[int]]
"""Encodes a text together with its images, instead of the tokenizer."""

_REPLY = "\ue000reply\ue000"  # characters for private use: no whitespace that a template would strip
_OTHER_ARGUMENTS = ("messages", "tools", "add_generation_prompt")  # of a template, which are not settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A tokenizer's chat template with the arguments for all turns of a trajectory.

    `arguments` are the template's settings, such as enable_thinking. With `keeps_parts`, messages whose content is a
    list of parts reach the template as they are; otherwise their texts are joined.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[object]
    arguments: Mapping[str, object]
    keeps_parts: bool

    def _check(self) -> None:
        if not self.tokenizer.chat_template:
            raise SessionError("the tokenizer has no chat template; give text or token ids, or set one in its folder")
        if self.tools and "tools" not in _variables(self._source):
            raise SessionError(
                f"{len(self.tools):,} tools are given and the tokenizer's chat template lists none; "
                "use a template that does, or describe them in a message"
            )
        for name in self.arguments:
            if name in _OTHER_ARGUMENTS:
                raise SessionError(f"chat_template_kwargs has {name}, which is not a setting; leave it out")
            if name not in _variables(self._source):
                raise SessionError(
                    f"chat_template_kwargs has {name}, which the tokenizer's chat template does not read; leave it out"
                )

    @property
    def _source(self) -> str:
        return self.tokenizer.get_chat_template(tools=self._tools)

    @property
    def _tools(self) -> Any:
        return [*self.tools] or None

    def messages(self, tokens: Tokens) -> list[Message]:
        """Messages as the template takes them; content that is None or missing becomes an empty text."""
        self._check()
        messages: list[Message] = []
        for i, message in enumerate(tokens):
            calls = message.get("tool_calls") if isinstance(message, Mapping) else None
            if not isinstance(message, Mapping) or "role" not in message or not (calls or "content" in message):
                raise SessionError(
                    f"message {i} is {message!r:.60}; a message is a mapping with role and content, or tool_calls"
                )
            if calls and "tool_calls" not in self._source:
                raise SessionError(
                    f"message {i} has tool_calls, which the tokenizer's chat template does not read; "
                    "use a template that does, or write them into its content"
                )
            messages.append({**message, "content": self._content(i, message.get("content"))})
        return messages

    def _content(self, number: int, content: object) -> object:
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
            raise SessionError(
                f"message {number}: content is {content!r:.60}; it takes text, None, or parts such as "
                "{'type': 'text', 'text': ...}"
            )
        if self.keeps_parts:
            return [*content]
        texts = [part.get("text") if part.get("type") == "text" else None for part in content]
        for part, text in zip(content, texts, strict=True):
            if not isinstance(text, str):
                raise SessionError(
                    f"message {number}: a part is {part!r:.60}; the model takes text only, so its parts are "
                    "{'type': 'text', 'text': ...}"
                )
        return "".join(map(str, texts))

    @property
    def special_tokens(self) -> set[str]:
        """The texts of the tokenizer's special tokens."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        return {*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)}

    def takes_system(self) -> bool:
        """Whether a system message before a user's is written; some templates refuse it, some leave it out."""
        system, user = {"role": "system", "content": _REPLY}, {"role": "user", "content": "?"}
        try:
            return _REPLY in self.render([system, user])
        except SessionError:
            return False

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The text of messages, with the generation prompt or without it."""
        conversation: list[dict] = [dict(message) for message in messages]
        arguments: dict[str, Any] = {"tools": self._tools, **self.arguments}
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=generation_prompt, **arguments
            )
        except Exception as error:  # a template may raise anything
            cause = str(error).partition("\n")[0]
            raise SessionError(f"the chat template fails on the messages: {type(error).__name__}: {cause}") from error
        assert isinstance(text, str)
        return text


@cache
def _variables(source: str) -> frozenset[str]:
    """The names of the variables that a chat template reads."""
    try:
        environment = chat_template_utils._compile_jinja_template(source).environment
        return frozenset(meta.find_undeclared_variables(environment.parse(source)))
    except (AttributeError, TemplateError):  # another version of transformers, or a template that does not parse
        return frozenset(re.findall(r"\w+", source))


def is_chat(tokens: Tokens) -> bool:
    """Whether these are messages, and not text or ids."""
    return not isinstance(tokens, str) and len(tokens) > 0 and isinstance(tokens[0], Mapping)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Tokens,
    *,
    limit: int,
    with_images: Encode | None = None,
    template: ChatTemplate | None = None,
) -> list[int]:
    """Token ids of a prompt or an observation; messages, which need a template, come with the generation prompt.

    Of a text with far more than `limit` tokens, the ids of its beginning.
    """
    if template is not None:
        tokens = template.render(template.messages(tokens))
    if isinstance(tokens, str):
        return with_images(tokens) if with_images else _ids(tokenizer, tokens, limit)
    size = len(tokenizer)
    ids = []
    for i, token in enumerate(tokens):
        try:
            ids.append(index(token))  # type: ignore[arg-type]
        except TypeError:
            raise SessionError(f"token {i} is {token!r:.40}; give text, token ids, or messages") from None
    if ids and not 0 <= min(ids) <= max(ids) < size:
        i, wrong = next((i, token) for i, token in enumerate(ids) if not 0 <= token < size)
        raise SessionError(f"token {i} is {wrong}; the tokenizer's {size:,} ids are 0 to {size - 1:,}")
    return ids


def encode_turn(
    template: ChatTemplate,
    history: Sequence[Message],
    new: Tokens,
    *,
    reply: str,
    parsed: Message | None,
    last_id: int,
    limit: int,
    with_images: Encode | None = None,
) -> tuple[list[int], list[Message]]:
    """Ids that follow a reply to `history` when messages come; and the messages that continue it, the reply's first.

    `parsed` is the reply as a message, if it could be parsed; `last_id` ends the context so far.
    """
    messages = template.messages(new)
    after_reply, answered = _after_reply(template, history, reply, parsed, messages)
    ids = with_images(after_reply) if with_images else _ids(template.tokenizer, after_reply, limit)
    return (ids[1:] if ids[:1] == [last_id] else ids), [answered, *messages]


def _after_reply(
    template: ChatTemplate, history: Sequence[Message], reply: str, parsed: Message | None, messages: Sequence[Message]
) -> tuple[str, Message]:
    """What a template writes after a reply when messages follow, and the reply as the message that it was given."""
    refusal = None
    if results := [*takewhile(lambda message: message["role"] == "tool", messages)]:
        called = _call_message(results, reply, parsed, template.tools)
        try:
            if (after_calls := _after_calls(template, history, called, messages)) is not None:
                return after_calls, called
        except SessionError as error:  # some templates write one call per message at most, but several results
            refusal = error
    text: Message = {"role": "assistant", "content": reply}
    try:
        return _after_text(template, history, text, messages), text
    except SessionError as error:
        raise refusal or error from None


def _after_text(
    template: ChatTemplate, history: Sequence[Message], answered: Message, messages: Sequence[Message]
) -> str:
    """What a template writes after a reply of text when messages follow."""
    with_reply = template.render([*history, answered, *messages])
    marker = _marker_for(with_reply)
    with_marker = template.render([*history, {**answered, "content": marker}, *messages])
    _, separator, after_reply = with_marker.rpartition(marker)
    if not separator:
        raise SessionError("the chat template leaves out an assistant's reply; observe text or ids instead of messages")
    if not with_reply.endswith(after_reply):
        raise SessionError(
            "the chat template writes what follows a reply differently after this one, "
            f"{answered['content']!r:.60}, so the tokens cannot be appended; observe text or ids instead of messages, "
            "or open a fresh trajectory"
        )
    return after_reply


def _after_calls(
    template: ChatTemplate, history: Sequence[Message], called: Message, messages: Sequence[Message]
) -> str | None:
    """What a template writes after a reply that calls tools when their results follow, from the end of the turn on.

    None if the template does not write calls, ends a turn without a special token, or if the text depends on the calls.
    """
    with_reply = template.render([*history, called, *messages])
    marker = _marker_for(with_reply)
    calls: Any = called["tool_calls"]
    marked = [{**call, "function": {**call["function"], "arguments": {"reply": marker}}} for call in calls]
    with_marker: list[Message] = [*history, {**called, "tool_calls": marked}]
    _, separator, after_marker = template.render([*with_marker, *messages]).rpartition(marker)
    # The calls are written up to the last special token of their message, such as <|im_end|>; the reply has them.
    rest_of_turn = template.render(with_marker, generation_prompt=False).rpartition(marker)[2]
    end = max((rest_of_turn.rfind(token) for token in template.special_tokens), default=-1)
    if not separator or end < 0 or not after_marker.startswith(rest_of_turn):
        return None
    return after_marker[end:] if with_reply.endswith(after_marker[end:]) else None


def _call_message(
    results: Sequence[Message], reply: str, parsed: Message | None, tools: Sequence[object]
) -> dict[str, object]:
    """A reply as a message with the calls that tool messages answer.

    Some templates refuse a tool message without its call, or write the call's name into it. If neither the tool message
    nor the parsed reply has the name, it is the tool that is named last in the reply.
    """
    parsed_calls: Any = parsed.get("tool_calls") if parsed else None
    known = [call for call in parsed_calls or () if isinstance(call.get("function"), Mapping)]
    named_last = max(map(_tool_name, tools), key=lambda name: (reply.rfind(name), len(name)), default="tool")
    calls = []
    for i, result in enumerate(results):
        call_id = result.get("tool_call_id") or f"call{i:05}"
        at_place = known[i] if i < len(known) else {"function": {}}
        call = next((call for call in known if call.get("id") == call_id), at_place)
        name, arguments = call["function"].get("name"), call["function"].get("arguments")
        function = {
            "name": result.get("name") or (name if isinstance(name, str) and name else named_last),
            "arguments": arguments if isinstance(arguments, Mapping) else {},
        }
        calls.append({"type": "function", "id": call_id, "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _tool_name(tool: object) -> str:
    """The name of a tool, which is a JSON schema or a function."""
    if isinstance(tool, Mapping):
        function = tool.get("function", tool)
        return str(function.get("name", "")) if isinstance(function, Mapping) else ""
    return getattr(tool, "__name__", "")


def _marker_for(text: str) -> str:
    """A text that does not occur in this one."""
    marker = _REPLY
    while marker in text:
        marker += _REPLY
    return marker


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids, without special tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> list[int]:
    # A tokenizer cannot be interrupted, and an agent may observe a whole file: a million characters take seconds. So a
    # long text is encoded from its beginning until it is clear that there are too many tokens, wherever it is cut.
    size = 16 * (limit + 64)
    while size < len(text):
        ids = _encode_text(tokenizer, text[:size])
        if len(ids) > 2 * (limit + 64):
            return ids
        size *= 2
    return _encode_text(tokenizer, text)


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text; a vocabulary of whole symbols, as in a made model, must have all of them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return tokenizer.encode(text, add_special_tokens=False)
    backend.no_truncation()
    backend.no_padding()
    ids = backend.encode(text, add_special_tokens=False).ids  # transformers' encode would make a BatchEncoding of it
    model = backend.model
    if isinstance(model, WordLevel) and backend.token_to_id(model.unk_token) in ids and model.unk_token not in text:
        unknown = "".join(dict.fromkeys(c for c in text if backend.token_to_id(c) is None))
        raise SessionError(
            f"the tokenizer has no token for {unknown!r:.60}; a made model has only those of model.symbols"
        )
    return ids
