"""From planned rows to model inputs and weighted sums; needs torch (the extra `train`)."""

from raggedright.ragged import Ragged
from raggedright.tensors.batch import TensorBatch
from raggedright.tensors.collate import Collator, MicroBatch
from raggedright.tensors.forward import TokenOutputs, forward_log_probs, forward_values
from raggedright.tensors.gae import gae, whiten
from raggedright.tensors.losses import Sums, TokenWeights, entropy_loss, kl_loss, policy_loss, value_loss
from raggedright.tensors.media import image_filler
from raggedright.tensors.off_policy import off_policy_metrics
from raggedright.tensors.padding import PaddingRow, padding_rows, padding_token_id
from raggedright.tensors.parallel import sum_gradients, sum_in_backward, sum_metrics
from raggedright.tensors.row_tokens import RowTokens
from raggedright.tensors.schema import Fields, Kind, Schema, infer_schema

__all__ = [
    "Collator",
    "Fields",
    "Kind",
    "MicroBatch",
    "PaddingRow",
    "Ragged",
    "RowTokens",
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
