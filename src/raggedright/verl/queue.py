# pyright: reportMissingImports=false
"""verl's rows in TransferQueue: their names and lengths, reads and writes of their fields, and padding rows.

A key is `{uid}_{session}_{trajectory}` (the uid may contain underscores itself); a row's tags hold its lengths and mark
padding. TransferQueue returns the rows that it has and the fields that all of them have; here a missing row or field
is an error.

Padding rows are made from a schema of the real rows, not copied from one. They have every field that some real row
has, with a neutral value and the padding row's length: unknown per-token fields, mrope positions, experts, images. The
schema is inferred once: one row is read for each distinct set of fields, and a field whose name is not known is read
once in all rows. `PaddingRows.complete` later adds what verl computes (advantages, values): TransferQueue returns only
fields that all rows have, so one row without a field would remove the field for all other rows on its rank.
"""

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from raggedright.arrays import Floats, Ints
from raggedright.errors import RowsError
from raggedright.rows import PADDING_GROUP, Rows
from raggedright.tensors.column import gather_columns
from raggedright.tensors.kinds import WELL_KNOWN, Kind, infer_kind
from raggedright.tensors.padding import padding_rows
from raggedright.tensors.schema import Schema, infer_schema

_CONTROLLER = {"name": "TransferQueueController", "namespace": "transfer_queue"}
_OF_VERL: Mapping[str, Kind] = {"entropy": Kind.RESPONSE, "log_probs": Kind.SEQUENCE}


def rows_of(keys: Sequence[str], tags: Sequence[Mapping[str, object]], loss_tokens: Ints) -> Rows:
    """The rows of a batch, in its order; `loss_tokens` counts each row's response mask."""
    names = [_name(key) for key in keys]
    lengths = [
        [_length(key, tag, name) for name in ("prompt_len", "response_len")]
        for key, tag in zip(keys, tags, strict=True)
    ]
    return Rows.from_columns(
        prompt=[prompt for prompt, _, _ in names],
        session=[session for _, session, _ in names],
        trajectory=[trajectory for _, _, trajectory in names],
        prompt_tokens=[prompt for prompt, _ in lengths],
        response_tokens=[response for _, response in lengths],
        loss_tokens=loss_tokens,
        is_padding=np.array([is_padding(tag) for tag in tags], dtype=bool),
    )


def is_padding(tag: Mapping[str, object]) -> bool:
    """Whether a row's tags mark it as padding."""
    return bool(tag.get("is_padding", False))


def _name(key: str) -> tuple[str, int, int]:
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise RowsError(
            f"row {key!r}: a key of verl's agent loop has the form uid_session_trajectory, the last two being integers"
        )
    return parts[0], int(parts[1]), int(parts[2])


def _length(key: str, tag: Mapping[str, object], name: str) -> int:
    value = tag.get(name)
    if not isinstance(value, int):
        raise RowsError(f"row {key}: its tag {name} is {value!r}; the agent loop must set it to the number of tokens")
    return value


def get_field(batch: KVBatchMeta, name: str) -> list[Tensor]:
    """A field of tensors, one for each row of the batch in its order."""
    data = tq.kv_batch_get(keys=list(batch.keys), partition_id=_partition(batch), select_fields=[name])
    values = list(data[name].unbind()) if name in data.keys() else []  # noqa: SIM118 a TensorDict is no mapping
    if len(values) != len(batch.keys):
        raise RowsError(
            f"{len(batch.keys):,} rows were read and {len(values):,} have field {name} in partition "
            f"{batch.partition_id}; a row was cleared too early, or an agent loop did not write the field"
        )
    return values


def count_loss_tokens(batch: KVBatchMeta) -> Ints:
    """How many tokens each row's response mask marks."""
    return np.array([int(mask.sum()) for mask in get_field(batch, "response_mask")], dtype=np.int64)


