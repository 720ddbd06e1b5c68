"""What rows carry by token, each field joined once into one long vector, so that a micro-batch is cut out in one go.

A field is joined when it is first asked for. A row that this rank never runs may carry nothing. Whoever
asks for a row without the field, or with another number of tokens than the row has, gets an error that names it.
"""

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints
from raggedright.errors import RowsError
from raggedright.ragged import Ragged, join
from raggedright.rows import Rows
from raggedright.tensors.column import Fields
from raggedright.tensors.kinds import VECTORS

_MORE = ("position_ids", "multi_modal_inputs", "routed_experts")


class RowTokens:
    """The numbers and the tensors of rows; `fields` holds one mapping a row, `joined` what is joined already."""

    def __init__(self, rows: Rows, fields: Sequence[Fields], joined: Mapping[str, Ragged] | None = None) -> None:
        self.rows, self.fields = rows, fields
        some = filter(None, fields)
        self.has_more = any(not row.keys().isdisjoint(_MORE) for row in some)  # than vectors by token
        self._joined: dict[str, Ragged] = {**(joined or {})}

    @property
    def mask_name(self) -> str:
        """The field that says which response tokens carry loss."""
        first = next((row for row in self.fields if row), {})
        return "loss_mask" if "loss_mask" in first or "loss_mask" in self._joined else "response_mask"

    def sequences(self, at: Ints) -> Tensor:
        """The token ids of these rows: `input_ids`, or `prompts` and `responses`."""
        if "input_ids" not in self._joined:
            self._joined["input_ids"] = self._join_sequences()
        return self._take("input_ids", at, self.rows.prompt_tokens[at] + self.rows.response_tokens[at], "row")

    def responses(self, name: str, at: Ints) -> Tensor:
        """A field by response token of these rows."""
        if name not in self._joined:
            self._joined[name] = self._join(name, [row.get(name) for row in self.fields])
        return self._take(name, at, self.rows.response_tokens[at], "response")

    def has(self, name: str) -> bool:
        """Whether a field is joined already, for all rows."""
        return name in self._joined

    def with_responses(self, name: str, flat: Tensor) -> "RowTokens":
        """The same with one field more, a value for each response token of all rows."""
        more = copy(self)
        more._joined = {**self._joined, name: Ragged.of(flat, self.rows.response_tokens)}
        return more

    def _take(self, name: str, at: Ints, tokens: Ints, what: str) -> Tensor:
        column = self._joined[name]
        wrong = np.flatnonzero(column.sizes[at] != tokens)
        if len(wrong):
            i = int(at[wrong[0]])
            key, found = self.rows.key[i], int(column.sizes[i])
            if found or self.fields[i].get(name) is not None:
                raise RowsError(
                    f"row {key}: {name} has {found} tokens and the {what} {tokens[wrong[0]]}; they must agree"
                )
            remedy = (
                "a row has it, or prompts and responses" if what == "row" else "every row of a micro-batch needs it"
            )
            raise RowsError(f"row {key}: field {name} is missing; {remedy}")
        return column.take(at)

    def _join_sequences(self) -> Ragged:
        ids = [row.get("input_ids") for row in self.fields]
        for i, row in enumerate(self.fields):
            if ids[i] is None and "prompts" in row and "responses" in row:
                parts = {name: tensor_of(row, name) for name in ("prompts", "responses")}
                for name, part in parts.items():
                    self._check_vector(i, name, part)
                ids[i] = torch.cat([*parts.values()])
        for i, row in enumerate(self.fields if self.has_more else ()):
            given = row.get("position_ids")
            if isinstance(given, Tensor) and given.dim() == 1 and (given != torch.arange(len(given))).any():
                key = self.rows.key[i]
                raise RowsError(f"row {key}: position_ids do not count up from 0; leave them out, or give [3, tokens]")
        self._check_attention()
        return self._join("input_ids", ids)

    def _join(self, name: str, values: Sequence[object]) -> Ragged:
        """The tensors of a field, one row after another."""
        for i, value in enumerate(values if name in VECTORS else ()):
            if isinstance(value, Tensor):
                self._check_vector(i, name, value)
        return join(values)

    def _check_vector(self, i: int, name: str, value: Tensor) -> None:
        if value.dim() != 1:
            raise RowsError(
                f"row {self.rows.key[i]}: field {name} has shape {tuple(value.shape)}; give one number per token, "
                "a tensor of one dim"
            )

    def _check_attention(self) -> None:
        """Refuse a row's own attention mask where it hides a token: every token of a row is attended to."""
        for i, row in enumerate(self.fields):
            mask = row.get("attention_mask")
            if isinstance(mask, Tensor) and not mask.all():
                raise RowsError(
                    f"row {self.rows.key[i]}: field attention_mask has {int((mask == 0).sum()):,} zeros of "
                    f"{mask.numel():,}; a row has no padding: cut these tokens out of all its fields"
                )


def tensor_of(fields: Fields, name: str) -> Tensor:
    """A field that is a tensor."""
    value = fields[name]
    assert isinstance(value, Tensor), name
    return value
