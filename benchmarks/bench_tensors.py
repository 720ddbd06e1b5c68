"""Padding rows and schema checks compared with a lower bound for each, and the three layouts compared with each other.

    make bench-tensors

10,000 padding rows compared with 10,000 copies of one dict; the checks of 32,768 rows x 8 fields compared with joining
the same tensors once, which any collation does. Layouts: collation, forward and backward pass of 16 rows, two prompts
with eight sessions each, on a Qwen3 with 4 layers of width 256.
"""

import time
from collections.abc import Callable
from typing import get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from raggedright import Rows
from raggedright.plan.layout import Collate
from raggedright.tensors import Collator, forward_log_probs, infer_schema, padding_rows
from raggedright.tensors.tree import even_tokens_of

NAMES = ("rm_scores", "rollout_log_probs", "old_log_probs", "advantages", "values", "unknown_field")


def best_of_3(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def layouts() -> None:
    """Seconds of a pass by layout, and the saving of the tree compared with the better of the others."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1_000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **heads))
    columns = ("prompt + reply tokens", *(f"{how}, s" for how in get_args(Collate)), "tree is faster by")
    table = Table(*columns, box=None)
    for prompt, reply in ((256, 32), (128, 128), (32, 256)):
        rows = Rows.from_columns(
            prompt=[f"p{i // 8}" for i in range(16)],
            session=np.arange(16) % 8,
            trajectory=np.zeros(16, dtype=np.int64),
            prompt_tokens=np.full(16, prompt),
            response_tokens=np.full(16, reply),
        )
        prompts = torch.randint(1_000, (2, prompt))
        fields = [
            {
                "input_ids": torch.cat((prompts[i // 8], torch.randint(1_000, (reply,)))),
                "response_mask": torch.ones(reply),
            }
            for i in range(16)
        ]

        def one_pass(how: Collate, rows: Rows = rows, fields: list = fields) -> None:
            collator = Collator(how=how, token_id=0, even_tokens=even_tokens_of(model))
            micro = collator(rows, fields, weight=np.ones(16), step_loss_tokens=1)
            forward_log_probs(model, micro).log_probs.sum().backward()

        seconds = [best_of_3(lambda how=how: one_pass(how)) for how in get_args(Collate)]
        ratio = min(seconds[:-1]) / seconds[-1]
        table.add_row(f"{prompt} + {reply}", *(f"{each:.2f}" for each in seconds), f"{ratio:.1f} x")
    Console().print(table)


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(10, 200, 32_768), rng.integers(10, 1_200, 32_768)
    rows = Rows.from_columns(
        prompt=[f"p{i // 8}" for i in range(32_768)],
        session=np.arange(32_768) % 8,
        trajectory=np.zeros(32_768, dtype=np.int64),
        prompt_tokens=prompt,
        response_tokens=response,
    )
    fields = [
        {
            "input_ids": torch.ones(p + r, dtype=torch.long),
            "response_mask": torch.ones(r, dtype=torch.long),
            **{name: torch.ones(r) for name in NAMES},
        }
        for p, r in zip(prompt.tolist(), response.tolist(), strict=True)
    ]
    schema = infer_schema(rows, fields)
    (one,) = padding_rows(schema, 1, token_id=0)
    table = Table("what", "seconds", "least", "ratio", box=None)
    cases = {
        "10,000 padding rows": (
            lambda: padding_rows(schema, 10_000, token_id=0),
            lambda: [dict(one.fields) for _ in range(10_000)],
        ),
        "checks of 32,768 rows": (
            lambda: infer_schema(rows, fields),
            lambda: [torch.cat([row[name] for row in fields]) for name in fields[0]],
        ),
    }
    for what, (ours, least) in cases.items():
        seconds, bound = best_of_3(ours), best_of_3(least)
        table.add_row(what, f"{seconds:.3f}", f"{bound:.3f}", f"{seconds / bound:.1f} x")
    Console().print(table)
    layouts()


if __name__ == "__main__":
    main()
