"""The tensors of a planned batch: real rows, padding rows behind them, each found by its position in the plan.

Invariants: position p of a plan is row p here, on every rank; a rank needs the fields of the rows that it runs, and
of no other; a micro-batch's weights are the plan's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints
from raggedright.errors import ConfigError, RowsError
from raggedright.plan.cut import Step
from raggedright.plan.plan import Plan
from raggedright.ragged import Ragged, join
from raggedright.rows import Rows
from raggedright.tensors.collate import Collator, MicroBatch
from raggedright.tensors.padding import padding_rows
from raggedright.tensors.row_tokens import RowTokens
from raggedright.tensors.schema import Fields, Schema


@dataclass(frozen=True, slots=True, eq=False)
class TensorBatch:
    """Row p of the plan has the numbers and tensors of row p of `tokens`; make one with `of`."""

    plan: Plan
    tokens: RowTokens
    collator: Collator

    @property
    def rows(self) -> Rows:
        """The plan's rows, then its padding rows."""
        return self.tokens.rows

    @property
    def fields(self) -> Sequence[Fields]:
        """What each of them carries."""
        return self.tokens.fields

    @classmethod
    def of(
        cls,
        plan: Plan,
        fields: Sequence[Fields],
        schema: Schema,
        collator: Collator,
        *,
        joined: Mapping[str, Ragged] | None = None,
    ) -> "TensorBatch":
        """The fields of the plan's rows, in their order, and padding rows made from the schema.

        `joined` has fields that are joined already; a row that this rank never runs may be empty there.
        """
        if len(fields) != len(plan.rows):
            raise RowsError(
                f"{len(fields):,} rows have fields and {len(plan.rows):,} are planned; give each row its own"
            )
        layout = plan.layout
        if (collator.how, collator.min_row_tokens) != (layout.collate, layout.min_row_tokens):
            raise ConfigError(
                f"the plan is for collate {layout.collate}, min_row_tokens {layout.min_row_tokens} and the Collator is "
                f"for {collator.how}, {collator.min_row_tokens}, so that budgets would not hold; make them agree"
            )
        padding = padding_rows(
            schema, plan.num_padding_rows, token_id=collator.token_id, min_row_tokens=layout.min_row_tokens
        )
        more = [row.fields for row in padding]
        vectors = {name: _with_padding(ragged, [row[name] for row in more]) for name, ragged in (joined or {}).items()}
        return cls(plan, RowTokens(plan.padded_rows, [*fields, *more], vectors), collator)

    def micro_batches(self, step: Step, dp_rank: int, names: Sequence[str] = ()) -> Iterator[tuple[Ints, MicroBatch]]:
        """Positions and tensors of each micro-batch of a rank, slot by slot."""
        real = step.row[step.row < len(self.plan.rows)]
        step_loss_tokens = int(self.plan.rows.loss_tokens[real].sum())
        for slot in range(step.num_slots):
            position = step.micro_batch(dp_rank, slot)
            weight = step.micro_batch_weight(dp_rank, slot)
            micro = self.collator.cut(
                self.tokens, position, weight=weight, step_loss_tokens=step_loss_tokens, names=names
            )
            yield position, micro

    def with_responses(self, name: str, flat: Tensor) -> "TensorBatch":
        """This batch with one field more: a value for each response token of the real rows; padding rows get zeros."""
        more = int(self.rows.response_tokens[len(self.plan.rows) :].sum())
        zeros = flat.new_zeros(more, *flat.shape[1:])
        return TensorBatch(self.plan, self.tokens.with_responses(name, torch.cat((flat, zeros))), self.collator)


def _with_padding(real: Ragged, padding: Sequence[object]) -> Ragged:
    if not padding:
        return real
    more = join(padding)
    flat = torch.cat((real.flat, more.flat.to(real.flat.dtype)))
    return Ragged.of(flat, np.append(real.sizes, more.sizes))
