"""Rows of a micro-batch to model inputs, and their response tokens to flat vectors.

There are three collations, which give the same numbers:

- packed: all rows as one sequence. Positions restart at each row, and there is no attention mask: the model derives
  exact block attention from the positions.
- padded: one rectangle. Rows are padded on the right, and the padding is masked.
- tree: a rectangle of prefix trees, often a single one, with the attention mask of their branches. The last token of a
  row predicts nothing and is left out. Rows with media or recorded experts cannot be in a tree.

In every collation, per-token vectors are flat: the response tokens of row 0, then those of row 1, and so on, so that
losses never see a rectangle. A model gets only what `Collator` makes and `forward` passes on.

Three cases add tokens: a row shorter than `min_row_tokens` is extended at its end, where causal attention makes the
extension harmless; in a batch with images, a micro-batch without an image gets a filler row with a small one, of weight
zero, so that all ranks of a sharded model run the vision tower; a micro-batch without rows (align lcm) consists of a
filler row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints, index_in_run
from raggedright.errors import RowsError
from raggedright.plan.layout import Collate
from raggedright.rows import Rows
from raggedright.tensors.losses import TokenWeights
from raggedright.tensors.padding import check_token_id
from raggedright.tensors.routing import NOT_ROUTED
from raggedright.tensors.row_fields import VECTORS, Fields
from raggedright.tensors.tree import PrefixTrees


class TokenAt(NamedTuple):
    """A token id, and the row and the token where it is."""

    id: int
    row: str  # "row <key>"
    token: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one forward and backward pass. N counts response tokens, including those of padding rows."""

    inputs: Mapping[str, Tensor]  # for the model: input_ids, position_ids, attention_mask unless packed, media
    logit_index: Tensor  # [N] flat place in input_ids whose output predicts response token n
    labels: Tensor  # [N] the response tokens
    weights: TokenWeights
    fields: Mapping[str, Tensor]  # per response token, [N]
    routing: Tensor | None  # recorded experts, the shape of input_ids + [layers, topk]; -1 where none was recorded
    response_tokens: tuple[int, ...]  # of each row
    longest_row: int  # its number of tokens
    token_id: int  # fills rows up
    extremes: tuple[TokenAt, TokenAt]  # the lowest and the highest id, known without reading from the device
    real: Tensor | None = None  # with routing: true at tokens of real rows, the shape of input_ids

    @property
    def one_sequence(self) -> bool:
        """Whether the model sees one sequence, not a rectangle of several."""
        return len(self.inputs["input_ids"]) == 1

    @property
    def is_tree(self) -> bool:
        """Whether rows share the tokens of a common prefix."""
        return "attention_mask" in self.inputs and self.inputs["attention_mask"].dim() == 4

    def per_row(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A flat vector over response tokens, split into rows."""
        return torch.split(flat, list(self.response_tokens))

    def to(self, device: torch.device | str) -> "MicroBatch":
        """This micro-batch on another device."""
        return replace(
            self,
            inputs={name: value.to(device) for name, value in self.inputs.items()},
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

    - `token_id` fills rows up; no token that counts attends to it.
    - `mrope`: position_ids have axes (time, height, width), as vision-language models need them.
    - `even_tokens`: for trees, the number of tokens at which attention costs as much as the rest of the model.
    - `image_filler`: a row with a small image, for micro-batches without one; needed if a batch has media.
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
        """Collate rows and their tensors; `names` are the per-response-token fields to include.

        `weight` is the plan's per-token weight of each row, `step_loss_tokens` the loss tokens of the whole step.
        """
        prompt, response = rows.prompt_tokens, rows.response_tokens
        if (prompt == 0).any():
            key = rows.key[np.argmin(prompt)]
            raise RowsError(f"row {key}: prompt_tokens is 0, so that nothing predicts its first response token")
        fillers = self._fillers(fields)
        filler_ids = [tensor_of(row, "input_ids") for row in fillers]
        flat = torch.cat((_token_ids(rows, fields), *filler_ids))
        sizes = np.append(rows.tokens, [len(ids) for ids in filler_ids]).astype(np.int64)
        response_starts = np.cumsum(sizes)[: len(rows)] - response  # in `flat`
        in_response = index_in_run(response)
        if self.how == "tree":
            _check_tree_rows(rows, fields)
            inputs, place = self._tree_inputs(flat, sizes, np.append(response, [0] * len(fillers)))
            row, token = np.repeat(np.arange(len(rows)), response), np.repeat(prompt - 1, response) + in_response
            logit_index = place[row, token]
            routing = real = None
        else:
            lengths = np.maximum(sizes, self.min_row_tokens)
            starts, shape = self._places(sizes, lengths, len(rows))
            inputs = self._inputs(flat, sizes, lengths, [*fields, *fillers], starts, shape)
            logit_index = np.repeat(starts[: len(rows)] + prompt - 1, response) + in_response
            routing, real = _routing(rows, fields, starts, inputs["input_ids"].shape)
        mask_name = "loss_mask" if any(row.get("loss_mask") is not None for row in fields) else "response_mask"
        mask = _per_response(rows, fields, mask_name)
        mean = np.where(rows.is_padding, 0.0, 1 / max(step_loss_tokens, 1))
        return MicroBatch(
            inputs=inputs,
            logit_index=torch.from_numpy(logit_index),
            labels=flat[torch.from_numpy(np.repeat(response_starts, response) + in_response)],
            weights=TokenWeights.from_mask(mask, response, loss=weight, mean=mean),
            fields={name: _per_response(rows, fields, name) for name in names},
            routing=routing,
            response_tokens=tuple(response.tolist()),
            longest_row=int(sizes.max()),
            token_id=self.token_id,
            extremes=_extremes(flat, sizes, rows),
            real=real,
        )

    def filler_tokens(self, most: int) -> int:
        """The most tokens that an image filler adds to a micro-batch, which has at most `most` tokens with it.

        A filler of f tokens adds either f x R tokens to a rectangle of R rows (at the end of one of them), or one row
        of length L, whichever is less: at most the square root of f x R x L. No row may be shorter than the filler
        (min_row_tokens).
        """
        if self.image_filler is None:
            return 0
        size = max(len(tensor_of(self.image_filler, "input_ids")), self.min_row_tokens)
        return size if self.how != "padded" else math.isqrt(size * most) + 1

    def _fillers(self, fields: Sequence[Fields]) -> list[Fields]:
        if self.image_filler is None:
            return [] if fields else [{"input_ids": torch.full((self.min_row_tokens,), self.token_id)}]
        return [] if any(row.get("multi_modal_inputs") for row in fields) else [self.image_filler]

    def _places(self, sizes: Ints, lengths: Ints, num_rows: int) -> tuple[Ints, tuple[int, int]]:
        """Where each row begins in the flattened input_ids, and the shape of input_ids.

        In a rectangle, a filler is either put at the end of the shortest row, masked, or is a row of its own: the
        smaller rectangle is chosen.
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
        ids.view(-1)[torch.from_numpy(np.repeat(starts, sizes) + index_in_run(sizes))] = flat
        inputs = {"input_ids": ids}
        rows = slice(shape[0] if self.how == "padded" else None)  # without a filler at the end of another row
        if self.how == "padded":
            inputs["attention_mask"] = (torch.arange(shape[1]) < torch.from_numpy(lengths[rows])[:, None]).long()
        if self.mrope or any(_has_axes(row) for row in fields):
            inputs["position_ids"] = self._axes(sizes[rows].tolist(), fields[rows], lengths[rows].tolist(), shape[1])
        elif self.how == "padded":
            inputs["position_ids"] = torch.arange(shape[1]) * inputs["attention_mask"]
        else:
            inputs["position_ids"] = torch.from_numpy(index_in_run(lengths))[None]
        return inputs | _media(fields)

    def _tree_inputs(self, flat: Tensor, sizes: Ints, response: Ints) -> tuple[dict[str, Tensor], Ints]:
        """The rows' prefix trees as a rectangle, and the place in it of each row's tokens except the last."""
        kept = sizes - (response > 0)
        ids = flat.numpy()[index_in_run(sizes) < np.repeat(kept, sizes)]
        trees = PrefixTrees.of(ids, kept, even_tokens=self.even_tokens, token_id=self.token_id)
        inputs = {
            "input_ids": torch.from_numpy(trees.ids),
            "position_ids": torch.from_numpy(trees.depth),
            "attention_mask": trees.mask(),
        }
        return inputs, trees.place

    def _axes(self, sizes: list[int], fields: Sequence[Fields], lengths: list[int], longest: int) -> Tensor:
        """Positions with axes, [axes, rows, tokens]."""
        positions = [self._positions(size, row, n) for size, row, n in zip(sizes, fields, lengths, strict=True)]
        if self.how == "packed":
            return torch.cat(positions, dim=-1).unsqueeze(-2)
        return torch.stack([torch.nn.functional.pad(row, (0, longest - row.shape[-1])) for row in positions], dim=-2)

    def _positions(self, size: int, fields: Fields, length: int) -> Tensor:
        """[length], or [4, length] if positions have axes: the positions of text, then the three axes."""
        text = torch.arange(length)
        positions = fields.get("position_ids")
        if not isinstance(positions, Tensor) or positions.dim() == 1:
            return text.expand(4, -1) if self.mrope else text
        extension = positions[:, -1:] + torch.arange(1, length - size + 1)  # a row that is filled up counts on
        return torch.cat((text[None], torch.cat((positions, extension), dim=-1)[-3:]))


def tensor_of(fields: Fields, name: str) -> Tensor:
    """A field that is a tensor."""
    value = fields[name]
    assert isinstance(value, Tensor), name
    return value


def _token_ids(rows: Rows, fields: Sequence[Fields]) -> Tensor:
    """The token ids of all rows, one after another: `input_ids`, or `prompts` and `responses`."""
    ids_by_row = []
    for i, row in zip(range(len(rows)), fields, strict=True):
        positions, mask = row.get("position_ids"), row.get("attention_mask")
        if isinstance(positions, Tensor) and positions.dim() == 1 and (positions != torch.arange(len(positions))).any():
            key = rows.key[i]
            raise RowsError(f"row {key}: position_ids do not count up from 0; leave them out, or give [3, tokens]")
        if isinstance(mask, Tensor) and not mask.all():
            raise RowsError(
                f"row {rows.key[i]}: field attention_mask has {int((mask == 0).sum()):,} zeros of {mask.numel():,}; "
                "rows have no padding tokens: remove these tokens from all fields of the row"
            )
        ids = row.get("input_ids")
        if ids is None and "prompts" in row and "responses" in row:
            parts = {name: tensor_of(row, name) for name in ("prompts", "responses")}
            for name, part in parts.items():
                _check_vector(rows.key[i], name, part)
            ids = torch.cat([*parts.values()])
        ids_by_row.append(ids)
    return _joined(rows, "input_ids", ids_by_row, rows.tokens, "row").long()


def _per_response(rows: Rows, fields: Sequence[Fields], name: str) -> Tensor:
    """A per-response-token field of all rows, one after another."""
    return _joined(rows, name, [row.get(name) for row in fields], rows.response_tokens, "response")


def _joined(rows: Rows, name: str, values: Sequence[object], num_tokens: Ints, what: str) -> Tensor:
    """A field of all rows, one after another, after checking that it has one value for each of the tokens."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    sizes = [tuple(tensor.shape) for tensor in tensors]
    if tensors and sizes == [(tokens,) for tokens in num_tokens.tolist()]:
        return torch.cat(tensors)
    for i, value in enumerate(values):  # the general case: name the first row that is wrong
        key, size = rows.key[i], len(value) if isinstance(value, Tensor) else 0
        if isinstance(value, Tensor) and name in VECTORS:
            _check_vector(key, name, value)
        if size != num_tokens[i] and value is not None:
            raise RowsError(f"row {key}: {name} has {size} tokens and the {what} {num_tokens[i]}; they must agree")
        if size != num_tokens[i]:
            remedy = "give it, or prompts and responses" if what == "row" else "every row of a micro-batch needs it"
            raise RowsError(f"row {key}: field {name} is missing; {remedy}")
    return torch.cat(tensors) if tensors else torch.empty(0)


def _check_vector(key: str, name: str, value: Tensor) -> None:
    if value.dim() != 1:
        raise RowsError(
            f"row {key}: field {name} has shape {tuple(value.shape)}; give one number per token, in a tensor of one dim"
        )


def _routing(
    rows: Rows, fields: Sequence[Fields], starts: Ints, shape: torch.Size
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Recorded experts in the shape of input_ids, and where real rows' tokens are."""
    experts_by_row = {i: row["routed_experts"] for i, row in enumerate(fields) if "routed_experts" in row}
    recorded = {i: experts for i, experts in experts_by_row.items() if isinstance(experts, Tensor)}
    if not recorded:
        return None, None
    at = np.array([*recorded])
    sizes = np.array([len(experts) for experts in recorded.values()])
    place = torch.from_numpy(np.repeat(starts[at], sizes) + index_in_run(sizes))
    experts = torch.cat([*recorded.values()])
    routing = torch.full((shape.numel(), *experts.shape[1:]), NOT_ROUTED, dtype=torch.long)
    routing[place] = experts.long()
    real = torch.zeros(shape.numel(), dtype=torch.bool)
    real[place] = torch.from_numpy(np.repeat(~rows.is_padding[at], sizes))
    return routing.view(*shape, *experts.shape[1:]), real.view(shape)


def _extremes(flat: Tensor, sizes: Ints, rows: Rows) -> tuple[TokenAt, TokenAt]:
    """The lowest and the highest token id of rows and fillers that are stored one after another."""
    ids, ends = flat.numpy(), np.cumsum(sizes)

    def token_at(place: int) -> TokenAt:
        row = int(np.searchsorted(ends, place, side="right"))
        name = f"row {rows.key[row]}" if row < len(rows) else "the image_filler"
        return TokenAt(int(ids[place]), name, int(place - ends[row] + sizes[row]))

    return token_at(int(ids.argmin())), token_at(int(ids.argmax()))


def _check_tree_rows(rows: Rows, fields: Sequence[Fields]) -> None:
    for key, row in zip(rows.key, fields, strict=True):
        for name in ("multi_modal_inputs", "routed_experts"):
            if row.get(name) is not None:
                raise RowsError(f"row {key}: has {name} and collate is tree; set collate = 'packed' or 'padded'")
        if _has_axes(row):
            raise RowsError(f"row {key}: position_ids have axes and collate is tree; set collate to 'padded'")


def _has_axes(fields: Fields) -> bool:
    positions = fields.get("position_ids")
    return isinstance(positions, Tensor) and positions.dim() > 1


def _media(fields: Sequence[Fields]) -> dict[str, Tensor]:
    """The media of all rows, one after another, under the names that the model takes."""
    parts: dict[str, list[Tensor]] = {}
    for row in fields:
        media = row.get("multi_modal_inputs") or {}
        assert isinstance(media, Mapping)
        for name, value in media.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}
