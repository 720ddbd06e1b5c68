# pyright: reportMissingImports=false
"""verl's rows in TransferQueue: reads and writes that fail where TransferQueue would answer with less.

TransferQueue returns the rows it finds and the fields that all of them have. Here a short answer is an error, and
`fields_by_key` says which row has which field.
"""

from collections.abc import Mapping, Sequence
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

_CONTROLLER = {"name": "TransferQueueController", "namespace": "transfer_queue"}


def get_field(batch: KVBatchMeta, name: str) -> list[Tensor]:
    """A field of tensors, one for each row of the batch in its order."""
    data = tq.kv_batch_get(keys=list(batch.keys), partition_id=_partition(batch), select_fields=[name])
    values = list(data[name].unbind()) if name in data.keys() else []  # noqa: SIM118 a TensorDict is no mapping
    if len(values) != len(batch.keys):
        raise RowsError(
            f"{len(batch.keys):,} rows were asked for field {name} and {len(values):,} have it in partition "
            f"{batch.partition_id}; a row was cleared while it was still needed, or an agent loop left the field out"
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
    """Write one number a row, in the batch's order."""
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
    found = {}
    for key, row in zip(batch.keys, has, strict=True):
        found[key] = sets.setdefault(row.tobytes(), frozenset(names[row].tolist()))
    return found


def _partition(batch: KVBatchMeta) -> str:
    assert batch.partition_id is not None
    return batch.partition_id


def _plain(value: object) -> object:
    """What was stored, out of tensordict's wrapping."""
    return value.data if isinstance(value, NonTensorData) else value
