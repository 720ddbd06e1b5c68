"""Rows of a micro-batch to model inputs, and their response tokens to flat vectors.

Three layouts, one meaning. Packed: one sequence of all rows, positions restarting at each, no attention mask (the model
derives exact block attention from the positions). Padded: one rectangle, rows on the right filled up and masked. Tree:
a rectangle of prefix trees, often one, with the attention mask of their branches; the last token of a row, which
predicts nothing, is left out. Rows with media or recorded experts cannot be in a tree.
Whatever the layout, every per-token vector is flat: the response tokens of row 0, then those of row 1, and so on, so
that losses never see a rectangle. Nothing else reaches a model than what `Collator` makes and `forward` passes on.

The surprises: a row shorter than `min_row_tokens` is extended behind its end, where causal attention makes it
harmless; a micro-batch without images in a batch with images takes along a filler row with one, of weight zero, so that
sharded ranks all run the vision tower; a micro-batch without a row (align lcm) takes the filler row alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Bools, Ints, within
from raggedright.errors import RowsError
from raggedright.plan.layout import Collate
from raggedright.rows import Rows
from raggedright.tensors.kinds import check_token_id
from raggedright.tensors.losses import TokenWeights
from raggedright.tensors.routing import NOT_ROUTED
from raggedright.tensors.row_tokens import RowTokens, tensor_of
from raggedright.tensors.schema import Fields
from raggedright.tensors.tree import PrefixTrees


class TokenAt(NamedTuple):
    """A token id, and where it is from."""

    id: int
    row: str  # "row <key>"
    token: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass needs. N counts response tokens, padding rows' included."""

    inputs: Mapping[str, Tensor]  # for the model: input_ids, position_ids, attention_mask unless packed, media
    logit_index: Tensor  # [N] flat place in input_ids whose output predicts response token n
    labels: Tensor  # [N] the response tokens
    weights: TokenWeights
    fields: Mapping[str, Tensor]  # per response token, [N]
    routing: Tensor | None  # recorded experts, as input_ids + [layers, topk]; -1 where none was recorded
    response_tokens: tuple[int, ...]  # of each row
    longest_row: int  # its tokens
    token_id: int  # that fills rows up
    extremes: tuple[TokenAt, TokenAt]  # the lowest and the highest id, known without asking the device
    real: Tensor | None = None  # with routing: where real rows' tokens are, as input_ids

    @property
    def one_sequence(self) -> bool:
        """Whether the model sees one sequence, not a rectangle of several."""
        return len(self.inputs["input_ids"]) == 1

    @property
    def is_tree(self) -> bool:
        """Whether rows share what they begin with."""
        return "attention_mask" in self.inputs and self.inputs["attention_mask"].dim() == 4

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
    - `even_tokens`: of a tree, the tokens at which attention costs as much as all else in the model.
    - `image_filler`: a row with a small image, for micro-batches without one; needed where a batch has media.
    """

    how: Collate
    token_id: int
    min_row_tokens: int = 2
    mrope: bool = False
    even_tokens: int = 4_096
    image_filler: Fields | None = None

    def __post_init__(self) -> None:
        check_token_id(self.token_id)

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
        tokens, every = RowTokens(rows, fields), np.arange(len(rows))
        return self.cut(tokens, every, weight=weight, step_loss_tokens=step_loss_tokens, names=names)

    def cut(
        self, tokens: RowTokens, at: Ints, *, weight: np.ndarray, step_loss_tokens: int, names: Sequence[str] = ()
    ) -> MicroBatch:
        """The same of these rows alone."""
        rows, fields = tokens.rows, [tokens.fields[i] for i in at.tolist()] if tokens.has_more else []
        prompt, response, is_padding = rows.prompt_tokens[at], rows.response_tokens[at], rows.is_padding[at]
        if (prompt == 0).any():
            key = rows.key[at[np.argmin(prompt)]]
            raise RowsError(f"row {key}: prompt_tokens is 0, so that nothing predicts its first response token")
        fillers = self._fillers(fields, len(at))
        of_fillers = [tensor_of(row, "input_ids") for row in fillers]
        flat = torch.cat((tokens.sequences(at).long(), *of_fillers))
        sizes = np.append(prompt + response, [len(ids) for ids in of_fillers]).astype(np.int64)
        begins = np.cumsum(sizes)[: len(at)] - response  # where each row's response begins among all ids
        of_response = within(response)
        if self.how == "tree":
            _refuse_tree(rows.key[at].tolist() if fields else [], fields)
            inputs, place = self._tree_inputs(flat, sizes, np.append(response, [0] * len(of_fillers)))
            logit_index = place[np.repeat(np.arange(len(at)), response), np.repeat(prompt - 1, response) + of_response]
            routing = real = None
        else:
            lengths = np.maximum(sizes, self.min_row_tokens)
            starts, shape = self._places(sizes, lengths, len(at))
            inputs = self._inputs(flat, sizes, lengths, [*fields, *fillers], starts, shape)
            logit_index = np.repeat(starts[: len(at)] + prompt - 1, response) + of_response
            routing, real = self._routing(is_padding, fields, starts, inputs["input_ids"].shape)
        mean = np.where(is_padding, 0.0, 1 / max(step_loss_tokens, 1))
        mask = tokens.responses(tokens.mask_name, at)
        return MicroBatch(
            inputs=inputs,
            logit_index=torch.from_numpy(logit_index),
            labels=flat[torch.from_numpy(np.repeat(begins, response) + of_response)],
            weights=TokenWeights.from_mask(mask, response, loss=weight, mean=mean),
            fields={name: tokens.responses(name, at) for name in names},
            routing=routing,
            response_tokens=tuple(response.tolist()),
            longest_row=int(sizes.max()),
            token_id=self.token_id,
            extremes=_extremes(flat, sizes, rows.key[at]),
            real=real,
        )

    def filler_tokens(self, most: int) -> int:
        """The most tokens that an image filler adds to a micro-batch, which has at most `most` with it.

        A filler of f tokens adds f x R to a rectangle of R rows (behind the end of one), or a row of its length L,
        what is less: at most the square root of f x R x L. No row may be shorter than the filler (min_row_tokens).
        """
        if self.image_filler is None:
            return 0
        size = max(len(tensor_of(self.image_filler, "input_ids")), self.min_row_tokens)
        return size if self.how != "padded" else math.isqrt(size * most) + 1

    def _fillers(self, fields: Sequence[Fields], num_rows: int) -> list[Fields]:
        if self.image_filler is None:
            return [] if num_rows else [{"input_ids": torch.full((self.min_row_tokens,), self.token_id)}]
        return [] if any(row.get("multi_modal_inputs") for row in fields) else [self.image_filler]

    def _places(self, sizes: Ints, lengths: Ints, num_rows: int) -> tuple[Ints, tuple[int, int]]:
        """Where each row begins in the flattened input_ids, and the shape of these.

        In a rectangle, a filler is behind the end of the shortest row, masked, or a row of its own: what is smaller.
        """
        if self.how == "packed":
            return np.cumsum(lengths) - lengths, (1, int(lengths.sum()))
        longest, rows = int(lengths.max()), lengths[:num_rows]
        if num_rows and len(lengths) > num_rows:
            shortest = int(rows.argmin())
            wide = max(int(rows.max()), int(rows[shortest] + sizes[-1]))
            if num_rows * wide <= len(lengths) * longest:
                return np.append(np.arange(num_rows) * wide, shortest * wide + rows[shortest]), (num_rows, wide)
        return np.arange(len(lengths)) * longest, (len(lengths), longest)

    def _inputs(
        self, flat: Tensor, sizes: Ints, lengths: Ints, fields: Sequence[Fields], starts: Ints, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        ids = torch.full(shape, self.token_id)
        ids.view(-1)[torch.from_numpy(np.repeat(starts, sizes) + within(sizes))] = flat
        inputs = {"input_ids": ids}
        rows = slice(shape[0] if self.how == "padded" else None)  # without a filler behind the end of one of them
        if self.how == "padded":
            inputs["attention_mask"] = (torch.arange(shape[1]) < torch.from_numpy(lengths[rows])[:, None]).long()
        if self.mrope or any(_has_axes(row) for row in fields):
            fields_of_rows = fields[: len(fields) - len(lengths) + len(lengths[rows])]
            inputs["position_ids"] = self._axes(
                sizes[rows].tolist(), fields_of_rows, lengths[rows].tolist(), longest=shape[1]
            )
        elif self.how == "padded":
            inputs["position_ids"] = torch.arange(shape[1]) * inputs["attention_mask"]
        else:
            inputs["position_ids"] = torch.from_numpy(within(lengths))[None]
        return inputs | _media(fields)

    def _tree_inputs(self, flat: Tensor, sizes: Ints, response: Ints) -> tuple[dict[str, Tensor], Ints]:
        """The rows' prefix trees as a rectangle, and the place in it of each row's tokens but the last."""
        kept = sizes - (response > 0)
        ids = flat.numpy()[within(sizes) < np.repeat(kept, sizes)]
        trees = PrefixTrees.of(ids, kept, even_tokens=self.even_tokens, token_id=self.token_id)
        inputs = {
            "input_ids": torch.from_numpy(trees.ids),
            "position_ids": torch.from_numpy(trees.depth),
            "attention_mask": trees.mask(),
        }
        return inputs, trees.place

    def _axes(self, sizes: list[int], fields: Sequence[Fields], lengths: list[int], *, longest: int) -> Tensor:
        """Positions with axes, [axes, rows, tokens]."""
        fields = [*({} for _ in range(len(sizes) - len(fields))), *fields]  # rows that carry none come first
        positions = [self._positions(size, row, n) for size, row, n in zip(sizes, fields, lengths, strict=True)]
        if self.how == "packed":
            return torch.cat(positions, dim=-1).unsqueeze(-2)
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
        self, is_padding: Bools, fields: Sequence[Fields], starts: Ints, shape: torch.Size
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Recorded experts, and where real rows' tokens are."""
        given = [
            (i, experts) for i, row in enumerate(fields) if isinstance(experts := row.get("routed_experts"), Tensor)
        ]
        if not given:
            return None, None
        at = np.array([i for i, _ in given])
        sizes = _sizes([experts for _, experts in given])
        place = torch.from_numpy(np.repeat(starts[at], sizes) + within(sizes))
        experts = torch.cat([experts for _, experts in given])
        routing = torch.full((shape.numel(), *experts.shape[1:]), NOT_ROUTED, dtype=torch.long)
        routing[place] = experts.long()
        real = torch.zeros(shape.numel(), dtype=torch.bool)
        real[place] = torch.from_numpy(np.repeat(~is_padding[at], sizes))
        return routing.view(*shape, *experts.shape[1:]), real.view(shape)


