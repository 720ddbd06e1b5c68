"""Padding rows are made from the schema: shortest, neutral, of no group, and in the shapes of the real rows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raggedright import ConfigError, RowsError
from raggedright.tensors.padding import PaddingRow, padding_rows
from raggedright.tensors.row_schema import Kind, Schema, infer_schema
from unit.field_rows import FLOATS, INTS, LENGTHS, rows_of


def real_fields(**more: Callable[[int, int], object]) -> list[dict[str, object]]:
    """What verl's agent loop emits for a text row, and more fields made from a row's prompt and response tokens."""
    return [
        {
            "prompts": torch.arange(p),
            "responses": torch.arange(r),
            "input_ids": torch.arange(p + r),
            "attention_mask": torch.ones(p + r, dtype=torch.int64),
            "position_ids": torch.arange(p + r),
            "response_mask": torch.ones(r, dtype=torch.int64),
            "loss_mask": torch.ones(r, dtype=torch.int64),
            "rm_scores": torch.full((r,), 0.5),
            "rollout_log_probs": torch.full((r,), -1.0),
            "uid": f"p{i // 2}",
            "num_turns": 2,
            **{name: make(p, r) for name, make in more.items()},
        }
        for i, (p, r) in enumerate(LENGTHS)
    ]


def pad(fields: list[dict[str, object]], count: int = 1, *, declared=None, **options) -> list[PaddingRow]:
    schema = infer_schema(rows_of(), fields, declared=declared)
    return padding_rows(schema, count, **{"token_id": 9, **options})


def padded(make: Callable[[int, int], object], name: str = "mystery", **options) -> Any:
    """The value of one field in a padding row."""
    return pad(real_fields(**{name: make}), **options)[0].fields[name]


def tensor(row: PaddingRow, name: str) -> Tensor:
    value = row.fields[name]
    assert isinstance(value, Tensor)
    return value


def test_the_shortest_row_is_one_prompt_and_one_response_token():
    row = pad(real_fields())[0]
    assert {name: value.tolist() if isinstance(value, Tensor) else value for name, value in row.fields.items()} == {
        "prompts": [9],
        "responses": [9],
        "input_ids": [9, 9],
        "attention_mask": [1, 1],
        "position_ids": [0, 1],
        "response_mask": [0],
        "loss_mask": [0],
        "rm_scores": [0.0],
        "rollout_log_probs": [0.0],
        "uid": "<padding>0",
        "num_turns": 0,
    }
    assert row.tags == {"is_padding": True, "prompt_len": 1, "response_len": 1, "seq_len": 2}


@pytest.mark.parametrize("min_row_tokens", [2, 4, 8, 128])
def test_padding_rows_are_as_long_as_context_parallel_needs(min_row_tokens):
    """verl #7449: a 2-token padding row crashed packed context parallel, which needs 2 x tp x cp tokens."""
    row = pad(
        real_fields(
            routed_experts=lambda p, r: torch.ones(p + r, 3, 2).short(),
            mystery=lambda p, r: torch.ones(r, 5),
            mystery_of_all=lambda p, r: torch.ones(2, p + r),
        ),
        min_row_tokens=min_row_tokens,
    )[0]
    shapes = {name: tuple(value.shape) for name, value in row.fields.items() if isinstance(value, Tensor)}
    response, sequence = (min_row_tokens - 1,), (min_row_tokens,)
    assert shapes == {
        "prompts": (1,),
        **dict.fromkeys(("responses", "response_mask", "loss_mask", "rm_scores", "rollout_log_probs"), response),
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), sequence),
        "routed_experts": (min_row_tokens, 3, 2),
        "mystery": (min_row_tokens - 1, 5),
        "mystery_of_all": (2, min_row_tokens),
    }
    assert row.tags["response_len"] == min_row_tokens - 1
    assert row.tags["seq_len"] == min_row_tokens


def test_a_row_of_one_token_is_refused():
    with pytest.raises(ConfigError, match="min_row_tokens is 1; a row has a prompt and a response token"):
        pad(real_fields(), min_row_tokens=1)


@pytest.mark.parametrize("dtype", INTS)
def test_padding_rows_carry_routed_experts_though_some_real_rows_lack_them(dtype):
    """Trinity-RFT #568: a dummy row without routed_experts in a MoE batch crashed."""
    fields = real_fields(routed_experts=lambda p, r: torch.full((p + r, 3, 4), 100).to(dtype))
    fields[0]["routed_experts"] = None
    del fields[2]["routed_experts"]
    routing = tensor(pad(fields)[0], "routed_experts")
    assert routing.dtype is dtype
    assert routing.tolist() == [[[0, 1, 2, 3]] * 3] * 2


def test_padding_shares_no_group_and_carries_no_loss():
    """verl-agent and ROLL pad with copies of real rows, unmasked: group statistics were polluted."""
    fields = real_fields()
    rows = [*pad(fields, 50), *pad(fields, 50, first=50)]
    groups = {row.fields["uid"] for row in rows}
    assert len(groups) == 100
    assert not groups & {row["uid"] for row in fields}
    for row in rows:
        for name in ("response_mask", "loss_mask", "rm_scores", "rollout_log_probs"):
            assert not tensor(row, name).any()


