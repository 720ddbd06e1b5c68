"""Padding rows are rows: they pass every check that real rows pass, whatever the fields."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawn_sessions, make_rows

from raggedright import Rows
from raggedright.tensors.padding import padding_rows
from raggedright.tensors.row_schema import Schema, infer_schema

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int16, torch.int64, torch.bool)
KINDS = ("prompt", "response", "sequence", "positions", "routing", "row", "media", "opaque")


@st.composite
def batches(draw: st.DrawFn) -> tuple[Rows, list[dict[str, object]], dict[str, str]]:
    """Rows with tokens and masks, and fields of drawn kinds that some rows lack."""
    rows = make_rows(draw(drawn_sessions().filter(lambda prompts: any(map(any, prompts)))))
    declared = {f"field{i}": kind for i, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), max_size=5)))}
    dims = {name: draw(st.lists(st.integers(1, 4), max_size=2)) for name in declared}
    dtypes = {name: draw(st.sampled_from(DTYPES)) for name in declared}
    random = np.random.default_rng(draw(st.integers(0, 99)))
    fields = []
    for i in range(len(rows)):
        prompt, response = int(rows.prompt_tokens[i]), int(rows.response_tokens[i])
        mask = torch.arange(response) < int(rows.loss_tokens[i])
        row: dict[str, object] = {
            "input_ids": torch.ones(prompt + response, dtype=torch.long),
            "response_mask": mask,
            "uid": rows.prompt[i],
        }
        for name, kind in declared.items():
            if random.random() < 0.7:
                row[name] = _value(kind, prompt, response, dims[name], dtypes[name])
        fields.append(row)
    return rows, fields, declared


def _value(kind: str, prompt: int, response: int, dims: list[int], dtype: torch.dtype) -> object:
    lengths = {"prompt": prompt, "response": response}
    if kind == "routing":
        return torch.zeros(prompt + response, 2, *dims).long()
    if kind == "positions":
        return torch.zeros(*dims, prompt + response, dtype=dtype)
    if kind == "row":
        return torch.ones(dims, dtype=dtype)
    if kind == "media":
        return {"pixel_values": torch.ones(response, 2)}
    if kind == "opaque":
        return [1, "two"][response % 2]
    return torch.ones(lengths.get(kind, prompt + response), *dims).to(dtype)


@given(batches(), st.integers(1, 4), st.sampled_from([2, 3, 16]))
def test_padding_rows_pass_the_checks_of_real_rows_and_leave_the_schema_as_it_was(batch, count, min_row_tokens):
    rows, fields, declared = batch
    schema = infer_schema(rows, fields, declared=declared)
    padding = padding_rows(schema, count, token_id=1, min_row_tokens=min_row_tokens)
    together = [*fields, *(row.fields for row in padding)]
    again = infer_schema(rows.with_padding(count, min_row_tokens), together, known=schema)
    assert again.fields == schema.fields


@given(batches())
def test_the_schema_is_the_same_for_every_order_of_the_rows(batch):
    rows, fields, declared = batch
    schema: Schema = infer_schema(rows, fields, declared=declared)
    turned = np.arange(len(rows))[::-1]
    assert infer_schema(rows.take(turned), [fields[i] for i in turned], declared=declared) == schema
