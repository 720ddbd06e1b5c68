"""The fields of rows: which kinds there are, the values of one field over all rows, and the checks of these values.

A kind says what the values of a field belong to. Well-known names have a fixed kind; the kind of any other field is
read from its shapes in all rows that have it. A field whose shapes allow two kinds (in a batch of one row almost every
tensor does) is refused with an error that says how to declare it: the wrong kind would later pad it wrongly, without an
error. Every error names a row and the field.

Note: a value of None means that the row does not have the field.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Bools, Ints, offsets
from raggedright.errors import ConfigError, RowsError
from raggedright.rows import Rows

Fields = Mapping[str, object]
"""The fields of one row: name -> tensor or any other value."""


class Kind(StrEnum):
    """What the values of a field belong to."""

    PROMPT = "prompt"  # one value per prompt token
    RESPONSE = "response"  # one value per response token
    SEQUENCE = "sequence"  # one value per token of prompt and response
    POSITIONS = "positions"  # position ids: [seq], or [3, seq] and [4, seq]
    ROUTING = "routing"  # chosen experts: [seq, layers, topk]
    ROW = "row"  # one value per row, of one shape
    GROUP = "group"  # id of the group in which advantages are computed
    MEDIA = "media"  # images, audio or video; none in a padding row
    OPAQUE = "opaque"  # anything else

    @property
    def by_token(self) -> bool:
        """Whether one of the dims is the tokens."""
        return self in _TOKENS

    @property
    def tokens(self) -> str:
        """The tokens that a per-token kind has values for: those of the prompt, the response or the sequence."""
        return _TOKENS[self]


_TOKENS: Mapping[Kind, str] = {
    Kind.PROMPT: "prompt",
    Kind.RESPONSE: "response",
    Kind.SEQUENCE: "sequence",
    Kind.POSITIONS: "sequence",
    Kind.ROUTING: "sequence",
}
TOKENS_FIRST_OR_LAST = (Kind.RESPONSE, Kind.PROMPT, Kind.SEQUENCE)  # the token dim is the first or the last
_NAMES: dict[Kind, str] = {
    Kind.PROMPT: "prompts",
    Kind.RESPONSE: "responses response_mask loss_mask rm_scores token_level_scores token_level_rewards "
    "rollout_log_probs rollout_temperatures old_log_probs ref_log_prob ref_log_probs values advantages returns "
    "entropys rollout_is_weights",
    Kind.SEQUENCE: "input_ids attention_mask token_type_ids mm_token_type_ids teacher_ids teacher_logprobs",
    Kind.POSITIONS: "position_ids",
    Kind.ROUTING: "routed_experts",
    Kind.ROW: "num_turns __num_turns__ reward_score",
    Kind.GROUP: "uid",
    Kind.MEDIA: "multi_modal_inputs multi_modal_data pixel_values image_grid_thw pixel_values_videos video_grid_thw",
    Kind.OPAQUE: "index data_source reward_model extra_info extra_fields reward_extra_info raw_prompt agent_name "
    "tools_kwargs interaction_kwargs metrics session_id request_id",
}
WELL_KNOWN: Mapping[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
TOKEN_IDS = ("input_ids", "prompts", "responses", "teacher_ids")
LOSS_MASKS = ("response_mask", "loss_mask")
VECTORS = frozenset({
    *LOSS_MASKS, "input_ids", "prompts", "responses", "attention_mask", "rollout_log_probs", "old_log_probs",
    "ref_log_prob", "ref_log_probs", "values", "advantages", "returns", "rollout_is_weights",
})  # fmt: skip
"""Fields with one number per token, which the model and the losses take as they are."""


@dataclass(frozen=True)
class Column:
    """The values of a field in the rows at positions `at`; `tensors` is the same list if they are tensors, or empty."""

    name: str
    rows: Rows
    at: Ints
    values: Sequence[object]
    tensors: Sequence[Tensor]

    @cached_property
    def sizes(self) -> Ints:
        """The shapes of the tensors, which have one rank: [values, rank]."""
        return np.array([tuple(tensor.shape) for tensor in self.tensors], dtype=np.int64)

    @property
    def dtype(self) -> torch.dtype | None:
        """The one dtype of the tensors."""
        return self.tensors[0].dtype if self.tensors else None

    def key(self, i: int) -> str:
        """The key of the row that value i belongs to."""
        return str(self.rows.key[self.at[i]])

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """The shape of tensor i."""
        return tuple(self.tensors[i].shape)

    def num_tokens(self, kind: Kind) -> Ints:
        """How many tokens a field of this kind has in each of the rows."""
        tokens = {
            "prompt": self.rows.prompt_tokens,
            "response": self.rows.response_tokens,
            "sequence": self.rows.tokens,
        }
        return tokens[kind.tokens][self.at]

    def error(self, i: int, what: str) -> RowsError:
        """An error about value i."""
        return RowsError(f"row {self.key(i)}: field {self.name} {what}")


def gather_columns(rows: Rows, fields: Sequence[Fields]) -> dict[str, Column]:
    """One column for each name that a row has, in the order of the names."""
    if len(fields) != len(rows):
        raise RowsError(f"{len(fields):,} rows have fields and {len(rows):,} have numbers; give each row both")
    names = sorted(set().union(*fields))
    return {name: _gather(name, rows, [row.get(name) for row in fields]) for name in names}


def _gather(name: str, rows: Rows, values_by_row: list[object]) -> Column:
    """The column of a field: either all values are tensors, of one dtype and rank, or none is."""
    at = [i for i, value in enumerate(values_by_row) if value is not None]
    values = [values_by_row[i] for i in at]
    tensors = [value for value in values if isinstance(value, Tensor)]
    column = Column(name, rows, np.array(at, dtype=np.int64), values, tensors)
    if tensors:
        is_tensor = [isinstance(value, Tensor) for value in values]
        _check_same(column, is_tensor, lambda i: f"is a {type(values[i]).__name__}")
        _check_same(column, [tensor.dtype for tensor in tensors], lambda i: f"is {tensors[i].dtype}")
        _check_same(column, [tensor.dim() for tensor in tensors], lambda i: f"has shape {column.shape(i)}")
    return column


def _check_same(column: Column, marks: Sequence[object], describe: Callable[[int], str]) -> None:
    for i, mark in enumerate(marks):
        if mark != marks[0]:
            raise column.error(
                i,
                f"{describe(i)} and in row {column.key(0)} {describe(0)}; "
                "a field has one type and one rank in all rows",
            )


def declared_kind(name: str, kind: str) -> Kind:
    """The kind that a caller declared for a field."""
    if kind not in list(Kind):
        raise ConfigError(f"field {name} is declared as {kind!r}; a kind is one of {', '.join(Kind)}")
    return Kind(kind)


def infer_kind(column: Column) -> Kind:
    """The one kind that the shapes in all rows allow; an error if no kind or several kinds are possible."""
    if not column.tensors:
        return Kind.OPAQUE
    fits_by_kind = _fitting_kinds(column)
    possible = [kind for kind, fits in fits_by_kind.items() if fits.all()]
    if len(possible) == 1:
        return possible[0]
    num_rows = len(column.at)
    declare = f'declare it, e.g. declared={{"{column.name}": "{possible[0] if possible else "opaque"}"}}'
    if possible:
        raise column.error(
            0,
            f"has shape {column.shape()} and can be {' or '.join(possible)} by the shapes of all "
            f"{num_rows:,} rows that have it; {declare}",
        )
    best = max(fits_by_kind, key=lambda kind: int(fits_by_kind[kind].sum()))
    i = int(np.argmin(fits_by_kind[best]))
    raise column.error(
        i,
        f"has shape {column.shape(i)} and its row {column.rows.prompt_tokens[column.at[i]]:,} prompt and "
        f"{column.rows.response_tokens[column.at[i]]:,} response tokens; kind {best} fits "
        f"{fits_by_kind[best].sum():,} of {num_rows:,} rows and no kind fits all: fix the row, or {declare}",
    )


def _fitting_kinds(column: Column) -> dict[Kind, Bools]:
    """The rows that each kind fits: the tokens are the first or the last dim, and no other dim varies."""
    sizes = column.sizes
    is_same = sizes == sizes[:1]
    fits_by_kind: dict[Kind, Bools] = {}
    for kind in TOKENS_FIRST_OR_LAST if sizes.shape[1] else ():
        for dim in (0, -1):
            fits = (sizes[:, dim] == column.num_tokens(kind)) & np.delete(is_same, dim, axis=1).all(axis=1)
            if kind not in fits_by_kind or fits.sum() > fits_by_kind[kind].sum():
                fits_by_kind[kind] = fits
    return {**fits_by_kind, Kind.ROW: is_same.all(axis=1)}


def check_lengths(column: Column, dim: int, kind: Kind) -> None:
    """Each tensor has as many tokens along `dim` as its row, and its other dims are the same in every row."""
    sizes, num_tokens = column.sizes, column.num_tokens(kind)
    if not sizes.shape[1]:
        raise column.error(0, f"is a single number; give a tensor with one value per token of the {kind.tokens}")
    for i in np.flatnonzero(sizes[:, dim] != num_tokens)[:1].tolist():
        raise column.error(
            i,
            f"has {sizes[i, dim]:,} tokens and the {kind.tokens} {num_tokens[i]:,}; "
            f"give one value per token of the {kind.tokens}",
        )
    check_constant(column, np.delete(sizes, dim, axis=1), "the dims other than the tokens")


def check_constant(column: Column, sizes: Ints, what: str) -> None:
    """These sizes are the same in every row."""
    for i in np.flatnonzero((sizes != sizes[:1]).any(axis=1))[:1].tolist():
        raise column.error(
            i,
            f"has shape {column.shape(i)} and in row {column.key(0)} {column.shape()}; {what} are the same in all rows",
        )


def check_finite(column: Column, dim: int) -> None:
    """No value of a floating field is NaN or infinite."""
    flat = _flat(column)
    is_wrong = ~torch.isfinite(flat.float() if flat.dtype.itemsize == 1 else flat)
    if is_wrong.any():
        i, token, value = _first(column, flat, is_wrong, dim)
        raise column.error(i, f"is {value} at token {token:,}; per-token values must be finite")


def check_ids(column: Column) -> None:
    """Token ids are integers, 0 or more; `forward` checks that they are in the model's vocabulary."""
    dtype = column.tensors[0].dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise column.error(0, f"is {dtype}; token ids are integers: give a tensor of an integer dtype")
    flat = _flat(column)
    is_wrong = flat < 0
    if is_wrong.any():
        i, token, value = _first(column, flat, is_wrong)
        raise column.error(i, f"has id {int(value):,} at token {token:,}; token ids are 0 or more")