def sum_scores(batch: KVBatchMeta) -> Floats:
    """The reward of each row, before any penalty."""
    return np.array([float(scores.double().sum()) for scores in get_field(batch, "rm_scores")], dtype=np.float64)


def get_row(batch: KVBatchMeta, key: str, names: Sequence[str] | None = None) -> dict[str, object]:
    """Fields of one row by name."""
    data = tq.kv_batch_get(keys=[key], partition_id=_partition(batch), select_fields=list(names) if names else None)
    row = data[0]
    return {str(name): _plain(row[name]) for name in row.keys()}  # noqa: SIM118


def put_rows(batch: KVBatchMeta, rows: Mapping[str, Mapping[str, object]], tags: list[dict] | None = None) -> None:
    """Write the same fields of several rows."""
    fields = list_of_dict_to_tensordict([dict(row) for row in rows.values()])
    tq.kv_batch_put(keys=list(rows), partition_id=_partition(batch), fields=fields, tags=tags)


def put_numbers(batch: KVBatchMeta, name: str, values: Floats) -> None:
    """Write one number per row, in the batch's order."""
    numbers = torch.from_numpy(np.asarray(values, dtype=np.float32)).unsqueeze(-1)
    fields = TensorDict({name: numbers}, batch_size=[len(values)])
    tq.kv_batch_put(keys=list(batch.keys), partition_id=_partition(batch), fields=fields)


def fields_by_key(batch: KVBatchMeta) -> dict[str, frozenset[str]]:
    """The names of the fields that each row of the batch has."""
    controller = ray.get_actor(**_CONTROLLER)
    status: Any = ray.get(controller.get_partition_snapshot.remote(batch.partition_id))
    names = np.array(sorted(status.field_name_mapping, key=status.field_name_mapping.__getitem__), dtype=object)
    at = [status.keys_mapping[key] for key in batch.keys]
    has = status.production_status[at][:, : len(names)].numpy() == 1
    sets: dict[bytes, frozenset[str]] = {}
    fields = {}
    for key, row in zip(batch.keys, has, strict=True):
        fields[key] = sets.setdefault(row.tobytes(), frozenset(names[row].tolist()))
    return fields


def _partition(batch: KVBatchMeta) -> str:
    assert batch.partition_id is not None
    return batch.partition_id


def _plain(value: object) -> object:
    """The stored value without tensordict's wrapper."""
    return value.data if isinstance(value, NonTensorData) else value


@dataclass(slots=True)
class PaddingRows:
    """Makes padding rows for the rounds of a run."""

    token_id: int
    min_row_tokens: int
    declared: dict[str, Kind | str] = field(default_factory=dict)  # in addition to the fields that verl writes
    schema: Schema | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])  # keys are unique, also after a resume
    made: int = 0

    def append(self, batch: KVBatchMeta, rows: Rows, count: int) -> KVBatchMeta:
        """Store `count` padding rows; returns the batch with them after its rows."""
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
        """Write zeros for each field that a real row has and a padding row does not."""
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
        """Zeros with the length of the padding row's response or sequence, whichever the field has in a real row."""
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        zeros = {}
        for name, key in owner.items():
            value = get_row(batch, key, [name])[name]
            if isinstance(value, Tensor):
                by_response = value.dim() > 0 and value.size(0) == tags[key]["response_len"]
                length = self.min_row_tokens - by_response
                by_token = value.dim() > 0 and value.size(0) in (tags[key]["response_len"], tags[key]["seq_len"])
                shape = (length, *value.shape[1:]) if by_token else tuple(value.shape)
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
        """The kind of a field whose name is not known, from its shapes in all rows that have it."""
        keys = [key for key in batch.keys if name in has[key]]
        values = dict(zip(keys, get_field(batch.select_keys(keys), name), strict=True))
        of_rows: Sequence[Mapping[str, object]] = [{name: values.get(key)} for key in batch.keys]
        return infer_kind(gather_columns(rows, of_rows)[name])
