"""One context of a session: a prompt, then every token that was generated or observed, in that order.

Ids, log-probs and masks are recorded as they happen, and nothing is re-tokenised. Generated tokens carry loss; observed
ones carry none, and their log-prob is 0. A trajectory that never generated is a row without loss tokens. Where a row
has room left, a generation gets at most that room and ends with "length"; where it has none, it is an error.
"""

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from raggedright.agents.tokens import Message, Tokens, decode, encode, encode_turn, is_chat
from raggedright.agents.values import SessionError, finite
from raggedright.agents.vision import Look, Picture, join_media, pictures_of
from raggedright.rollout.protocol import FinishReason, Generation, Request, Sampling
from raggedright.rollout.sampling import noise_key
from raggedright.store.protocol import NewRow, Tag
from raggedright.tensors.routing import fill_up

if TYPE_CHECKING:
    from raggedright.agents.session import Session

Generate = Callable[[Request], Awaitable[Generation]]


@lru_cache(maxsize=1024)
def _limited(sampling: Sampling, max_tokens: int, texts: tuple[str, ...]) -> Sampling:
    """The settings of one generation; a run has few that differ, and checking them costs as much as a small model."""
    return replace(sampling, max_tokens=max_tokens, stop_texts=(*sampling.stop_texts, *texts))


@lru_cache(maxsize=1024)
def _tags(
    role: str, reward: float | None, finish_reason: str, weight_version: int, metrics: tuple[tuple[str, float], ...]
) -> Mapping[str, Tag]:
    """A row's tags, one object for those that are alike: a run has few that differ."""
    own = {"role": role, "reward": reward, "finish_reason": finish_reason, "weight_version": weight_version}
    return MappingProxyType({**own, **dict(metrics)})


class Reply(NamedTuple):
    """What was generated; the text is that of the ids, without special tokens."""

    ids: list[int]
    text: str
    finish_reason: FinishReason