def check_loss_mask(column: Column) -> None:
    """A loss mask is 0 or 1, and marks as many tokens as its row has loss tokens."""
    flat = _flat(column)
    is_wrong = (flat != 0) & (flat != 1)
    if is_wrong.any():
        i, token, value = _first(column, flat, is_wrong)
        raise column.error(i, f"is {value} at token {token:,}; a loss mask is 0 or 1")
    ends, num_marked_before = offsets(column.sizes.prod(axis=1)), offsets((flat != 0).cpu().numpy())
    num_marked = np.diff(num_marked_before[ends])
    loss_tokens = column.rows.loss_tokens[column.at]
    for i in np.flatnonzero(num_marked != loss_tokens)[:1].tolist():
        raise column.error(
            i,
            f"marks {num_marked[i]:,} tokens and the row has loss_tokens {loss_tokens[i]:,}; "
            "a loss mask must not change after its row is counted",
        )


def _flat(column: Column) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in column.tensors])


def _first(column: Column, flat: Tensor, is_wrong: Tensor, dim: int = 0) -> tuple[int, int, float]:
    """The first wrong value of the flattened tensors: the number of its tensor, its token, and the value."""
    place = int(is_wrong.int().argmax())
    starts = offsets(column.sizes.prod(axis=1))
    i = int(np.searchsorted(starts, place, side="right")) - 1
    token = np.unravel_index(place - starts[i], column.shape(i))[dim]
    return i, int(token), flat[place].item()
