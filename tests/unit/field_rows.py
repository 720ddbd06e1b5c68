"""Rows and fields of a few tokens, for tests of the schema and of padding rows."""

import re
from collections.abc import Callable

import pytest
import torch

from raggedright import Rows, RowsError
from raggedright.tensors.row_schema import infer_schema

LENGTHS = ((3, 4), (2, 6), (5, 1))
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16)


def rows_of(lengths=LENGTHS, loss_tokens=None) -> Rows:
    return Rows.from_columns(
        prompt=["p0"] * len(lengths),
        session=range(len(lengths)),
        trajectory=[0] * len(lengths),
        prompt_tokens=[prompt for prompt, _ in lengths],
        response_tokens=[response for _, response in lengths],
        loss_tokens=loss_tokens,
    )


def fields_of(lengths=LENGTHS, **more: Callable[[int, int], object]) -> list[dict[str, object]]:
    """Rows of tokens alone, and a field of each name given, made from a row's prompt and response tokens."""
    return [
        {"input_ids": torch.ones(p + r, dtype=torch.int64), **{name: make(p, r) for name, make in more.items()}}
        for p, r in lengths
    ]


def refused(rows: Rows, fields: list[dict[str, object]], message: str, **options) -> None:
    with pytest.raises(RowsError, match=re.escape(message)):
        infer_schema(rows, fields, **options)
