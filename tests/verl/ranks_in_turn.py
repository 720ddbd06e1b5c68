# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""verl's update with its ranks one after another in this process, in float64: its iterator, micro-batches and losses.

This does what `TrainingWorker.train_mini_batch` and the FSDP engine do around a model, without an engine: the model
here is a table of logits by token, and one of values. verl's own functions cut mini-batches (`make_iterator`) and
micro-batches (`prepare_micro_batches`), and join metrics (`Metric.aggregate_dp`, `reduce_metrics`); gradients are
averaged over ranks as FSDP does.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine.utils import prepare_micro_batches

from raggedright.rows import Rows

VOCABULARY = 11
Row = dict[str, Tensor]


class Model(torch.nn.Module):
    """Logits of the next token and a value, both looked up by token."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64))
        self.values = torch.nn.Parameter(torch.randn(VOCABULARY, generator=generator, dtype=torch.float64))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """As verl's engines return it: at token t the log-prob of token t + 1, its entropy, and the value."""
        ids, offsets = input_ids.values(), input_ids.offsets()
        log_probs = torch.log_softmax(self.logits[ids], dim=-1)
        chosen = log_probs.gather(-1, ids.roll(-1).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        flat = {"log_probs": chosen, "entropy": entropy, "values": self.values[ids]}
        return {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in flat.items()}

    def gradient(self) -> Tensor:
        """All gradients in one vector."""
        return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in self.parameters()])


def make_row(prompt: int, response: int, generator: torch.Generator, *, padding: bool = False) -> Row:
    """One row with all fields that a loss reads; every fifth response token is an observation."""

    def draw() -> Tensor:
        return 0.7 * torch.randn(response, generator=generator, dtype=torch.float64)

    mask = (torch.arange(response) % 5 != 4).long() * (not padding)
    ids = torch.randint(VOCABULARY, (prompt + response,), generator=generator)
    old = -2.2 + draw()
    return {
        "input_ids": ids,
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": old,
        "ref_log_prob": old + 0.3 * draw(),
        "advantages": draw() * (not padding),
        "values": draw(),
        "returns": draw(),
    }


def make_batch(rows: Rows, *, seed: int = 0) -> list[Row]:
    """Fields of these rows, including padding rows; masks have as many ones as the rows have loss tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for prompt, response, padding in zip(
        rows.prompt_tokens.tolist(), rows.response_tokens.tolist(), rows.is_padding.tolist(), strict=True
    ):
        made.append(make_row(prompt, response, generator, padding=padding))
    return made


def count_loss_tokens(response: int) -> int:
    """Loss tokens of a response of this length."""
    return int((np.arange(response) % 5 != 4).sum())


def update(
    model: Model,
    rows_of_rank: Sequence[Sequence[Row]],
    loss: Callable,
    *,
    num_mini_batch: int,
    info: dict[str, object],
    max_tokens: int = 40,
) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient of each mini-batch at unchanged weights, and verl's metrics of the update."""
    dp_size = len(rows_of_rank)
    iterators = []
    for dp_rank, rows in enumerate(rows_of_rank):
        data = list_of_dict_to_tensordict(list(rows))
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=max_tokens, dp_size=dp_size, **info)
        size = len(rows) // num_mini_batch
        iterators.append(tu.make_iterator(data, size, epochs=1, seed=dp_rank, dataloader_kwargs={"shuffle": False}))
    gradients, metrics = [], {}
    for parts in zip(*iterators, strict=True):
        model.zero_grad()
        batch_num_tokens = sum(int(part["loss_mask"].sum()) for part in parts)
        of_ranks = [_run_rank(model, part, loss, batch_num_tokens, _most_micro_batches(parts)) for part in parts]
        gradients.append(model.gradient() / dp_size)
        append_to_dict(metrics, _join(of_ranks))
    return gradients, reduce_metrics(metrics)


def _most_micro_batches(parts: Sequence[TensorDict]) -> int:
    return max(len(prepare_micro_batches(part)[0]) for part in parts)


def _run_rank(model: Model, part: TensorDict, loss: Callable, batch_num_tokens: int, least: int) -> dict[str, object]:
    tu.assign_non_tensor(part, batch_num_tokens=batch_num_tokens)
    metrics: dict[str, object] = {}
    for micro_batch in prepare_micro_batches(part, min_num_micro_batch=least)[0]:
        value, of_micro_batch = loss(model_output=model(micro_batch["input_ids"]), data=micro_batch)
        value.backward()
        append_to_dict(metrics, of_micro_batch)
    return metrics


def _join(of_ranks: Sequence[dict[str, object]]) -> dict[str, object]:
    """Metrics of one mini-batch over ranks and micro-batches, as the worker joins them."""
    joined = {}
    for name in of_ranks[0]:
        values = [metrics[name] for metrics in of_ranks]
        joined[name] = Metric.aggregate_dp(values) if isinstance(values[0], Metric) else list(chain(*values))
    return joined
