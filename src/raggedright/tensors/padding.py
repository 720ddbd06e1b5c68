"""Padding rows, which fill a batch up to the plan's row count; they are made from the schema, not from a real row.

A padding row has one prompt token, then response tokens up to the layout's minimum row length. Masks, rewards,
log-probs and all other per-token values are zero, in the dtype and dims of the real rows. Invariants: no padding row
shares a group with another row; it has every field that some row of the batch has, also if other rows lack it; it
passes the schema's checks.

Note: all padding rows share their tensors. Clone a tensor before you write to it.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raggedright.errors import ConfigError, RowsError
from raggedright.rows import PADDING_GROUP
from raggedright.tensors.row_fields import TOKEN_IDS, Kind
from raggedright.tensors.row_schema import Field, Schema

_PLAIN = (str, bool, int, float, complex, bytes, tuple, frozenset, list, dict, set)
_MUTABLE = (list, dict, set, np.ndarray)


class PaddingRow(NamedTuple):
    """A row's fields, and the tags under which a store lists it."""

    fields: dict[str, object]
    tags: dict[str, object]


def padding_rows(
    schema: Schema, count: int, *, token_id: int, min_row_tokens: int = 2, first: int = 0
) -> list[PaddingRow]:
    """`count` rows of weight zero, their groups numbered from `first`. Their tensors are shared and read-only."""
    if min_row_tokens < 2:
        raise ConfigError(f"min_row_tokens is {min_row_tokens}; a row has a prompt and a response token, so 2 or more")
    check_token_id(token_id)
    if count and not schema.fields:
        raise RowsError(f"{count:,} padding rows are requested before any row was seen; make them from the first batch")
    values = {name: _value(field, token_id, min_row_tokens) for name, field in schema.fields.items()}
    groups = [field for field in schema.fields.values() if field.kind is Kind.GROUP]
    tags = {"is_padding": True, "prompt_len": 1, "response_len": min_row_tokens - 1, "seq_len": min_row_tokens}
    rows = []
    for number in range(first, first + count):
        fields = {name: copy(value) if isinstance(value, _MUTABLE) else value for name, value in values.items()}
        fields |= {field.name: _group_id(field, number) for field in groups}
        rows.append(PaddingRow(fields, dict(tags)))
    return rows


def check_token_id(token_id: object) -> None:
    """A ConfigError if this cannot be the id of a padding token."""
    if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
        raise ConfigError(
            f"token_id is {token_id!r:.40}; it takes a token id of the vocabulary, 0 or more, "
            "such as padding_token_id(tokenizer)"
        )


def padding_token_id(tokenizer: object, given: int | None = None) -> int:
    """The token of padding rows: `given`, else the (first) eos id of the tokenizer."""
    if given is not None:
        if given < 0:
            raise ConfigError(f"padding_token_id is {given}; it takes an id of the tokenizer's vocabulary, 0 or more")
        return given
    eos = getattr(tokenizer, "eos_token_id", None)
    first = eos[0] if isinstance(eos, Sequence) and eos else eos
    if not isinstance(first, int):
        raise ConfigError(
            f"the tokenizer's eos_token_id is {eos!r}, so padding rows have no token; "
            "give the tokenizer an eos_token, or padding_token_id any id of its vocabulary"
        )
    return first


def _value(field: Field, token_id: int, num_tokens: int) -> object:
    """The neutral value of a field; group ids are set row by row."""
    if field.value_type is None or field.kind is Kind.GROUP:
        return None
    if isinstance(field.dtype, torch.dtype):
        return _tensor(field, field.dtype, token_id, num_tokens)
    if field.kind is Kind.MEDIA:
        return [] if field.value_type is list else {}
    if isinstance(field.dtype, np.dtype):
        return np.zeros(field.shape, dtype=field.dtype)
    if field.value_type in _PLAIN or issubclass(field.value_type, np.number | np.bool_ | np.str_):
        return field.value_type()
    return None


def _tensor(field: Field, dtype: torch.dtype, token_id: int, num_tokens: int) -> Tensor:
    """The neutral tensor of a field: for per-token kinds as long as the padding row, else in the field's shape."""
    if not field.kind.by_token:
        return torch.zeros(field.shape, dtype=dtype)
    length = {"prompt": 1, "response": num_tokens - 1, "sequence": num_tokens}[field.kind.tokens]
    shape = (length, *field.shape) if field.dim == 0 else (*field.shape, length)
    if field.kind is Kind.POSITIONS:
        return torch.arange(length).to(dtype).expand(shape).contiguous()
    if field.kind is Kind.ROUTING:  # distinct experts: zeros would choose expert 0 topk times
        return torch.arange(field.shape[-1]).to(dtype).expand(shape).contiguous()
    if field.name in TOKEN_IDS:
        return torch.full(shape, token_id, dtype=dtype)
    if field.name == "attention_mask":
        return torch.ones(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def _group_id(field: Field, number: int) -> object:
    """An id that no real row and no other padding row has."""
    if isinstance(field.dtype, torch.dtype):
        return torch.full(field.shape, -number - 1, dtype=field.dtype)
    if field.value_type is not None and issubclass(field.value_type, int | np.integer):
        return field.value_type(-number - 1)
    return f"{PADDING_GROUP}{number}"
