# pyright: reportMissingImports=false
"""verl's rows in TransferQueue: their names and lengths, reads and writes of their fields, and padding rows.

A key is `{uid}_{session}_{trajectory}` (the uid may contain underscores itself); a row's tags hold its lengths and mark
padding. TransferQueue returns the rows that it has and the fields that all of them have; here a missing row or field
is an error.

Padding rows are made from a schema of the real rows, not copied from one. They have every field that some real row
has, with a neutral value and the padding row's length: unknown per-token fields, mrope positions, experts, images. The
schema is inferred from one row per field; a field whose name is not known is read in all rows. `PaddingRows.complete`
later adds what verl computes (advantages, values): TransferQueue returns only fields that all rows have, so one row
without a field would remove the field for all other rows on its rank.
"""

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from raggedright.arrays import Floats, Ints
from raggedright.errors import RowsError
from raggedright.rows import PADDING_GROUP, Rows
from raggedright.tensors.padding import padding_rows
from raggedright.tensors.row_fields import WELL_KNOWN, Kind, gather_columns, infer_kind
from raggedright.tensors.row_schema import Schema, infer_schema

_VERL_KINDS: Mapping[str, Kind] = {"entropy": Kind.RESPONSE, "log_probs": Kind.SEQUENCE}


def make_rows(batch: KVBatchMeta) -> Rows:
    """The rows of a batch, in its order."""
    names = [_split_key(key) for key in batch.keys]
    prompt_tokens, response_tokens = (
        [_length(key, tag, name) for key, tag in zip(batch.keys, batch.tags, strict=True)]
        for name in ("prompt_len", "response_len")
    )
    return Rows.from_columns(
        prompt=[prompt for prompt, _, _ in names],
        session=[session for _, session, _ in names],
        trajectory=[trajectory for _, _, trajectory in names],
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        loss_tokens=count_loss_tokens(batch),
        is_padding=np.array([is_padding(tag) for tag in batch.tags], dtype=bool),
    )


def is_padding(tag: Mapping[str, object]) -> bool:
    """Whether a row's tags mark it as padding."""
    return bool(tag.get("is_padding", False))


def _split_key(key: str) -> tuple[str, int, int]:
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
    """The number of tokens that each row's response mask marks."""
    return np.array([int(mask.sum()) for mask in get_field(batch, "response_mask")], dtype=np.int64)


def sum_scores(batch: KVBatchMeta) -> Floats:
    """The reward of each row, before any penalty."""
    return np.array([float(scores.double().sum()) for scores in get_field(batch, "rm_scores")], dtype=np.float64)


def get_row(batch: KVBatchMeta, key: str, names: Sequence[str] | None = None) -> dict[str, object]:
    """Fields of one row by name, without tensordict's wrappers."""
    data = tq.kv_batch_get(keys=[key], partition_id=_partition(batch), select_fields=list(names) if names else None)
    row = {str(name): value for name, value in data[0].items()}
    return {name: value.data if isinstance(value, NonTensorData) else value for name, value in row.items()}


def put_rows(batch: KVBatchMeta, rows: Mapping[str, Mapping[str, object]], tags: list[dict] | None = None) -> None:
    """Write the same fields of several rows."""
    fields = list_of_dict_to_tensordict([dict(row) for row in rows.values()])
    tq.kv_batch_put(keys=list(rows), partition_id=_partition(batch), fields=fields, tags=tags)


def put_numbers(batch: KVBatchMeta, name: str, values: Floats) -> None:
    """Write one number per row, in the batch's order."""
    numbers = torch.from_numpy(np.asarray(values, dtype=np.float32)).unsqueeze(-1)
    fields = TensorDict({name: numbers}, batch_size=[len(values)])
    tq.kv_batch_put(keys=list(batch.keys), partition_id=_partition(batch), fields=fields)


def rows_by_field(batch: KVBatchMeta) -> dict[str, Ints]:
    """The positions of the rows of the batch that have a field, for each field that some of them have.

    All requests go through the controller's request loop, like the writes of agent loops, so they see a consistent
    state while other rows are written.
    """
    client, partition = tq.get_client(), _partition(batch)
    meta = client.kv_retrieve_meta(keys=list(batch.keys), partition_id=partition)
    positions = dict.fromkeys(meta.field_names, np.arange(len(batch.keys)))
    names = client._run_coroutine(client._get_partition_meta(partition)).field_names
    for name in names:
        if name not in positions:  # a field that not all rows of the batch have
            indexes, status = client.get_production_status(data_fields=[name], partition_id=partition)
            has_field = np.isin(meta.global_indexes, indexes[status[:, 0] == 1].numpy())
            if has_field.any():
                positions[name] = np.flatnonzero(has_field)
    return positions


def _partition(batch: KVBatchMeta) -> str:
    assert batch.partition_id is not None
    return batch.partition_id


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
        padding = np.array([is_padding(tag) for tag in batch.tags], dtype=bool)
        missing: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, positions in sorted(rows_by_field(batch).items()):
            real = positions[~padding[positions]]
            without_field = np.setdiff1d(np.flatnonzero(padding), positions)
            if len(real) and len(without_field) and (zeros := self._zeros(batch, int(real[0]), name)) is not None:
                for i in without_field.tolist():
                    missing[i][name] = zeros
        keys_by_names: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, fields in missing.items():
            keys_by_names[tuple(fields)].append(i)
        for positions in keys_by_names.values():
            put_rows(batch, {batch.keys[i]: missing[i] for i in positions})

    def _zeros(self, batch: KVBatchMeta, position: int, name: str) -> Tensor | None:
        """Zeros with the length of the padding row's response or sequence, depending on the field in a real row."""
        value, tag = get_row(batch, batch.keys[position], [name])[name], batch.tags[position]
        if not isinstance(value, Tensor):
            return None
        length = value.size(0) if value.dim() else None
        if length == tag["response_len"]:
            return torch.zeros(self.min_row_tokens - 1, *value.shape[1:], dtype=value.dtype)
        if length == tag["seq_len"]:
            return torch.zeros(self.min_row_tokens, *value.shape[1:], dtype=value.dtype)
        return torch.zeros_like(value)

    def _infer(self, batch: KVBatchMeta, rows: Rows) -> Schema:
        """The schema of the real rows, which come first in the batch, from one row for each field."""
        real = batch.select_keys(batch.keys[: len(rows)])
        with_field = rows_by_field(real)
        examples = sorted({int(positions[0]) for positions in with_field.values()})
        fields = [get_row(real, real.keys[i]) for i in examples]
        kinds: dict[str, Kind | str] = {**_VERL_KINDS, **self.declared}
        known = {*kinds, *WELL_KNOWN, *(self.schema.decided if self.schema else ())}
        unknown = {name for row in fields for name, value in row.items() if isinstance(value, Tensor)} - known
        for name in sorted(unknown):
            kinds[name] = self._infer_kind(real, rows, with_field[name], name)
        return infer_schema(rows.take(np.array(examples, dtype=np.int64)), fields, declared=kinds, known=self.schema)

    def _infer_kind(self, batch: KVBatchMeta, rows: Rows, positions: Ints, name: str) -> Kind:
        """The kind of a field whose name is not known, from its shapes in all rows that have it."""
        values = get_field(batch.select_keys([batch.keys[i] for i in positions]), name)
        value_by_position = dict(zip(positions.tolist(), values, strict=True))
        fields: Sequence[Mapping[str, object]] = [{name: value_by_position.get(i)} for i in range(len(batch.keys))]
        return infer_kind(gather_columns(rows, fields)[name])
