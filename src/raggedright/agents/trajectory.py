"""One context of a session: a prompt, then every token that was generated or observed, in that order.

Ids, log-probs and masks are recorded as they happen, and nothing is re-tokenised. Generated tokens carry loss; observed
ones carry none, and their log-prob is 0. A trajectory that never generated is a row without loss tokens. A generation
that fills the row ends with "length"; in a row that is full it is an error.

A token's log-prob is trained at the temperature that it was sampled with. If a generation has another temperature than
the run, the row records the temperature of every token; greedy tokens (temperature 0) carry no loss.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.agents.tokens import ChatTemplate, Message, Tokens, decode, encode, encode_turn, is_chat
from raggedright.agents.vision import MEDIA, ImageTextEncoder, Picture, pictures_of
from raggedright.rollout.engine import MIN_TEMPERATURE, FinishReason, Generation, Request, Sampling, join_media
from raggedright.rollout.sampling import noise_key
from raggedright.sessions import METADATA, TOKEN_FIELDS, SessionError, is_text
from raggedright.sessions import Trajectory as RecordedTrajectory
from raggedright.tensors.forward import TEMPERATURES
from raggedright.tensors.routing import fill_up

if TYPE_CHECKING:
    from raggedright.agents.agent_session import Session

Generate = Callable[[Request], Awaitable[Generation]]

_RECORDED_FIELDS = (*TOKEN_FIELDS, TEMPERATURES, "position_ids", "routed_experts", METADATA)


def as_finite_float(value: object) -> float | None:
    """A finite number as a float; None for anything else."""
    if not hasattr(value, "__float__"):  # text has none
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # a tensor of several values, a huge int, whatever an agent's own type raises
        return None
    return number if math.isfinite(number) else None


class Reply(NamedTuple):
    """What was generated; the text is that of the ids, without special tokens.

    `message` is the reply as a chat message (content, tool_calls, ...), where the tokenizer has a response template to
    parse it with; None where it has none, or where the reply cannot be parsed.
    """

    ids: list[int]
    text: str
    finish_reason: FinishReason
    message: Message | None = None


class Trajectory:
    """One context of a session: a prompt, then generated and observed tokens. `reward` is its own, if it has one.

    - `number`, `role` and `reward` are attributes; an agent may set `reward`.
    """

    __slots__ = (
        "_attached", "_chat", "_experts", "_finish_reason", "_generating", "_ids", "_log_probs", "_mask", "_media",
        "_num_cut", "_num_generations", "_prompt_tokens", "_session", "_temperatures", "_template", "_turn_start",
        "_weight_version", "noise", "number", "reward", "role",
    )  # fmt: skip

    def __init__(
        self,
        session: "Session",
        number: int,
        role: str,
        prompt: Tokens,
        images: Sequence[Picture] = (),
        tools: Sequence[object] = (),
        chat_template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._session, self.number, self.role = session, number, role
        self.reward: float | None = None
        self.noise = b""  # the key of its noise in the engine, once it has generated
        self._ids: list[int] = []
        self._chat: list[Message] = []
        self._media: list[Mapping[str, Tensor]] = []
        self._template = self._template_of(prompt, tools, chat_template_kwargs)
        self._ids = self._encode(prompt, images)
        if not self._ids:
            raise SessionError(f"row {self.name} has an empty prompt; a trajectory begins with a token or more")
        if self._template is not None:
            self._chat = self._template.messages(prompt)
        self._prompt_tokens = self._turn_start = len(self._ids)
        self._mask: list[int] = []
        self._attached: dict[str, NDArray] = {}
        self._log_probs: list[float] = []
        self._temperatures: list[float] | None = None  # of each response token, where a generation had its own
        self._finish_reason = "none"
        self._num_generations = self._num_cut = 0
        self._weight_version = -1
        self._generating = False
        self._experts: Tensor | None = None  # of the positions so far that were routed

    @property
    def name(self) -> str:
        """Its name in messages: prompt/session/trajectory."""
        return f"{self._session.name}/{self.number}"

    @property
    def ids(self) -> list[int]:
        """A copy of the context so far."""
        return [*self._ids]

    async def generate(
        self, *, max_tokens: int | None = None, stop: Sequence[str] = (), temperature: float | None = None
    ) -> Reply:
        """Continue the context so far, up to `max_tokens`, the end of the turn, a text of `stop`, or a full row.

        The default of `temperature` is rollout.temperature; at 0 the tokens are greedy and carry no loss.
        """
        self._check_idle()
        sampling = self._sampling(max_tokens, stop, temperature)
        request = Request(self.ids, sampling, self._noise_key(), join_media(self._media) if self._media else None)
        self._generating = True
        try:
            ids, log_probs, reason, version, experts = await self._session._generate(request)
        finally:
            self._generating = False
        self._session.check_open()
        message = self._parsed(self._ids, ids)
        self._ids += ids
        self._keep_temperature(sampling.temperature, len(ids))
        self._mask += [self._carries_loss(sampling)] * len(ids)
        self._log_probs += log_probs
        self._finish_reason = reason
        self._num_generations += 1
        self._num_cut += reason == "length"
        if experts is not None:
            self._keep_experts(torch.from_numpy(experts))
        self._weight_version = version if self._weight_version < 0 else min(version, self._weight_version)
        return Reply([*ids], decode(self._session.tokenizer, ids), reason, message)

    def observe(self, tokens: Tokens, *, images: Sequence[Picture] = ()) -> None:
        """Add tokens that carry no loss; messages continue the chat after a reply, with the next generation prompt."""
        self._check_idle()
        ids = self._encode(tokens, images, after_reply=is_chat(tokens))
        self._ids += ids
        self._keep_temperature(self._session._settings.sampling.temperature, len(ids))
        self._mask += [0] * len(ids)
        self._log_probs += [0.0] * len(ids)
        if is_chat(tokens):
            self._turn_start = len(self._ids)

    def count_tokens(self, tokens: Tokens, *, images: Sequence[Picture] = ()) -> int:
        """How many tokens `observe` would add; also if they do not fit."""
        self._check_idle()
        return len(self._encoded(tokens, images, after_reply=is_chat(tokens))[0])

    def attach(self, **fields: Sequence[float]) -> None:
        """Record fields with one number per response token, such as teacher_log_probs; the loss gets them by name."""
        self._check_idle()
        for name, values in fields.items():
            if name in _RECORDED_FIELDS or name.startswith(MEDIA):
                raise SessionError(f"row {self.name}: {name} is a field that the row itself records; use another name")
            try:
                array = np.asarray(values, dtype=np.float32)
            except (TypeError, ValueError):
                raise SessionError(f"row {self.name}: {name} is {values!r:.60}; it takes numbers") from None
            if array.shape != (len(self._mask),):
                raise SessionError(
                    f"row {self.name}: {name} has shape {array.shape} and the response {len(self._mask):,} tokens; "
                    "give one number per response token"
                )
            self._attached[name] = array

    def record(self) -> RecordedTrajectory:
        """The recorded trajectory; for the runner."""
        reward = None if self.reward is None else as_finite_float(self.reward)
        if self.reward is not None and reward is None:
            raise SessionError(f"row {self.name}: reward is {self.reward!r:.60}; it takes a finite number or None")
        return RecordedTrajectory(
            input_ids=np.array(self._ids, dtype=np.int64),
            response_mask=np.array(self._mask, dtype=np.int64),
            rollout_log_probs=np.array(self._log_probs, dtype=np.float32),
            role=self.role,
            reward=reward,
            finish_reason=self._finish_reason,
            generations=self._num_generations,
            cut_generations=self._num_cut,
            weight_version=self._weight_version,
            extra=self._extra(),
        )

    def _extra(self) -> dict[str, NDArray]:
        """Fields that not every row has; tokens after the last one that `attach` saw have the number 0."""
        size = len(self._mask)
        extra = {name: np.pad(values, (0, size - len(values))) for name, values in self._attached.items()}
        if self._temperatures is not None:
            extra[TEMPERATURES] = np.array(self._temperatures)
        if self._experts is not None:
            extra["routed_experts"] = fill_up(self._experts, len(self._ids)).numpy()
        if (vision := self._session._vision) is not None:
            extra |= vision.fields(self._ids, join_media(self._media))
        return extra

    def _keep_experts(self, experts: Tensor) -> None:
        """A context is read again for every generation; the first routing of a token is the one it was sampled with."""
        known = self._experts
        self._experts = experts if known is None else torch.cat((known, experts[len(known) :]))

    def _carries_loss(self, sampling: Sampling) -> int:
        """Whether generated tokens do: all except greedy ones in a run that samples."""
        return int(sampling.temperature > 0 or self._session._settings.sampling.temperature == 0)

    def _keep_temperature(self, temperature: float, count: int) -> None:
        """Record it for the next response tokens; not in a row whose tokens all have the run's temperature."""
        plain = self._session._settings.sampling.temperature
        if self._temperatures is None and temperature not in (0, plain):
            self._temperatures = [plain] * len(self._mask)
        if self._temperatures is not None:
            self._temperatures += [temperature or plain] * count

    def _parsed(self, context: Sequence[int], ids: Sequence[int]) -> Message | None:
        """A reply to a context as a message, by the tokenizer's response template."""
        tokenizer = self._session.tokenizer
        if self._template is None or getattr(tokenizer, "response_template", None) is None:
            return None
        try:
            return tokenizer.parse_response([*ids], prefix=[*context], tools=[*self._template.tools] or None)  # type: ignore[arg-type]
        except (ValueError, KeyError, TypeError):  # a model may write anything
            return None

    def _check_idle(self) -> None:
        self._session.check_open()
        if self._generating:
            raise SessionError(f"row {self.name} is generating; await it first, or open a trajectory for each context")

    def _noise_key(self) -> bytes:
        if not self.noise:
            round, prompt, session, attempt = self._session.key
            seed = self._session._settings.seed
            self.noise = noise_key(
                seed=seed, round=round, prompt=prompt, session=session, attempt=attempt, trajectory=self.number
            )
        return self.noise

    def _sampling(self, max_tokens: int | None, stop: Sequence[str], temperature: float | None) -> Sampling:
        plain = self._session._settings.sampling
        limit = plain.max_tokens if max_tokens is None else max_tokens
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise SessionError(f"row {self.name}: max_tokens is {limit!r:.60}; it takes an integer from 1")
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        if texts and not all(text and is_text(text) for text in texts):
            raise SessionError(f"row {self.name}: stop is {stop!r:.60}; it takes texts of one character or more")
        if temperature is None or plain.temperature == 0:  # an evaluation is greedy throughout
            temperature = plain.temperature
        else:
            number = None if isinstance(temperature, bool) else as_finite_float(temperature)
            if number is None or (number != 0 and number < MIN_TEMPERATURE):
                raise SessionError(
                    f"row {self.name}: temperature is {temperature!r:.60}; it takes 0 (greedy) or a number from "
                    f"{MIN_TEMPERATURE:g} on"
                )
            temperature = number
        room = self._room
        if room < 1:
            raise self._too_long(f"has {len(self._ids):,} tokens and no room to generate")
        limit = min(limit, room)
        if limit == plain.max_tokens and not texts and temperature == plain.temperature:
            return plain
        stop_texts = (*plain.stop_texts, *texts)
        return replace(plain, max_tokens=limit, stop_texts=stop_texts, temperature=temperature)

    def _template_of(
        self, prompt: Tokens, tools: Sequence[object], arguments: Mapping[str, object]
    ) -> ChatTemplate | None:
        """How messages become text; None for a prompt of text or ids."""
        if is_chat(prompt):
            session = self._session
            keeps_parts = session._vision is not None
            return ChatTemplate(tokenizer=session.tokenizer, tools=tools, arguments=arguments, keeps_parts=keeps_parts)
        if tools or arguments:
            raise SessionError(
                f"row {self.name}: tools or chat_template_kwargs are given and the prompt is not messages; "
                "they are for the tokenizer's chat template"
            )
        return None

    def _encode(self, tokens: Tokens, images: Sequence[Picture], *, after_reply: bool = False) -> list[int]:
        """The ids of a prompt or an observation; messages after a reply also continue the chat."""
        if not isinstance(tokens, str) and not is_chat(tokens):
            self._check_length(len(tokens))
        ids, messages, encoder = self._encoded(tokens, images, after_reply=after_reply)
        self._check_length(len(ids))
        self._chat += messages
        self._media += [encoder.media] if encoder else []
        return ids

    def _encoded(
        self, tokens: Tokens, images: Sequence[Picture], *, after_reply: bool
    ) -> tuple[list[int], list[Message], ImageTextEncoder | None]:
        """Ids, the messages that continue the chat, and how images were encoded; changes nothing."""
        messages: list[Message] = []
        try:
            encoder = self._image_encoder(tokens, images)
            if after_reply:
                ids, messages = self._encode_turn(tokens, encoder)
            else:
                template = self._template if is_chat(tokens) else None
                ids = encode(self._session.tokenizer, tokens, limit=self._room, with_images=encoder, template=template)
            if encoder is None and self._session._vision is not None:
                self._session._vision.check_text(ids)
        except SessionError as error:
            raise SessionError(f"row {self.name}: {error}") from None
        return ids, messages, encoder

    def _encode_turn(self, tokens: Tokens, encoder: ImageTextEncoder | None) -> tuple[list[int], list[Message]]:
        """The ids that follow a reply when messages are observed; the reply and these messages."""
        if self._template is None:
            raise SessionError("messages are observed and its prompt was text or ids; open it with messages, too")
        if len(self._ids) == self._turn_start:
            raise SessionError("messages are observed before a reply; give them all at once, then generate")
        context, reply = self._ids[: self._turn_start], self._ids[self._turn_start :]
        return encode_turn(
            self._template,
            self._chat,
            tokens,
            reply=decode(self._session.tokenizer, reply),
            parsed=self._parsed(context, reply),
            last_id=reply[-1],
            limit=self._room,
            with_images=encoder,
        )

    def _image_encoder(self, tokens: Tokens, images: Sequence[Picture]) -> ImageTextEncoder | None:
        """How a text with images is encoded; None where there are none."""
        if isinstance(tokens, str) and not images:
            return None
        pictures = pictures_of(tokens, images)
        if not pictures:
            return None
        if self._session._vision is None:
            raise SessionError(
                f"{len(pictures):,} images are given and the model takes none; use a vision-language model"
            )
        if not isinstance(tokens, str) and not is_chat(tokens):
            raise SessionError("images are given with token ids; give them with text that has their placeholders")
        return self._session._vision.encoder_for(pictures)

    @property
    def _room(self) -> int:
        return self._session._max_row_tokens - len(self._ids)

    def _check_length(self, new: int) -> None:
        if new > self._room:
            raise self._too_long(f"gets at least {len(self._ids) + new:,} tokens")

    def _too_long(self, what: str) -> SessionError:
        row, context = self._session._settings.max_row_tokens, self._session._context_tokens
        limit = f"rollout.max_row_tokens (by default train.micro_batch_tokens) is {row:,}; raise it"
        if context <= row:
            limit = f"the model's context has {context:,}; use a model with a longer one"
        return SessionError(f"row {self.name} {what}, and {limit}, or open a fresh trajectory")
