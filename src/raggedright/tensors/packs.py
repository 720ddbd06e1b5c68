"""Whether a model keeps the rows of a pack or a tree apart: found out by two passes; families differ and none says so.

Most models of transformers see from the positions where a row begins. One that does not lets a row read those before
it: no error, and log-probs that are wrong by nats.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from raggedright.errors import ConfigError
from raggedright.rows import Rows
from raggedright.tensors.collate import Collator
from raggedright.tensors.forward import forward_log_probs

_ROW_TOKENS = 6
_TOLERANCE = 1e-2  # a sum of another order is far below it, another row's tokens far above


def check_packs(model: nn.Module, collator: Collator) -> None:
    """A ConfigError if what stands in front of a row in a pack or a tree changes its log-probs."""
    if collator.how == "padded":
        return
    collator = replace(collator, even_tokens=10**9)  # so that a tree is one
    rows = Rows.from_columns(
        prompt=["before", "behind"],
        session=[0, 0],
        trajectory=[0, 0],
        prompt_tokens=[1, 1],
        response_tokens=[_ROW_TOKENS - 1] * 2,
    )
    mask = torch.ones(_ROW_TOKENS - 1, dtype=torch.long)
    behind = {"input_ids": torch.arange(_ROW_TOKENS) % 2, "response_mask": mask}
    found = []
    for token in (0, 1):
        before = {"input_ids": torch.full((_ROW_TOKENS,), token), "response_mask": mask}
        micro = collator(rows, [before, behind], weight=np.zeros(2), step_loss_tokens=1)
        with torch.no_grad():
            micro = micro.to(next(model.parameters()).device)
            found.append(micro.per_row(forward_log_probs(model, micro).log_probs)[1])
    drift = float((found[0] - found[1]).abs().max())
    if drift > _TOLERANCE:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ConfigError(
            f"train.collate is {collator.how} and model type {kind!r} does not keep its rows apart (log-probs of a "
            f"row change by {drift:.2g} with the row before it); set train.collate = 'padded'"
        )