def _extremes(flat: Tensor, sizes: Ints, keys: np.ndarray) -> tuple[TokenAt, TokenAt]:
    """The lowest and the highest token id of rows that stand one after another; rows without a key are fillers."""
    ids, ends = flat.numpy(), np.cumsum(sizes)

    def token_at(place: int) -> TokenAt:
        row = int(np.searchsorted(ends, place, side="right"))
        name = f"row {keys[row]}" if row < len(keys) else "the image_filler"
        return TokenAt(int(ids[place]), name, int(place - ends[row] + sizes[row]))

    return token_at(int(ids.argmin())), token_at(int(ids.argmax()))


def _refuse_tree(keys: Sequence[str], fields: Sequence[Fields]) -> None:
    for key, row in zip(keys, fields, strict=False):  # rows that carry vectors by token alone have no fields here
        for name in ("multi_modal_inputs", "routed_experts"):
            if row.get(name) is not None:
                raise RowsError(f"row {key}: has {name} and collate is tree; set collate = 'packed' or 'padded'")
        if _has_axes(row):
            raise RowsError(f"row {key}: position_ids have axes and collate is tree; set collate to 'padded'")


def _has_axes(fields: Fields) -> bool:
    positions = fields.get("position_ids")
    return isinstance(positions, Tensor) and positions.dim() > 1


def _sizes(tensors: Sequence[Tensor]) -> Ints:
    return np.fromiter((tensor.size(0) for tensor in tensors), dtype=np.int64, count=len(tensors))


def _media(fields: Sequence[Fields]) -> dict[str, Tensor]:
    """The media of all rows, one after another, under the names that the model takes."""
    parts: dict[str, list[Tensor]] = {}
    for row in fields:
        media = row.get("multi_modal_inputs") or {}
        assert isinstance(media, Mapping)
        for name, value in media.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}
