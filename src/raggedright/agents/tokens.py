"""Text, token ids and chat messages as token ids, for a prompt and for what follows a reply.

A chat's first context is its template with the generation prompt. What follows a reply is cut out of the template: the
conversation is rendered with a marker in place of the reply, and what stands behind the marker is encoded. So the
tokens that were generated stay as they are, whatever the template does to earlier turns.

The surprise: that cut begins with the token that ends a turn. A model that has generated it already must not see it
twice; one that was stopped by its length has not, and gets it as an observation.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import index

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase

from raggedright.agents.values import SessionError

Message = Mapping[str, object]
Tokens = str | Sequence[int] | Sequence[Message]

Encode = Callable[[str], list[int]]
"""A text to ids in another way than the tokenizer's own: with the images in it."""

_SHORT = 8192  # characters of a text that is worth remembering
_REPLY = "\ue000reply\ue000"  # characters for private use: no whitespace that a template would strip


def is_chat(tokens: Tokens) -> bool:
    """Whether these are messages, not text or ids."""
    return not isinstance(tokens, str) and len(tokens) > 0 and isinstance(tokens[0], Mapping)


def encode(
    tokenizer: PreTrainedTokenizerBase, tokens: Tokens, *, most: int, with_images: Encode | None = None
) -> list[int]:
    """Token ids of a prompt or an observation; messages come with the generation prompt.

    Of a text with far more than `most` tokens, those of its beginning.
    """
    if isinstance(tokens, str) or is_chat(tokens):
        text = tokens if isinstance(tokens, str) else _render(tokenizer, _messages(tokens))
        return with_images(text) if with_images else _ids(tokenizer, text, most)
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
    tokenizer: PreTrainedTokenizerBase,
    history: Sequence[Message],
    new: Tokens,
    *,
    last_id: int,
    most: int,
    with_images: Encode | None = None,
) -> tuple[list[int], list[Message]]:
    """Ids that follow a reply to `history` when messages come, and these; `last_id` ends the context so far."""
    messages = _messages(new)
    text = _render(tokenizer, [*history, {"role": "assistant", "content": _REPLY}, *messages])
    _, found, behind = text.rpartition(_REPLY)
    if not found:
        raise SessionError("the chat template leaves out an assistant's reply; observe text or ids instead of messages")
    ids = with_images(behind) if with_images else _ids(tokenizer, behind, most)
    return (ids[1:] if ids[:1] == [last_id] else ids), messages


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids, without special tokens."""
    if (backend := _backend(tokenizer)) is not None:
        return backend.decode(list(ids), skip_special_tokens=True)
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> list[int]:
    # No tokenizer can be interrupted, and an agent may observe a whole file: a million characters take seconds. So a
    # long text is encoded from its beginning until it is clear that there are too many tokens, wherever it is cut.
    size = 16 * (most + 64)
    while size < len(text):
        ids = _encode(tokenizer, text[:size])
        if len(ids) > 2 * (most + 64):
            return ids
        size *= 2
    return _encode(tokenizer, text)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if (backend := _backend(tokenizer)) is not None:
        if len(text) <= _SHORT:
            return [*_encode_short(backend, backend.get_vocab_size(), text)]
        return _encode_known(backend, text)
    return tokenizer.encode(text, add_special_tokens=False)


@lru_cache(maxsize=4096)
def _encode_short(backend: Tokenizer, _vocabulary: int, text: str) -> tuple[int, ...]:
    """The ids of a text that may come again: sessions of a prompt begin alike. Added tokens change the vocabulary."""
    return tuple(_encode_known(backend, text))


def _encode_known(backend: Tokenizer, text: str) -> list[int]:
    """The ids of a text; a vocabulary of whole symbols, as a made model has, must have all of them."""
    ids, model = backend.encode(text, add_special_tokens=False).ids, backend.model
    if isinstance(model, WordLevel) and backend.token_to_id(model.unk_token) in ids and model.unk_token not in text:
        unknown = "".join(dict.fromkeys(c for c in text if backend.token_to_id(c) is None))
        raise SessionError(
            f"the tokenizer has no token for {unknown!r:.60}; a made model knows its model.symbols alone"
        )
    return ids


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The tokenizer inside, where it says the same: transformers' own takes ten times as long for short texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = isinstance(backend, Tokenizer) and backend.truncation is None and backend.padding is None
    return backend if plain else None


def _messages(tokens: Tokens) -> list[Message]:
    messages = []
    for i, message in enumerate(tokens):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise SessionError(f"message {i} is {message!r:.60}; a message is a mapping with role and content")
        messages.append(dict(message))
    return messages


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    if not tokenizer.chat_template:
        raise SessionError("the tokenizer has no chat template; give text or token ids, or set one in its folder")
    conversation: list[dict] = [dict(message) for message in messages]
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text
