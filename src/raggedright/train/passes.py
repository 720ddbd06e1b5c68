"""Forward passes over a round's rows before it trains: log-probs of the policy and the reference, and values.

Each rank runs the rows that the plan gave it; then all ranks have the numbers of all rows, by one sum over ranks in
which every token has one rank that knows it and zeros from the others: exact in any type.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from raggedright.arrays import Ints, within
from raggedright.config.sections import Model
from raggedright.plan.cut import Step
from raggedright.rows import Rows
from raggedright.tensors.batch import TensorBatch
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.forward import TEMPERATURES
from raggedright.train.world import World

Flat = Tensor  # over the response tokens of a round's real rows, row after row


def computing(model: Model, world: World) -> AbstractContextManager[object]:
    """The type that a model computes in."""
    if model.compute_dtype is None:
        return nullcontext()
    return torch.autocast(world.device.type, dtype=getattr(torch, model.compute_dtype))


def temperature_fields(batch: TensorBatch) -> tuple[str, ...]:
    """What a micro-batch takes along so that `temperature_of` knows: nothing where all tokens have one temperature."""
    return (TEMPERATURES,) if batch.has(TEMPERATURES) else ()


@torch.no_grad()
def run_forward(
    batch: TensorBatch, steps: Sequence[Step], world: World, outputs: Mapping[str, Callable[[MicroBatch], Tensor]]
) -> Iterator[tuple[Ints, MicroBatch, dict[str, Tensor]]]:
    """Each micro-batch of this rank with its outputs by name, flat over response tokens."""
    names = ("rollout_log_probs", *temperature_fields(batch))
    for step in steps:
        for position, micro in batch.micro_batches(step, world.dp_rank, names):
            here = micro.to(world.device)
            yield position, here, {name: output(here) for name, output in outputs.items()}


class TokenTable:
    """Numbers of every response token of a round's real rows; a rank fills in those it has, `exchange` the others."""

    def __init__(self, rows: Rows, names: Sequence[str], dtype: torch.dtype) -> None:
        self._num_rows = len(rows)
        self._starts = np.cumsum(rows.response_tokens) - rows.response_tokens
        self._names = list(names)
        self._table = torch.zeros(len(self._names), int(rows.response_tokens.sum()), dtype=dtype)

    def fill(self, position: Ints, micro: MicroBatch, flat: Mapping[str, Tensor]) -> None:
        """Write the numbers of a micro-batch's rows, by name; padding rows have no place here."""
        tokens = np.array(micro.response_tokens, dtype=np.int64)
        real = np.repeat(position < self._num_rows, tokens)
        starts = self._starts[np.minimum(position, self._num_rows - 1)]
        place, kept = torch.from_numpy((np.repeat(starts, tokens) + within(tokens))[real]), torch.from_numpy(real)
        for name, values in flat.items():
            self._table[self._names.index(name), place] = values.cpu()[kept].to(self._table.dtype)

    def exchange(self, world: World) -> dict[str, Flat]:
        """All rows' numbers, by name."""
        return dict(zip(self._names, world.sum(self._table.to(world.device)).cpu(), strict=True))