class Trajectory:
    """One context of a session: a prompt, then generated and observed tokens. `reward` is its own, if it has one."""

    __slots__ = (
        "_chat", "_experts", "_finish_reason", "_generating", "_ids", "_log_probs", "_mask", "_media",
        "_prompt_tokens", "_session", "_turn_start", "_weight_version", "number", "reward", "role",
    )  # fmt: skip

    def __init__(
        self, session: "Session", number: int, role: str, prompt: Tokens, images: Sequence[Picture] = ()
    ) -> None:
        self._session, self.number, self.role = session, number, role
        self.reward: float | None = None
        self._ids: list[int] = []
        self._media: list[Mapping[str, Tensor]] = []
        self._ids = self._encode(prompt, images)
        if not self._ids:
            raise SessionError(f"row {self.name} has an empty prompt; a trajectory begins with a token or more")
        self._chat: list[Message] | None = [dict(message) for message in prompt] if is_chat(prompt) else None  # type: ignore[arg-type]
        self._prompt_tokens = self._turn_start = len(self._ids)
        self._mask: list[int] = []
        self._log_probs: list[float] = []
        self._finish_reason = "none"
        self._weight_version = -1
        self._generating = False
        self._experts: Tensor | None = None  # of the positions so far that were routed

    @property
    def name(self) -> str:
        """What messages call it: prompt/session/trajectory."""
        return f"{self._session.name}/{self.number}"

    @property
    def ids(self) -> list[int]:
        """A copy of the context so far."""
        return [*self._ids]

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        """Go on from the context so far, up to `max_tokens`, the end of the turn, a text of `stop`, or a full row."""
        self._check_idle()
        sampling = self._sampling(max_tokens, stop)
        request = Request(self.ids, sampling, self._noise(), join_media(self._media) if self._media else None)
        self._generating = True
        try:
            ids, log_probs, reason, version, experts = await self._session._generate(request)
        finally:
            self._generating = False
        self._session.check_open()
        self._ids += ids
        self._mask += [1] * len(ids)
        self._log_probs += log_probs
        self._finish_reason = reason
        if experts is not None:
            self._keep_experts(torch.from_numpy(experts))
        self._weight_version = version if self._weight_version < 0 else min(version, self._weight_version)
        return Reply([*ids], decode(self._session.tokenizer, ids), reason)

    def observe(self, tokens: Tokens, *, images: Sequence[Picture] = ()) -> None:
        """Add tokens that carry no loss; messages go on the chat after a reply, with the next generation prompt."""
        self._check_idle()
        ids = self._encode_turn(tokens, images) if is_chat(tokens) else self._encode(tokens, images)
        self._ids += ids
        self._mask += [0] * len(ids)
        self._log_probs += [0.0] * len(ids)
        if is_chat(tokens):
            self._turn_start = len(self._ids)

    def row(self, metrics: tuple[tuple[str, float], ...]) -> NewRow:
        """What was recorded, as the store takes it; for the runner."""
        reward = None if self.reward is None else finite(self.reward)
        if self.reward is not None and reward is None:
            raise SessionError(f"row {self.name}: reward is {self.reward!r:.60}; it takes a finite number or None")
        fields: dict[str, object] = {
            "input_ids": array("q", self._ids),
            "response_mask": array("q", self._mask),
            "rollout_log_probs": array("f", self._log_probs),
        }
        if self._experts is not None:
            fields["routed_experts"] = fill_up(self._experts, len(self._ids))
        if (vision := self._session._vision) is not None:
            fields |= vision.fields(self._ids, join_media(self._media))
        return NewRow(
            prompt_tokens=self._prompt_tokens,
            response_tokens=len(self._mask),
            loss_tokens=sum(self._mask),
            fields=fields,
            tags=_tags(self.role, reward, self._finish_reason, self._weight_version, metrics),
        )

    def _keep_experts(self, experts: Tensor) -> None:
        """A context is read again for every generation; what a token was sampled with is its first routing."""
        known = self._experts
        self._experts = experts if known is None else torch.cat((known, experts[len(known) :]))

    def _check_idle(self) -> None:
        self._session.check_open()
        if self._generating:
            raise SessionError(f"row {self.name} is generating; await it first, or open a trajectory for each context")

    def _noise(self) -> bytes:
        round, prompt, session, attempt = self._session.key
        seed = self._session._settings.seed
        return noise_key(
            seed=seed, round=round, prompt=prompt, session=session, attempt=attempt, trajectory=self.number
        )

    def _sampling(self, max_tokens: int | None, stop: Sequence[str]) -> Sampling:
        plain = self._session._settings.sampling
        most = plain.max_tokens if max_tokens is None else max_tokens
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise SessionError(f"row {self.name}: max_tokens is {most!r:.60}; it takes a whole number from 1")
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        if texts and not all(isinstance(text, str) and text for text in texts):
            raise SessionError(f"row {self.name}: stop is {stop!r:.60}; it takes texts of one character or more")
        room = self._room
        if room < 1:
            raise self._too_long(f"has {len(self._ids):,} tokens and no room to generate")
        if most == plain.max_tokens <= room and not texts:
            return plain
        return _limited(plain, min(most, room), texts)

    def _encode(self, tokens: Tokens, images: Sequence[Picture]) -> list[int]:
        if not isinstance(tokens, str) and not is_chat(tokens):
            self._check_length(len(tokens))
        try:
            look = self._look(tokens, images)
            ids = encode(self._session.tokenizer, tokens, most=self._room, with_images=look)
            self._check_images(ids, look)
        except SessionError as error:
            raise SessionError(f"row {self.name}: {error}") from None
        self._check_length(len(ids))
        if look is not None:
            self._media.append(look.media)
        return ids

    def _encode_turn(self, tokens: Tokens, images: Sequence[Picture]) -> list[int]:
        if self._chat is None:
            raise SessionError(
                f"row {self.name}: messages are observed and its prompt was text or ids; open it with messages, too"
            )
        if len(self._ids) == self._turn_start:
            raise SessionError(
                f"row {self.name}: messages are observed before a reply; give them all at once, then generate"
            )
        tokenizer = self._session.tokenizer
        reply = {"role": "assistant", "content": decode(tokenizer, self._ids[self._turn_start :])}
        try:
            look = self._look(tokens, images)
            ids, messages = encode_turn(
                tokenizer, self._chat, tokens, last_id=self._ids[-1], most=self._room, with_images=look
            )
            self._check_images(ids, look)
        except SessionError as error:
            raise SessionError(f"row {self.name}: {error}") from None
        self._check_length(len(ids))
        self._media += [look.media] if look else []
        self._chat += [reply, *messages]
        return ids

    def _look(self, tokens: Tokens, images: Sequence[Picture]) -> Look | None:
        """How a text with images is encoded; None where there are none."""
        if isinstance(tokens, str) and not images:
            return None
        pictures = pictures_of(tokens, images)
        if not pictures:
            return None
        if self._session._vision is None:
            raise SessionError(f"{len(pictures):,} images are given and the model reads none; take one that does")
        if not isinstance(tokens, str) and not is_chat(tokens):
            raise SessionError("images are given beside token ids; give them with text that has their placeholders")
        return self._session._vision.look(pictures)

    def _check_images(self, ids: list[int], look: Look | None) -> None:
        if look is None and self._session._vision is not None:
            self._session._vision.check_text(ids)

    @property
    def _room(self) -> int:
        return self._session._most_tokens - len(self._ids)

    def _check_length(self, new: int) -> None:
        if new > self._room:
            raise self._too_long(f"gets at least {len(self._ids) + new:,} tokens")

    def _too_long(self, what: str) -> SessionError:
        row, context = self._session._settings.max_row_tokens, self._session._context_tokens
        limit = f"rollout.max_row_tokens (by default train.micro_batch_tokens) is {row:,}; raise it"
        if context <= row:
            limit = f"the model's context has {context:,}; take a model with a longer one"
        return SessionError(f"row {self.name} {what}, and {limit}, or open a fresh trajectory")
