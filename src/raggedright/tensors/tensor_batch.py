"""The tensors of a planned batch: the real rows, then the padding rows, each at its position in the plan.

Invariants: position p of a plan is row p here, on every rank; a rank needs the fields of the rows that it runs, and
of no other; a micro-batch's weights are the plan's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from raggedright.arrays import Ints, offsets
from raggedright.errors import ConfigError, RowsError
from raggedright.plan.cut import Step
from raggedright.plan.planner import Plan
from raggedright.rows import Rows
from raggedright.tensors.collate import Collator, MicroBatch
from raggedright.tensors.padding import padding_rows
from raggedright.tensors.row_fields import Fields
from raggedright.tensors.row_schema import Schema


@dataclass(frozen=True, slots=True, eq=False)
class TensorBatch:
    """A plan with the fields of its rows; make one with `of`.

    - `fields`: one mapping per row, padding rows included; a row that this rank does not run may be empty.
    - `added`: fields from `with_responses`, each one vector over the response tokens of all rows.
    """

    plan: Plan
    fields: Sequence[Fields]
    collator: Collator
    added: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Rows:
        """The plan's rows, then its padding rows."""
        return self.plan.padded_rows

    @classmethod
    def of(cls, plan: Plan, fields: Sequence[Fields], schema: Schema, collator: Collator) -> "TensorBatch":
        """The fields of the plan's rows, in their order, and padding rows made from the schema."""
        if len(fields) != len(plan.rows):
            raise RowsError(
                f"{len(fields):,} rows have fields and {len(plan.rows):,} are planned; give one mapping per planned row"
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
        return cls(plan, [*fields, *(row.fields for row in padding)], collator)

    def micro_batches(self, step: Step, dp_rank: int, names: Sequence[str] = ()) -> Iterator[tuple[Ints, MicroBatch]]:
        """Positions and tensors of each micro-batch of a rank, slot by slot; `names`: the per-response-token fields."""
        real = step.row[step.row < len(self.plan.rows)]
        step_loss_tokens = int(self.plan.rows.loss_tokens[real].sum())
        bounds = offsets(self.rows.response_tokens).tolist()
        added = {name: flat for name, flat in self.added.items() if name in names}
        for slot in range(step.num_slots):
            position = step.micro_batch(dp_rank, slot)
            fields = [
                {**self.fields[p], **{name: flat[bounds[p] : bounds[p + 1]] for name, flat in added.items()}}
                for p in position.tolist()
            ]
            weight = step.micro_batch_weight(dp_rank, slot)
            rows = self.rows.take(position)
            yield position, self.collator(rows, fields, weight=weight, step_loss_tokens=step_loss_tokens, names=names)

    def has(self, name: str) -> bool:
        """Whether a field was added with `with_responses`."""
        return name in self.added

    def with_responses(self, name: str, flat: Tensor) -> "TensorBatch":
        """This batch with one more field: a value for each response token of the real rows; padding rows get zeros."""
        num_padding_tokens = int(self.rows.response_tokens[len(self.plan.rows) :].sum())
        zeros = flat.new_zeros(num_padding_tokens, *flat.shape[1:])
        return replace(self, added={**self.added, name: torch.cat((flat, zeros))})
