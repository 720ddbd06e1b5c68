"""From planned rows to tensors, and the forward passes before the update: log-probs of policy and reference, values.

Each rank reads and runs the rows that the plan gave it. Then all ranks get the numbers of all rows, by one sum over
ranks in which every token has one rank that knows it and zeros from the others: exact in any dtype.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.agents.vision import MEDIA
from raggedright.arrays import Ints, index_in_run
from raggedright.config.schema import Config
from raggedright.plan.planner import Plan
from raggedright.rows import Rows
from raggedright.sessions import TOKEN_FIELDS, SessionTable
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.forward import forward_chosen, forward_values, temperature_of
from raggedright.tensors.losses import off_policy_metrics
from raggedright.tensors.row_schema import Fields, infer_schema
from raggedright.tensors.tensor_batch import TensorBatch
from raggedright.train.lora import adapter_off
from raggedright.train.setup import Setup
from raggedright.train.token_advantages import TokenVector
from raggedright.train.update import add_metrics, mixed_precision, replaying, sum_metrics, temperature_fields
from raggedright.train.world import TrainError, World

MODEL_FIELDS = (*TOKEN_FIELDS, "position_ids", "routed_experts")  # what the model or the schema knows by name


def read_batch(setup: Setup, table: SessionTable, plan: Plan) -> TensorBatch:
    """The tensors of this rank's rows, read from the store, with the plan's padding rows after them."""
    rows, positions = table.rows, rank_positions(plan, setup.world.dp_rank)
    if not len(positions):  # a rank without a row still needs one, as a template for its padding rows
        positions = np.arange(min(len(rows), 1))
    fields: list[Fields] = [{}] * len(rows)
    extra: dict[str, dict[int, Tensor]] = {name: {} for name in sorted(table.extra_fields) if _is_per_token(name)}
    for p, arrays in zip(positions.tolist(), setup.store.read(table.row_keys(positions)), strict=True):
        fields[p] = model_fields(arrays, has_vision=setup.vision is not None)
        for name in extra.keys() & arrays.keys():
            extra[name][p] = torch.from_numpy(arrays[name])
    schema = infer_schema(rows.take(positions), [fields[p] for p in positions.tolist()])
    batch = TensorBatch.of(plan, fields, schema, setup.collator)
    for name, by_row in extra.items():
        batch = batch.with_responses(name, _flat_field(rows, name, by_row, setup.config))
    return batch


def rank_positions(plan: Plan, dp_rank: int) -> Ints:
    """The real rows that a rank runs, in any role, in ascending order."""
    is_used = np.zeros(len(plan.padded_rows), dtype=bool)
    for steps in plan.roles.values():
        for step in steps:
            bounds = step.bounds[dp_rank * step.num_slots], step.bounds[(dp_rank + 1) * step.num_slots]
            is_used[step.row[slice(*bounds)]] = True
    return np.flatnonzero(is_used[: len(plan.rows)])


def model_fields(arrays: Mapping[str, NDArray], *, has_vision: bool) -> Fields:
    """The tensors of a row that the model or the schema takes; media are a mapping inside it."""
    fields: dict[str, object] = {n: torch.from_numpy(array) for n, array in arrays.items() if n in MODEL_FIELDS}
    if has_vision:
        prefix = f"{MEDIA}."
        media = {n.removeprefix(prefix): torch.from_numpy(a) for n, a in arrays.items() if n.startswith(prefix)}
        fields[MEDIA] = media
    return fields


def _is_per_token(name: str) -> bool:
    """Whether a field was attached by the agent, with one number per response token."""
    return name not in MODEL_FIELDS and not name.startswith(f"{MEDIA}.")


def _flat_field(rows: Rows, name: str, by_row: Mapping[int, Tensor], config: Config) -> TokenVector:
    """A field over the response tokens of all rows; 0 where a row does not have it or belongs to another rank."""
    flat = torch.zeros(int(rows.response_tokens.sum()), dtype=_float_type(config))
    parts = flat.split(rows.response_tokens.tolist())
    for p, tensor in by_row.items():
        if tensor.shape != parts[p].shape:
            raise TrainError(
                f"row {rows.key[p]}: field {name} has shape {tuple(tensor.shape)} and the response "
                f"{len(parts[p]):,} tokens; give one number per response token"
            )
        parts[p].copy_(tensor)
    return flat


def _float_type(config: Config) -> torch.dtype:
    """The dtype of per-token numbers between the passes."""
    return torch.float64 if config.model.dtype == "float64" else torch.float32


@torch.no_grad()
def run_forward_passes(setup: Setup, batch: TensorBatch) -> tuple[dict[str, TokenVector], dict[str, float]]:
    """Masks, old and reference log-probs and values of all rows, and the off-policy metrics."""
    config, world, plan = setup.config, setup.world, batch.plan
    names = ["response_mask", "old_log_probs"]
    names += ["ref_log_probs"] if setup.reference is not None else []
    names += ["values"] if setup.critic else []
    table = TokenValues(plan.rows, names, _float_type(config))
    has_loss = (batch.rows.loss_tokens > 0) & ~batch.rows.is_padding
    row_weights = torch.from_numpy(has_loss / max(has_loss.sum(), 1))
    totals: dict[str, Tensor] = {}
    fields = ("rollout_log_probs", *temperature_fields(batch))
    with mixed_precision(config.model, world):
        for step in plan.steps("forward"):
            for position, micro in batch.micro_batches(step, world.dp_rank, fields):
                micro = micro.to(world.device)
                temperature = temperature_of(micro, config.rollout.temperature)
                with replaying(setup.experts, micro):
                    log_probs = forward_chosen(setup.actor.model, micro, temperature=temperature)
                outputs = {"old_log_probs": log_probs, "response_mask": micro.weights.mean != 0}
                if setup.reference is not None:
                    with adapter_off(setup.reference) if config.has_adapter else nullcontext():
                        outputs["ref_log_probs"] = forward_chosen(setup.reference, micro, temperature=temperature)
                table.fill(position, micro, outputs)
                weights = row_weights[torch.from_numpy(position)].to(world.device)
                rollout_log_probs = micro.fields["rollout_log_probs"]
                add_metrics(totals, off_policy_metrics(log_probs, rollout_log_probs, micro.weights, weights))
        for step in plan.steps("critic") if setup.critic else ():
            if setup.critic and step.epoch == 0:
                for position, micro in batch.micro_batches(step, world.dp_rank):
                    micro = micro.to(world.device)
                    table.fill(position, micro, {"values": forward_values(setup.critic.model, micro)})
    off_policy = sum_metrics(world, [totals])
    return table.sum_over_ranks(world), {name: float(value) for name, value in off_policy.items()}


class TokenValues:
    """Numbers of every response token of a round's real rows; a rank fills in its own, `sum_over_ranks` the others."""

    def __init__(self, rows: Rows, names: Sequence[str], dtype: torch.dtype) -> None:
        self._num_rows = len(rows)
        self._starts = np.cumsum(rows.response_tokens) - rows.response_tokens
        self._names = list(names)
        self._table = torch.zeros(len(self._names), int(rows.response_tokens.sum()), dtype=dtype)

    def fill(self, position: Ints, micro: MicroBatch, flat: Mapping[str, Tensor]) -> None:
        """Write the numbers of the real rows of a micro-batch, by name."""
        tokens = np.array(micro.response_tokens, dtype=np.int64)
        is_real = np.repeat(position < self._num_rows, tokens)
        starts = self._starts[np.minimum(position, self._num_rows - 1)]
        place = torch.from_numpy((np.repeat(starts, tokens) + index_in_run(tokens))[is_real])
        for name, values in flat.items():
            kept = values.cpu()[torch.from_numpy(is_real)]
            self._table[self._names.index(name), place] = kept.to(self._table.dtype)

    def sum_over_ranks(self, world: World) -> dict[str, TokenVector]:
        """The numbers of all rows, by name."""
        return dict(zip(self._names, world.sum(self._table.to(world.device)).cpu(), strict=True))
