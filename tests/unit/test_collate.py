"""All layouts mean the same, the traps cannot be reached, and what does not fit is refused by name."""

from typing import get_args

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raggedright import ConfigError, Layout, Rows, RowsError, make_plan
from raggedright.check.check_inputs import load_model, make_up
from raggedright.check.plain_losses import row_outputs
from raggedright.plan.layout import Collate
from raggedright.tensors import Collator, TensorBatch, forward_log_probs, image_filler, infer_schema
from raggedright.tensors.row_independence import check_packs

HOWS = get_args(Collate)


def rows_of(*lengths: tuple[int, int]) -> Rows:
    """One row per (prompt tokens, response tokens)."""
    return Rows.from_records(
        {"prompt": f"p{i}", "session": 0, "trajectory": 0, "prompt_tokens": p, "response_tokens": r}
        for i, (p, r) in enumerate(lengths)
    )


def fields_of(rows: Rows) -> list[dict[str, object]]:
    return [
        {"input_ids": torch.arange(n) + 10 * (i + 1), "response_mask": torch.ones(int(r), dtype=torch.long)}
        for i, (n, r) in enumerate(zip(rows.tokens.tolist(), rows.response_tokens.tolist(), strict=True))
    ]


def collate(collator: Collator, rows: Rows, fields, **options):
    return collator(rows, fields, weight=np.full(len(rows), 0.5), step_loss_tokens=10, **options)


def test_a_pack_has_no_padding_tokens_and_no_mask():
    rows = rows_of((2, 1), (1, 3))
    micro = collate(Collator(how="packed", token_id=0), rows, fields_of(rows))
    assert set(micro.inputs) == {"input_ids", "position_ids"}
    assert micro.inputs["input_ids"].tolist() == [[10, 11, 12, 20, 21, 22, 23]]
    assert micro.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert micro.labels.tolist() == [12, 21, 22, 23]
    assert micro.logit_index.tolist() == [1, 3, 4, 5]


def test_a_rectangle_is_filled_up_on_the_right():
    rows = rows_of((2, 1), (1, 3))
    micro = collate(Collator(how="padded", token_id=7), rows, fields_of(rows))
    assert micro.inputs["input_ids"].tolist() == [[10, 11, 12, 7], [20, 21, 22, 23]]
    assert micro.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert micro.labels.tolist() == [12, 21, 22, 23]
    assert micro.logit_index.tolist() == [1, 4, 5, 6]


def test_a_tree_has_what_rows_begin_with_once_and_no_row_its_last_token():
    rows = rows_of((2, 2), (2, 3), (1, 1))
    ids = [[5, 6, 7, 8], [5, 6, 7, 9, 4], [3, 6]]
    fields = [{**row, "input_ids": torch.tensor(own)} for row, own in zip(fields_of(rows), ids, strict=True)]
    micro = collate(Collator(how="tree", token_id=0), rows, fields)
    assert micro.inputs["input_ids"].tolist() == [[3, 5, 6, 7, 9]]
    assert micro.inputs["position_ids"].tolist() == [[0, 0, 1, 2, 3]]
    sees = micro.inputs["attention_mask"][0, 0].int().tolist()
    assert sees == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert micro.labels.tolist() == [7, 8, 7, 9, 4, 6]
    assert micro.logit_index.tolist() == [2, 3, 2, 3, 4, 0]


@pytest.mark.parametrize("how", HOWS)
def test_weights_follow_the_mask_and_fields_the_rows(how):
    rows = rows_of((2, 2), (1, 3))
    fields = fields_of(rows)
    fields[0]["response_mask"] = torch.tensor([1, 0])
    fields[0]["advantages"], fields[1]["advantages"] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])
    micro = collate(Collator(how=how, token_id=0), rows, fields, names=("advantages",))
    assert micro.weights.loss.tolist() == [0.5, 0, 0.5, 0.5, 0.5]
    assert micro.weights.mean.tolist() == [0.1, 0, 0.1, 0.1, 0.1]
    assert micro.fields["advantages"].tolist() == [1, 2, 3, 4, 5]
    assert [part.tolist() for part in micro.per_row(micro.fields["advantages"])] == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_a_short_row_is_extended_to_what_context_parallel_asks_for(how):
    rows = rows_of((1, 1), (1, 2))
    micro = collate(Collator(how=how, token_id=0, min_row_tokens=8), rows, fields_of(rows))
    assert micro.inputs["input_ids"].numel() == 16
    assert micro.labels.tolist() == [11, 21, 22]
    assert micro.logit_index.tolist() == [0, 8, 9]


