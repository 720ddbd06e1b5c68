# pyright: reportMissingImports=false
"""Padding rows in verl's store, made from a schema of the real rows instead of a copy of the first one.

Every field that some row has is there, at the length of the padding row, with a neutral value: unknown fields by
token, mrope positions, experts, images. The schema is kept for the run. To see it, one row is read for each set
of fields that rows have, and a field that no name explains is read once in all rows.

`PaddingRows` also gives padding rows what verl computes later (advantages, values), since TransferQueue returns only
fields that all rows have: one row without would take the field from all others on its rank.
"""

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transfer_queue import KVBatchMeta

from raggedright.integrations.verl.queue import fields_by_key, get_field, get_row, put_rows
from raggedright.integrations.verl.rows import is_padding
from raggedright.rows import PADDING_GROUP, Rows
from raggedright.tensors.column import gather_columns
from raggedright.tensors.kinds import WELL_KNOWN, Kind, infer_kind
from raggedright.tensors.padding import padding_rows
from raggedright.tensors.schema import Schema, infer_schema

_OF_VERL: Mapping[str, Kind] = {"entropy": Kind.RESPONSE, "log_probs": Kind.SEQUENCE}


@dataclass(slots=True)
class PaddingRows:
    """Makes padding rows for the rounds of a run."""

    token_id: int
    min_row_tokens: int
    declared: dict[str, Kind | str] = field(default_factory=dict)  # beside what verl itself writes
    schema: Schema | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])  # a key is never used twice, also not after a resume
    made: int = 0

    def append(self, batch: KVBatchMeta, rows: Rows, count: int) -> KVBatchMeta:
        """The batch with `count` padding rows behind its rows, stored."""
        if count <= 0:
            return batch
        self.schema = self._infer(batch, rows)
        new = padding_rows(
            self.schema, count, token_id=self.token_id, min_row_tokens=self.min_row_tokens, first=self.made
        )
        versions = {name: batch.tags[0].get(name) for name in ("global_steps", "min_global_steps", "max_global_steps")}
        keys = [f"{PADDING_GROUP}{self.run}-{self.made + number}_0_0" for number in range(count)]
        tags = [{"status": "success", **versions, **row.tags} for row in new]
        put_rows(batch, dict(zip(keys, (row.fields for row in new), strict=True)), tags)
        self.made += count
        return KVBatchMeta(
            keys=[*batch.keys, *keys],
            tags=[*batch.tags, *tags],
            partition_id=batch.partition_id,
            fields=batch.fields,
            extra_info=batch.extra_info,
        )

    def complete(self, batch: KVBatchMeta) -> None:
        """Give the batch's padding rows zeros for each field that a real row has and they lack."""
        has = fields_by_key(batch)
        marks = [is_padding(tag) for tag in batch.tags]
        real = [key for key, padding in zip(batch.keys, marks, strict=True) if not padding]
        wanted = {name: key for key in real for name in has[key]}
        lacking: dict[frozenset[str], list[str]] = defaultdict(list)
        for key, padding in zip(batch.keys, marks, strict=True):
            if padding and wanted.keys() - has[key]:
                lacking[frozenset(wanted.keys() - has[key])].append(key)
        for names, keys in lacking.items():
            zeros = self._zeros(batch, {name: wanted[name] for name in sorted(names)})
            if zeros:
                put_rows(batch, dict.fromkeys(keys, zeros))

    def _zeros(self, batch: KVBatchMeta, owner: Mapping[str, str]) -> dict[str, Tensor]:
        """Zeros as long as the padding row's response or sequence, whichever the field covers in a real row."""
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        zeros = {}
        for name, key in owner.items():
            value = get_row(batch, key, [name])[name]
            if isinstance(value, Tensor):
                by_response = value.dim() > 0 and value.size(0) == tags[key]["response_len"]
                length = self.min_row_tokens - by_response
                whole = value.dim() > 0 and value.size(0) in (tags[key]["response_len"], tags[key]["seq_len"])
                shape = (length, *value.shape[1:]) if whole else tuple(value.shape)
                zeros[name] = torch.zeros(shape, dtype=value.dtype)
        return zeros

    def _infer(self, batch: KVBatchMeta, rows: Rows) -> Schema:
        has = fields_by_key(batch)
        example: dict[frozenset[str], int] = {}
        for i, key in enumerate(batch.keys):
            example.setdefault(has[key], i)
        at = list(example.values())
        fields = [get_row(batch, batch.keys[i]) for i in at]
        declared = {**_OF_VERL, **self.declared}
        known = set(declared) | set(WELL_KNOWN) | set(self.schema.decided if self.schema else ())
        unknown = {name for row in fields for name, value in row.items() if isinstance(value, Tensor)} - known
        kinds: dict[str, Kind | str] = {name: self._infer_kind(batch, rows, has, name) for name in sorted(unknown)}
        return infer_schema(
            rows.take(np.array(at, dtype=np.int64)), fields, declared={**declared, **kinds}, known=self.schema
        )

    def _infer_kind(self, batch: KVBatchMeta, rows: Rows, has: Mapping[str, frozenset[str]], name: str) -> Kind:
        """The kind of a field that no name explains, from its shapes in all rows that have it."""
        keys = [key for key in batch.keys if name in has[key]]
        values = dict(zip(keys, get_field(batch.select_keys(keys), name), strict=True))
        of_rows: Sequence[Mapping[str, object]] = [{name: values.get(key)} for key in batch.keys]
        return infer_kind(gather_columns(rows, of_rows)[name])
