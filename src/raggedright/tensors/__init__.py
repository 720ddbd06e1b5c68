"""From planned rows to model inputs and weighted sums; needs torch (the extra `train`)."""

from raggedright.tensors.collate import Collator, MicroBatch
from raggedright.tensors.forward import TokenOutputs, forward_log_probs, forward_values
from raggedright.tensors.gae import gae, whiten
from raggedright.tensors.images import image_filler
from raggedright.tensors.losses import (
    Sums,
    TokenWeights,
    entropy_loss,
    kl_loss,
    off_policy_metrics,
    policy_loss,
    value_loss,
)
from raggedright.tensors.padding import PaddingRow, padding_rows, padding_token_id
from raggedright.tensors.parallel import sum_gradients, sum_in_backward, sum_metrics
from raggedright.tensors.row_fields import Fields, Kind
from raggedright.tensors.row_schema import Schema, infer_schema
from raggedright.tensors.tensor_batch import TensorBatch

__all__ = [
    "Collator",
    "Fields",
    "Kind",
    "MicroBatch",
    "PaddingRow",
    "Schema",
    "Sums",
    "TensorBatch",
    "TokenOutputs",
    "TokenWeights",
    "entropy_loss",
    "forward_log_probs",
    "forward_values",
    "gae",
    "image_filler",
    "infer_schema",
    "kl_loss",
    "off_policy_metrics",
    "padding_rows",
    "padding_token_id",
    "policy_loss",
    "sum_gradients",
    "sum_in_backward",
    "sum_metrics",
    "value_loss",
    "whiten",
]