@pytest.mark.parametrize("how", HOWS)
def test_a_micro_batch_without_rows_still_runs_and_teaches_nothing(how):
    rows = rows_of((1, 1)).take(np.array([], dtype=np.int64))
    micro = collate(Collator(how=how, token_id=0), rows, [], names=("advantages",))
    model = load_model("qwen3", "float64")
    log_probs, _ = forward_log_probs(model, micro)
    (log_probs * micro.weights.loss).sum().backward()
    assert len(log_probs) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "qwen3-vl"])
def test_log_probs_equal_those_of_rows_alone(name):
    model = load_model(name, "float64")
    made_up = make_up(model, torch.float64)
    vision = name == "qwen3-vl"
    for how in HOWS if name == "qwen3" else ("packed", "padded"):
        filler = image_filler(model.config) if vision else None
        collator = Collator(how=how, token_id=0, mrope=vision, image_filler=filler)
        micro = collate(collator, made_up.rows, made_up.fields)
        with torch.no_grad():
            ours = micro.per_row(forward_log_probs(model, micro).log_probs)
            for i, row in enumerate(made_up.fields):
                torch.testing.assert_close(ours[i], row_outputs(model, made_up.rows, i, row)[0], rtol=0, atol=1e-12)


def test_temperature_divides_the_logits():
    model = load_model("qwen3", "float64")
    rows = rows_of((2, 3))
    micro = collate(Collator(how="packed", token_id=0), rows, [{**fields_of(rows)[0], "input_ids": torch.arange(5)}])
    logits = model(input_ids=torch.arange(5)[None], use_cache=False).logits[0, 1:4]
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, torch.tensor([[2], [3], [4]]))[:, 0]
    torch.testing.assert_close(forward_log_probs(model, micro, temperature=0.7).log_probs, expected)


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_a_micro_batch_without_images_runs_the_vision_tower_at_weight_zero(how):
    model = load_model("qwen3-vl", "float64")
    rows = rows_of((2, 3))
    fields = [{"input_ids": torch.arange(5), "response_mask": torch.ones(3), "multi_modal_inputs": {}}]
    collator = Collator(how=how, token_id=0, mrope=True, image_filler=image_filler(model.config))
    micro = collate(collator, rows, fields)
    assert micro.inputs["pixel_values"].shape[0] == 4
    (forward_log_probs(model, micro).log_probs * micro.weights.loss).sum().backward()
    gradients = [p.grad for n, p in model.named_parameters() if ".visual." in n]
    assert gradients
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("how", ["packed", "padded"])
@pytest.mark.parametrize("cap", [24, 100, 333])
def test_a_micro_batch_of_text_stays_within_the_cap_with_its_image(how, cap):
    """At a cap of 100 it had 103 tokens packed and 200 padded."""
    config = load_model("qwen3-vl", "float64").config
    collator = Collator(how=how, token_id=0, min_row_tokens=3, mrope=True, image_filler=image_filler(config))
    most = cap - collator.filler_tokens(cap)
    random = np.random.default_rng(cap)
    for longest in (3, 5, 12, most):
        rows = rows_of(*((1, int(n)) for n in random.integers(1, longest, 40)), (1, longest - 1))
        fields = [{**row, "multi_modal_inputs": {}} for row in fields_of(rows)]
        layout = Layout(
            dp_size=2,
            batch_size=41,
            mini_batch_size=41,
            micro_batch_tokens=most,
            collate=how,
            min_row_tokens=3,
        )
        plan = make_plan(rows, layout)
        batch = TensorBatch.of(plan, fields, infer_schema(rows, fields), collator)
        (step,) = plan.steps("actor")
        for dp_rank in range(2):
            for _, micro in batch.micro_batches(step, dp_rank):
                assert "pixel_values" in micro.inputs
                assert micro.inputs["input_ids"].numel() <= cap


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 9)], [(2, 3), (2, 3)], [(2, 1)] * 9])
def test_an_image_behind_a_rows_end_changes_no_log_prob_and_no_gradient(shapes):
    model = load_model("qwen3-vl", "float64")
    rows = rows_of(*shapes)
    ids = [torch.arange(n) % 30 for n in rows.tokens.tolist()]
    fields = [
        {**row, "input_ids": some, "multi_modal_inputs": {}} for row, some in zip(fields_of(rows), ids, strict=True)
    ]
    filler = image_filler(model.config)
    gradients = []
    for collator in (
        Collator(how="padded", token_id=0, mrope=True, image_filler=filler),
        Collator(how="padded", token_id=0, mrope=True),
    ):
        log_probs = forward_log_probs(model, collate(collator, rows, fields)).log_probs
        log_probs.sum().backward()
        gradients.append(
            [log_probs.detach(), *(p.grad for p in model.parameters() if p.grad is not None and p.grad.any())]
        )
        model.zero_grad(set_to_none=True)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_rows_without_routed_experts_route_naturally_beside_rows_that_have_them(how):
    rows = rows_of((1, 1), (1, 2))
    fields = fields_of(rows)
    fields[1]["routed_experts"] = torch.tensor([[[0, 1]], [[1, 2]], [[2, 3]]], dtype=torch.uint8)
    routing = collate(Collator(how=how, token_id=0), rows, fields).routing
    assert routing is not None
    assert routing.flatten(0, 1)[:, 0].tolist() == (
        [[-1, -1], [-1, -1], [0, 1], [1, 2], [2, 3]]
        if how == "packed"
        else [[-1, -1], [-1, -1], [-1, -1], [0, 1], [1, 2], [2, 3]]
    )


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"routed_experts": torch.zeros(3, 1, 2, dtype=torch.uint8)}, "row p0/0/0: has routed_experts"),
        ({"multi_modal_inputs": {"pixel_values": torch.zeros(1, 2)}}, "row p0/0/0: has multi_modal_inputs"),
        ({"position_ids": torch.arange(3).expand(3, -1)}, "row p0/0/0: position_ids have axes"),
    ],
)
def test_rows_of_more_than_text_cannot_be_a_tree(more, match):
    rows = rows_of((1, 2))
    with pytest.raises(RowsError, match=match):
        collate(Collator(how="tree", token_id=0), rows, [{**fields_of(rows)[0], **more}])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"attn_implementation": "eager"}, "the model's attention is eager"),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, "sliding_attention"),
    ],
)
def test_a_model_that_would_take_a_trees_mask_for_another_is_refused(change, match):
    sizes = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **heads, **change))
    with pytest.raises(ConfigError, match=f"collate is tree.*{match}"):
        check_packs(model, Collator(how="tree", token_id=0))


