"""Padding rows and the schema's checks, beside the least that each could take.

    make bench-tensors

10,000 padding rows against copying one dict 10,000 times; the checks of 32,768 rows x 8 fields against joining
the same tensors once, which any collation does.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from raggedright import Rows
from raggedright.tensors import infer_schema, padding_rows

NAMES = ("rm_scores", "rollout_log_probs", "old_log_probs", "advantages", "values", "unheard_of")


def best_of_3(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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


if __name__ == "__main__":
    main()