def test_whatever_is_declared_as_a_group_is_unique_to_padding():
    fields = real_fields(
        task=lambda p, r: "t",
        number=lambda p, r: r,
        tensor=lambda p, r: torch.tensor(r),
        numpy=lambda p, r: np.int32(r),
    )
    declared = dict.fromkeys(("task", "number", "tensor", "numpy"), Kind.GROUP)
    rows = pad(fields, 3, declared=declared, first=4)
    assert [row.fields["task"] for row in rows] == ["<padding>4", "<padding>5", "<padding>6"]
    for name in ("number", "tensor", "numpy"):
        assert [int(row.fields[name]) for row in rows] == [-5, -6, -7]  # pyright: ignore[reportArgumentType]
        assert type(rows[0].fields[name]) is type(fields[0][name])


@pytest.mark.parametrize("prefix", [(), (3,), (4,), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_ids_keep_the_rank_and_prefix_of_the_real_rows(prefix, dtype):
    positions = padded(lambda p, r: torch.ones(*prefix, p + r, dtype=dtype), "position_ids", min_row_tokens=4)
    assert positions.shape == (*prefix, 4)
    assert positions.dtype is dtype
    assert (positions == torch.arange(4)).all()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool])
def test_unknown_fields_by_token_are_resized_in_their_dtype(dtype):
    value = padded(lambda p, r: torch.ones(r, 2).to(dtype), min_row_tokens=3)
    assert value.shape == (2, 2)
    assert value.dtype is dtype
    assert not value.float().any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int32])
def test_masks_keep_their_dtype(dtype):
    row = pad(
        real_fields(
            response_mask=lambda p, r: torch.ones(r, dtype=dtype),
            attention_mask=lambda p, r: torch.ones(p + r, dtype=dtype),
        )
    )[0]
    assert torch.equal(tensor(row, "response_mask"), torch.zeros(1, dtype=dtype))
    assert torch.equal(tensor(row, "attention_mask"), torch.ones(2, dtype=dtype))


def test_text_beside_images_pads_with_an_empty_placeholder():
    fields = real_fields()
    fields[1]["multi_modal_inputs"] = {"pixel_values": torch.ones(16, 8), "image_grid_thw": torch.ones(1, 3)}
    fields[2]["multi_modal_inputs"] = {}
    first, second = pad(fields, 2)
    assert first.fields["multi_modal_inputs"] == {}
    assert first.fields["multi_modal_inputs"] is not second.fields["multi_modal_inputs"]


def test_images_as_fields_of_their_own_pad_with_none_of_them():
    value = padded(lambda p, r: torch.ones(16 * r, 8).bfloat16() if r > 1 else None, "pixel_values")
    assert value.shape == (0, 8)
    assert value.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("value", "neutral"),
    [
        ("text", ""),
        (7, 0),
        (0.5, 0.0),
        (True, False),
        (None, None),
        ([1, 2], []),
        ((1, 2), ()),
        ({"a": 1}, {}),
        (np.float32(2), np.float32(0)),
        (SimpleNamespace(), None),
    ],
)
def test_other_values_are_neutral_by_type(value, neutral):
    result = padded(lambda p, r: value)
    assert result == neutral
    assert type(result) is type(neutral)


def test_values_of_several_types_pad_with_what_they_have_in_common():
    assert padded(lambda p, r: 1 if r > 1 else 0.5) == 0.0
    assert padded(lambda p, r: 1 if r > 1 else "one") is None
    assert padded(lambda p, r: "one" if r > 1 else None) == ""


def test_numpy_arrays_pad_with_an_empty_one_of_their_dtype():
    array = padded(lambda p, r: np.ones((r, 3), dtype=np.float16))
    assert array.shape == (0, 3)
    assert array.dtype == np.float16


def test_tensors_of_a_row_pad_with_zeros_of_their_shape():
    assert torch.equal(padded(lambda p, r: torch.ones(4, 2).half()), torch.zeros(4, 2).half())
    assert torch.equal(padded(lambda p, r: torch.tensor(3)), torch.tensor(0))


def test_fields_that_are_none_in_every_row_are_none_in_padding_rows():
    assert padded(lambda p, r: None, "routed_experts") is None


def test_tensors_are_shared_and_mutable_objects_are_not():
    first, second = pad(real_fields(extra_info=lambda p, r: {"a": 1}, tools=lambda p, r: ["t"]), 2)
    assert first.fields["input_ids"] is second.fields["input_ids"]
    assert first.fields is not second.fields
    assert first.tags is not second.tags
    for name in ("extra_info", "tools"):
        assert first.fields[name] is not second.fields[name]


def test_ten_thousand_padding_rows_hold_each_tensor_once():
    schema = infer_schema(rows_of(), real_fields(extra_info=lambda p, r: {}, mystery=lambda p, r: torch.ones(r, 64)))
    rows = padding_rows(schema, 10_000, token_id=0)
    assert len({row.fields["uid"] for row in rows}) == 10_000
    assert len({id(row.fields["mystery"]) for row in rows}) == 1


def test_no_padding_rows_need_no_schema():
    assert padding_rows(Schema({}), 0, token_id=0) == []
    with pytest.raises(RowsError, match=r"2 padding rows .* before any row was seen"):
        padding_rows(Schema({}), 2, token_id=0)
