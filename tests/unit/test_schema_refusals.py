"""Bad fields are refused by row key and field, at no great cost."""

from collections.abc import Callable

import pytest
import torch

from raggedright.tensors.row_schema import Fields, infer_schema
from unit.field_rows import FLOATS, fields_of, refused, rows_of

BAD: list[tuple[str, str, Callable[[Fields], object], str]] = [
    ("length", "old_log_probs", lambda row: torch.ones(5), "has 5 tokens and the response 6; give one value per token"),
    ("sequence", "position_ids", lambda row: torch.ones(3, 7), "has 7 tokens and the sequence 8"),
    ("scalar", "values", lambda row: torch.tensor(1.0), "has shape () and in row p0/0/0 has shape (4,)"),
    ("rank", "values", lambda row: torch.ones(6, 1), "has shape (6, 1) and in row p0/0/0 has shape (4,)"),
    ("dtype", "values", lambda row: torch.ones(6).half(), "is torch.float16 and in row p0/0/0 is torch.float32"),
    ("list", "values", lambda row: [1.0] * 6, "is a list and in row p0/0/0 is a Tensor"),
    ("nan", "values", lambda row: torch.tensor([0, 0, 0, float("nan"), 0, 0]), "is nan at token 3"),
    ("inf", "rm_scores", lambda row: torch.tensor([0, float("inf"), 0, 0, 0, 0]), "is inf at token 1"),
    ("-inf", "old_log_probs", lambda row: torch.tensor([0.0] * 5 + [-float("inf")]), "is -inf at token 5"),
    (
        "mask",
        "response_mask",
        lambda row: torch.tensor([1, 1, 0, 1, 1, 1]),
        "marks 5 tokens and the row has loss_tokens 6",
    ),
    ("mask", "loss_mask", lambda row: torch.tensor([2, 1, 1, 1, 1, 0]), "is 2 at token 0; a loss mask is 0 or 1"),
    (
        "experts",
        "routed_experts",
        lambda row: torch.zeros(8, 2, 3).int(),
        "has shape (8, 2, 3) and in row p0/0/0 (7, 2, 2)",
    ),
    ("routing", "routed_experts", lambda row: torch.zeros(7, 2, 2).int(), "has 7 tokens and the sequence 8"),
    ("group", "uid", lambda row: 7, "is 7; group ids are strings in all rows, or integers in all rows"),
    ("group", "uid", lambda row: "<padding>0", "is '<padding>0'; ids that begin with <padding>"),
]


@pytest.mark.parametrize(("_", "name", "value", "message"), BAD)
def test_a_bad_value_is_refused_by_row_and_field(_, name, value, message):
    fields = fields_of(
        position_ids=lambda p, r: torch.ones(3, p + r),
        routed_experts=lambda p, r: torch.zeros(p + r, 2, 2).int(),
        uid=lambda p, r: "p0",
        **{name: lambda p, r: torch.ones(r) for name in ("values", "old_log_probs", "rm_scores")},
        **{name: lambda p, r: torch.ones(r).long() for name in ("response_mask", "loss_mask")},
    )
    infer_schema(rows_of(), fields)
    fields[1][name] = value(fields[1])
    refused(rows_of(), fields, f"row p0/1/0: field {name} {message}")


@pytest.mark.parametrize("name", ["input_ids", "prompts", "responses", "teacher_ids"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.complex64], ids=str)
def test_token_ids_that_are_not_integers_are_refused(name: str, dtype: torch.dtype):
    """Ids of 3.7 were trained as 3."""
    length = {"prompts": lambda p, r: p, "responses": lambda p, r: r}.get(name, lambda p, r: p + r)
    fields = fields_of(**{name: lambda p, r: torch.ones(length(p, r)).to(dtype)})
    refused(rows_of(), fields, f"row p0/0/0: field {name} is {dtype}; token ids are integers")


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_found_in_every_floating_dtype_and_dim(dtype):
    def make(p, r):
        tensor = torch.zeros(3, p + r)
        tensor[2, p] = float("nan") if p == 5 else 0
        return tensor.to(dtype)

    refused(rows_of(), fields_of(mystery=make), "row p0/2/0: field mystery is nan at token 5")


def test_large_finite_numbers_are_not_taken_for_infinite():
    fields = fields_of(values=lambda p, r: torch.full((r,), 1e300, dtype=torch.float64))
    fields[2]["values"] = torch.tensor([float("inf")], dtype=torch.float64)
    refused(rows_of(), fields, "row p0/2/0: field values is inf at token 0")


def test_a_list_for_a_field_by_token_is_refused():
    refused(
        rows_of(), fields_of(values=lambda p, r: [0.0] * r), "row p0/0/0: field values is a list; give a torch tensor"
    )


def test_routing_in_a_floating_dtype_is_refused():
    fields = fields_of(routed_experts=lambda p, r: torch.zeros(p + r, 2, 2))
    refused(rows_of(), fields, "row p0/0/0: field routed_experts is torch.float32 of shape (7, 2, 2)")


def test_negative_group_ids_are_kept_for_padding_rows():
    refused(rows_of(), fields_of(uid=lambda p, r: -r), "row p0/0/0: field uid is -4; ids that begin with <padding> or")


def test_tokens_and_required_fields_are_missed_by_row():
    fields = fields_of(prompts=lambda p, r: torch.ones(p).long(), responses=lambda p, r: torch.ones(r).long())
    del fields[1]["input_ids"], fields[0]["responses"]
    infer_schema(rows_of(), fields)
    refused(rows_of(), fields, "row p0/0/0: field responses is missing", required=["responses"])
    refused(rows_of(), fields, "row p0/0/0: field values is missing", required=["values"])
    fields[1]["prompts"] = None
    refused(rows_of(), fields, "row p0/1/0: field input_ids is missing; give it, or prompts and responses")


def test_each_row_of_numbers_has_its_fields():
    refused(rows_of(), fields_of()[:2], "2 rows have fields and 3 have numbers")


def test_rows_without_response_or_loss_tokens_are_ordinary():
    lengths = [(3, 0), (2, 4), (2, 0)]
    masks = [torch.zeros(0, dtype=torch.bool), torch.zeros(4, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)]
    fields = fields_of(lengths, values=lambda p, r: torch.ones(r))
    for row, mask in zip(fields, masks, strict=True):
        row["response_mask"] = mask
    schema = infer_schema(rows_of(lengths, loss_tokens=[0, 0, 0]), fields)
    assert schema.fields["response_mask"].dtype is torch.bool
