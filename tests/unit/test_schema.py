"""The schema says what each field is, from all rows, and keeps it for the run."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from raggedright import ConfigError
from raggedright.tensors.row_schema import Field, Kind, Schema, infer_schema
from unit.field_rows import FLOATS, INTS, LENGTHS, fields_of, refused, rows_of


def infer(lengths=LENGTHS, *, declared=None, known=None, **more: Callable[[int, int], object]) -> Schema:
    return infer_schema(rows_of(lengths), fields_of(lengths, **more), declared=declared, known=known)


def field(name: str, make: Callable[[int, int], object], lengths=LENGTHS, **options) -> Field:
    return infer(lengths, **options, **{name: make}).fields[name]


@pytest.mark.parametrize(
    ("name", "make", "kind", "dim", "shape"),
    [
        ("prompts", lambda p, r: torch.ones(p).long(), "prompt", 0, ()),
        ("old_log_probs", lambda p, r: torch.ones(r), "response", 0, ()),
        ("attention_mask", lambda p, r: torch.ones(p + r), "sequence", 0, ()),
        ("position_ids", lambda p, r: torch.arange(p + r), "positions", -1, ()),
        ("position_ids", lambda p, r: torch.ones(3, p + r), "positions", -1, (3,)),
        ("position_ids", lambda p, r: torch.ones(4, p + r), "positions", -1, (4,)),
        ("routed_experts", lambda p, r: torch.ones(p + r, 5, 2).int(), "routing", 0, (5, 2)),
        ("teacher_logprobs", lambda p, r: torch.ones(p + r, 8), "sequence", 0, (8,)),
        ("num_turns", lambda p, r: 3, "row", 0, ()),
        ("num_turns", lambda p, r: torch.tensor(3), "row", 0, ()),
        ("uid", lambda p, r: "p0", "group", 0, ()),
        ("multi_modal_inputs", lambda p, r: {"pixel_values": torch.ones(p, 2)}, "media", 0, ()),
        ("image_grid_thw", lambda p, r: torch.ones(p, 3), "media", 0, (0, 3)),
        ("raw_prompt", lambda p, r: [{"role": "user"}], "opaque", 0, ()),
    ],
)
def test_well_known_names_have_declared_kinds(name, make, kind, dim, shape):
    for lengths in (LENGTHS, LENGTHS[:1], [(2, 2)]):
        found = field(name, make, lengths)
        assert (found.kind, found.dim, found.shape) == (kind, dim, shape)


@pytest.mark.parametrize(
    ("make", "kind", "dim", "shape"),
    [
        (lambda p, r: torch.ones(p), "prompt", 0, ()),
        (lambda p, r: torch.ones(r), "response", 0, ()),
        (lambda p, r: torch.ones(p + r), "sequence", 0, ()),
        (lambda p, r: torch.ones(r, 9), "response", 0, (9,)),
        (lambda p, r: torch.ones(3, p + r), "sequence", -1, (3,)),
        (lambda p, r: torch.ones(2, 3, r), "response", -1, (2, 3)),
        (lambda p, r: torch.ones(11), "row", 0, (11,)),
        (lambda p, r: torch.ones(4, 2), "row", 0, (4, 2)),
        (lambda p, r: torch.tensor(0.5), "row", 0, ()),
        (lambda p, r: 0.5, "opaque", 0, ()),
        (lambda p, r: "text", "opaque", 0, ()),
        (lambda p, r: None, "opaque", 0, ()),
        (lambda p, r: [1] * r, "opaque", 0, ()),
    ],
)
def test_the_kind_of_another_name_is_read_off_all_rows(make, kind, dim, shape):
    found = field("mystery", make)
    assert (found.kind, found.dim, found.shape) == (kind, dim, shape)


def test_one_row_does_not_decide_what_two_rows_contradict():
    """Row 0 alone has as many prompt tokens as response tokens."""
    assert field("mystery", lambda p, r: torch.ones(r), [(4, 4), (3, 5)]).kind == "response"


def test_the_dim_that_varies_is_the_tokens_even_where_another_is_a_length_too():
    assert field("mystery", lambda p, r: torch.ones(p + r, 2), [(2, 5), (2, 6)]).kind == "sequence"


@pytest.mark.parametrize(
    ("lengths", "size", "readings"),
    [
        ([(4, 4), (5, 5)], lambda p, r: r, "response or prompt"),
        ([(3, 4)], lambda p, r: r, "response or row"),
        ([(3, 4), (2, 4)], lambda p, r: r, "response or row"),
        ([(0, 4), (0, 5)], lambda p, r: r, "response or sequence"),
    ],
)
def test_a_field_with_two_readings_is_refused_until_one_is_declared_or_known(lengths, size, readings):
    def make(p, r):
        return torch.ones(size(p, r))

    message = f"row p0/0/0: field mystery has shape ({size(*lengths[0])},) and can be {readings}"
    refused(rows_of(lengths), fields_of(lengths, mystery=make), message)
    refused(rows_of(lengths), fields_of(lengths, mystery=make), 'declared={"mystery": "response"}')
    assert field("mystery", make, lengths, declared={"mystery": "response"}).kind is Kind.RESPONSE
    assert field("mystery", make, lengths, known=infer(mystery=make)).kind is Kind.RESPONSE


def test_a_field_that_fits_all_rows_but_one_is_refused_with_that_row():
    fields = fields_of(mystery=lambda p, r: torch.ones(r))
    fields[1]["mystery"] = torch.ones(5)
    message = (
        "row p0/1/0: field mystery has shape (5,) and its row 2 prompt and 6 response tokens; kind response fits 2 of"
    )
    refused(rows_of(), fields, message)
    refused(rows_of(), fields, 'declare it, e.g. declared={"mystery": "opaque"}')
    assert infer_schema(rows_of(), fields, declared={"mystery": "opaque"}).fields["mystery"].shape == (0,)


def test_what_is_declared_wins_over_well_known_names_and_the_run():
    known = infer(values=lambda p, r: torch.ones(r))
    assert field("values", lambda p, r: torch.ones(7), declared={"values": "row"}, known=known).kind is Kind.ROW
    assert field("task", lambda p, r: "t1", declared={"task": Kind.GROUP}).kind is Kind.GROUP


def test_an_unknown_kind_is_a_config_error_that_lists_the_kinds():
    with pytest.raises(ConfigError, match=r"field values is declared as 'tokens'; a kind is one of prompt, response"):
        infer(declared={"values": "tokens"})


def test_rows_may_differ_in_their_fields_and_none_vanishes():
    fields = fields_of(routed_experts=lambda p, r: torch.zeros(p + r, 2, 2).int(), score=lambda p, r: 0.5)
    fields[0]["routed_experts"] = None
    del fields[1]["routed_experts"], fields[0]["score"]
    fields[2]["multi_modal_inputs"] = {"pixel_values": torch.ones(4, 2)}
    schema = infer_schema(rows_of(), fields)
    assert list(schema.fields) == ["input_ids", "multi_modal_inputs", "routed_experts", "score"]
    assert schema.fields["routed_experts"].shape == (2, 2)


def test_the_schema_does_not_depend_on_the_order_of_rows():
    rows, fields = (
        rows_of(),
        fields_of(mystery=lambda p, r: torch.ones(r, 2), number=lambda p, r: [1, 1.5, None][r % 3]),
    )
    schema = infer_schema(rows, fields)
    assert schema.fields["number"].value_type is float
    for order in ([2, 1, 0], [1, 2, 0]):
        assert infer_schema(rows.take(np.array(order)), [fields[i] for i in order]) == schema


def test_what_the_run_knows_outlives_batches_without_the_field():
    known = infer(mystery=lambda p, r: torch.ones(r))
    later = infer(known=known)
    assert "mystery" not in later.fields
    assert later.earlier["mystery"] == known.fields["mystery"]
    assert infer([(3, 4)], known=later, mystery=lambda p, r: torch.ones(r)).fields["mystery"].kind is Kind.RESPONSE
    nulls = infer(known=known, mystery=lambda p, r: None)
    assert nulls.fields["mystery"].kind is Kind.RESPONSE
    assert infer([(3, 4)], known=nulls, mystery=lambda p, r: torch.ones(r)).fields["mystery"].kind is Kind.RESPONSE


def test_none_alone_decides_nothing_for_the_run():
    known = infer(mystery=lambda p, r: None)
    assert infer(known=known, mystery=lambda p, r: torch.ones(r)).fields["mystery"].kind is Kind.RESPONSE


def test_a_field_keeps_its_dtype_and_dims_for_the_run():
    known = infer(values=lambda p, r: torch.ones(r, 2), note=lambda p, r: 1)
    message = "row p0/0/0: field values is torch.float64 and was torch.float32 earlier in the run"
    refused(rows_of(), fields_of(values=lambda p, r: torch.ones(r, 2).double()), message, known=known)
    message = "row p0/0/0: field values has dims (3,) and had (2,) earlier in the run"
    refused(rows_of(), fields_of(values=lambda p, r: torch.ones(r, 3)), message, known=known)
    message = "row p0/0/0: field note is torch.float32 and was no tensor earlier in the run"
    refused(rows_of(), fields_of(note=lambda p, r: torch.ones(9)), message, known=known)


def test_a_batch_without_rows_has_the_schema_of_the_run():
    known = infer(values=lambda p, r: torch.ones(r))
    assert infer([], known=known) == known
    assert infer([]) == Schema({})


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool])
def test_every_dtype_is_kept(dtype):
    assert field("values", lambda p, r: torch.ones(r).to(dtype)).dtype == dtype
