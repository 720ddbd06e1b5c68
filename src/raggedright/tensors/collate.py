"""Rows of a micro-batch to model inputs, and their response tokens to flat vectors.

Two layouts, one meaning. Packed: one sequence of all rows, positions restarting at each, no attention mask (the model
derives exact block attention from the positions). Padded: one rectangle, rows on the right filled up and masked.
Whatever the layout, every per-token vector is flat: the response tokens of row 0, then those of row 1, and so on, so
that losses never see a rectangle. Nothing else reaches a model than what `Collator` makes and `forward` passes on.

The surprises: a row shorter than `min_row_tokens` is extended behind its end, where causal attention makes it
harmless; a micro-batch without images in a batch with images takes along a filler row with one, of weight zero, so that
sharded ranks all run the vision tower; a micro-batch without a row (align lcm) takes the filler row alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints
from raggedright.errors import RowsError
from raggedright.plan.layout import Collate
from raggedright.rows import Rows
from raggedright.tensors.losses import TokenWeights
from raggedright.tensors.routing import NOT_ROUTED
from raggedright.tensors.schema import Fields


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass needs. N counts response tokens, padding rows' included."""

    inputs: Mapping[str, Tensor]  # for the model: input_ids, position_ids, attention_mask if padded, media
    logit_index: Tensor  # [N] flat place in input_ids whose output predicts response token n
    labels: Tensor  # [N] the response tokens
    weights: TokenWeights
    fields: Mapping[str, Tensor]  # per response token, [N]
    routing: Tensor | None  # recorded experts, as input_ids + [layers, topk]; -1 where none was recorded
    response_tokens: tuple[int, ...]  # of each row
    real: Tensor | None = None  # with routing: where real rows' tokens are, as input_ids

    @property
    def padded(self) -> bool:
        """Whether the rows form a rectangle rather than a pack."""
        return "attention_mask" in self.inputs

    def per_row(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A flat vector over response tokens, cut into rows again."""
        return torch.split(flat, list(self.response_tokens))

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same on another device."""
        moved = {name: value.to(device) for name, value in self.inputs.items()}
        return replace(
            self,
            inputs=moved,
            logit_index=self.logit_index.to(device),
            labels=self.labels.to(device),
            weights=self.weights.to(device),
            fields={name: value.to(device) for name, value in self.fields.items()},
            routing=None if self.routing is None else self.routing.to(device),
            real=None if self.real is None else self.real.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """How the rows of a run become model inputs.

    - `token_id` fills rows up; it is never attended to by a token that counts.
    - `mrope`: position_ids have axes (time, height, width), as the vision-language models want them.
    - `image_filler`: a row with a small image, for micro-batches without one; needed where a batch has media.
    """

    how: Collate
    token_id: int
    min_row_tokens: int = 2
    mrope: bool = False
    image_filler: Fields | None = None

    def __call__(
        self,
        rows: Rows,
        fields: Sequence[Fields],
        *,
        weight: np.ndarray,
        step_loss_tokens: int,
        names: Sequence[str] = (),
    ) -> MicroBatch:
        """Collate rows and their tensors; `names` are the per-response-token fields to take along.

        `weight` is the plan's per-token weight of each row, `step_loss_tokens` the loss tokens of the whole step.
        """
        fillers = self._fillers(fields)
        ids = [*_sequences(rows, fields), *(_tensor(row, "input_ids") for row in fillers)]
        flat, sizes = torch.cat(ids).long(), _sizes(ids)
        lengths = np.maximum(sizes, self.min_row_tokens)
        inputs = self._inputs(flat, sizes, lengths, [*fields, *fillers])
        prompt, response = rows.prompt_tokens, rows.response_tokens
        if len(rows) and (prompt == 0).any():
            i = int(np.argmin(prompt))
            raise RowsError(f"row {rows.key[i]}: prompt_tokens is 0, so that nothing predicts its first response token")
        first = self._starts(lengths)[: len(rows)] + prompt - 1
        within = _within(response)
        last = np.cumsum(sizes)[: len(rows)] - response  # where each row's response begins among all ids
        mean = np.where(rows.is_padding, 0.0, 1 / max(step_loss_tokens, 1))
        routing, real = self._routing(rows, fields, lengths, inputs["input_ids"].shape)
        return MicroBatch(
            inputs=inputs,
            logit_index=torch.from_numpy(np.repeat(first, response) + within),
            labels=flat[torch.from_numpy(np.repeat(last, response) + within)],
            weights=TokenWeights.from_masks(_per_row(rows, fields, _mask_name(fields)), loss=weight, mean=mean),
            fields={name: _flat(_per_row(rows, fields, name)) for name in names},
            routing=routing,
            response_tokens=tuple(response.tolist()),
            real=real,
        )

    def _fillers(self, fields: Sequence[Fields]) -> list[Fields]:
        if self.image_filler is None:
            return [] if fields else [{"input_ids": torch.full((self.min_row_tokens,), self.token_id)}]
        return [] if any(row.get("multi_modal_inputs") for row in fields) else [self.image_filler]

    def _starts(self, lengths: Ints) -> Ints:
        """Where each row begins in the flattened input_ids."""
        if self.how == "padded":
            return np.arange(len(lengths)) * lengths.max()
        return np.cumsum(lengths) - lengths

    def _inputs(self, flat: Tensor, sizes: Ints, lengths: Ints, fields: Sequence[Fields]) -> dict[str, Tensor]:
        longest = int(lengths.max())
        shape = (len(lengths), longest) if self.how == "padded" else (1, int(lengths.sum()))
        ids = torch.full(shape, self.token_id)
        ids.view(-1)[torch.from_numpy(np.repeat(self._starts(lengths), sizes) + _within(sizes))] = flat
        inputs = {"input_ids": ids}
        if self.how == "padded":
            inputs["attention_mask"] = (torch.arange(longest) < torch.from_numpy(lengths)[:, None]).long()
        if self.mrope or any(_has_axes(row) for row in fields):
            inputs["position_ids"] = self._axes(sizes.tolist(), fields, lengths.tolist())
        elif self.how == "padded":
            inputs["position_ids"] = torch.arange(longest) * inputs["attention_mask"]
        else:
            inputs["position_ids"] = torch.from_numpy(_within(lengths))[None]
        return inputs | _media(fields)

    def _axes(self, sizes: list[int], fields: Sequence[Fields], lengths: list[int]) -> Tensor:
        """Positions with axes, [axes, rows, tokens]."""
        positions = [self._positions(size, row, n) for size, row, n in zip(sizes, fields, lengths, strict=True)]
        if self.how == "packed":
            return torch.cat(positions, dim=-1).unsqueeze(-2)
        longest = max(lengths)
        return torch.stack([torch.nn.functional.pad(row, (0, longest - row.shape[-1])) for row in positions], dim=-2)

    def _positions(self, size: int, fields: Fields, length: int) -> Tensor:
        """[length], or [4, length] with the text's own positions first where the model has three axes more."""
        text = torch.arange(length)
        given = fields.get("position_ids")
        if not isinstance(given, Tensor) or given.dim() == 1:
            return text.expand(4, -1) if self.mrope else text
        more = length - size  # a row filled up goes on counting
        axes = torch.cat((given, given[:, -1:] + torch.arange(1, more + 1)), dim=-1)[-3:]
        return torch.cat((text[None], axes))

    def _routing(
        self, rows: Rows, fields: Sequence[Fields], lengths: Ints, shape: torch.Size
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Recorded experts, and where real rows' tokens are."""
        given = [
            (i, experts) for i, row in enumerate(fields) if isinstance(experts := row.get("routed_experts"), Tensor)
        ]
        if not given:
            return None, None
        starts, at = self._starts(lengths), np.array([i for i, _ in given])
        sizes = _sizes([experts for _, experts in given])
        place = torch.from_numpy(np.repeat(starts[at], sizes) + _within(sizes))
        experts = torch.cat([experts for _, experts in given])
        routing = torch.full((shape.numel(), *experts.shape[1:]), NOT_ROUTED, dtype=torch.long)
        routing[place] = experts.long()
        real = torch.zeros(shape.numel(), dtype=torch.bool)
        real[place] = torch.from_numpy(np.repeat(~rows.is_padding[at], sizes))
        return routing.view(*shape, *experts.shape[1:]), real.view(shape)


def _sequences(rows: Rows, fields: Sequence[Fields]) -> list[Tensor]:
    """Each row's token ids: `input_ids`, or `prompts` and `responses`."""
    ids = [_sequence(rows, i, row) for i, row in enumerate(fields)]
    wrong = np.flatnonzero(_sizes(ids) != rows.tokens)
    if len(wrong):
        i = int(wrong[0])
        raise RowsError(
            f"row {rows.key[i]}: input_ids has {len(ids[i])} tokens and the row {rows.tokens[i]}; they must agree"
        )
    return ids


def _sequence(rows: Rows, i: int, fields: Fields) -> Tensor:
    if "input_ids" in fields:
        ids = _tensor(fields, "input_ids")
    elif "prompts" in fields and "responses" in fields:
        ids = torch.cat((_tensor(fields, "prompts"), _tensor(fields, "responses")))
    else:
        raise RowsError(f"row {rows.key[i]}: field input_ids is missing; a row has it, or prompts and responses")
    positions = fields.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 1 and (positions != torch.arange(len(ids))).any():
        raise RowsError(f"row {rows.key[i]}: position_ids do not count up from 0; leave them out, or give [3, tokens]")
    return ids


def _has_axes(fields: Fields) -> bool:
    positions = fields.get("position_ids")
    return isinstance(positions, Tensor) and positions.dim() > 1


def _sizes(tensors: Sequence[Tensor]) -> Ints:
    return np.fromiter((tensor.size(0) for tensor in tensors), dtype=np.int64, count=len(tensors))


def _within(sizes: Ints) -> Ints:
    """0, 1, ... anew for each of some runs of these sizes."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _tensor(fields: Fields, name: str) -> Tensor:
    value = fields[name]
    assert isinstance(value, Tensor), name
    return value


def _mask_name(fields: Sequence[Fields]) -> str:
    return "loss_mask" if fields and "loss_mask" in fields[0] else "response_mask"


def _per_row(rows: Rows, fields: Sequence[Fields], name: str) -> list[Tensor]:
    """A per-response-token field of all rows."""
    parts = []
    for i, (row, tokens) in enumerate(zip(fields, rows.response_tokens.tolist(), strict=True)):
        part = row.get(name)
        if not isinstance(part, Tensor):
            raise RowsError(f"row {rows.key[i]}: field {name} is missing; every row of a micro-batch needs it")
        if part.size(0) != tokens:
            raise RowsError(
                f"row {rows.key[i]}: {name} has {len(part)} tokens and the response {tokens}; they must agree"
            )
        parts.append(part)
    return parts


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0)


def _media(fields: Sequence[Fields]) -> dict[str, Tensor]:
    """The media of all rows, one after another, under the names that the model takes."""
    parts: dict[str, list[Tensor]] = {}
    for row in fields:
        media = row.get("multi_modal_inputs") or {}
        assert isinstance(media, Mapping)
        for name, value in media.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}