def test_padding_rows_are_found_behind_the_real_ones():
    rows = rows_of((2, 2), (3, 1), (1, 4))
    fields = fields_of(rows)
    plan = make_plan(rows, Layout(dp_size=8, batch_size=3, mini_batch_size=3))
    batch = TensorBatch.of(plan, fields, infer_schema(rows, fields), Collator(how="packed", token_id=5))
    (step,) = plan.steps("actor")
    micros = {tuple(position): micro for r in range(8) for position, micro in batch.micro_batches(step, r)}
    assert set(micros) == {(i,) for i in range(8)}
    assert micros[(7,)].inputs["input_ids"].tolist() == [[5, 5]]
    assert micros[(7,)].weights.loss.tolist() == micros[(7,)].weights.mean.tolist() == [0]
    assert sum(float(micro.weights.loss.sum()) for micro in micros.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input_ids": torch.arange(4)}, "row p0/0/0: input_ids has 4 tokens and the row 5"),
        ({"response_mask": torch.ones(2)}, "row p0/0/0: response_mask has 2 tokens and the response 3"),
        ({"response_mask": torch.ones(0)}, "row p0/0/0: response_mask has 0 tokens and the response 3"),
        ({"response_mask": None}, "row p0/0/0: field response_mask is missing"),
        ({"position_ids": torch.arange(1, 6)}, "row p0/0/0: position_ids do not count up from 0"),
    ],
)
def test_fields_that_do_not_fit_their_row_are_refused(change, sentence):
    rows = rows_of((2, 3))
    with pytest.raises(RowsError, match=sentence):
        collate(Collator(how="packed", token_id=0), rows, [{**fields_of(rows)[0], **change}])


def test_a_row_without_a_prompt_token_is_refused():
    rows = rows_of((1, 1), (0, 2))
    with pytest.raises(RowsError, match="row p1/0/0: prompt_tokens is 0"):
        collate(Collator(how="packed", token_id=0), rows, fields_of(rows))


def test_prompts_and_responses_stand_for_input_ids():
    rows = rows_of((2, 1))
    fields = [{"prompts": torch.tensor([4, 5]), "responses": torch.tensor([6]), "response_mask": torch.ones(1)}]
    assert collate(Collator(how="packed", token_id=0), rows, fields).inputs["input_ids"].tolist() == [[4, 5, 6]]


def test_a_collator_that_disagrees_with_the_plan_is_refused():
    rows = Rows.from_columns(prompt=["p"], session=[0], trajectory=[0], prompt_tokens=[2], response_tokens=[3])
    fields = fields_of(rows)
    plan = make_plan(rows, Layout(dp_size=1, batch_size=1, mini_batch_size=1))
    with pytest.raises(ConfigError, match="collate packed, min_row_tokens 2 and the Collator is for padded, 2"):
        TensorBatch.of(plan, fields, infer_schema(rows, fields), Collator(how="padded", token_id=0))
