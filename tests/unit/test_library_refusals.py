"""What a training loop of one's own may hand over wrong: one sentence that names the row and the field."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raggedright import ConfigError, Layout, Rows, RowsError, make_plan
from raggedright.tensors import (
    Collator,
    MicroBatch,
    TensorBatch,
    forward_log_probs,
    forward_values,
    infer_schema,
    padding_rows,
)

VOCAB = 30
ROWS = Rows.from_columns(
    prompt=["p", "p", "q"], session=[0, 1, 0], trajectory=[0, 0, 0], prompt_tokens=[4, 2, 1], response_tokens=[3, 5, 1]
)
NAMES = ("old_log_probs", "advantages")


def make_fields() -> list[dict[str, torch.Tensor]]:
    return [
        {
            "input_ids": torch.arange(n),
            "response_mask": torch.ones(r, dtype=torch.long),
            "old_log_probs": torch.zeros(r),
            "advantages": torch.ones(r),
        }
        for n, r in zip(ROWS.tokens.tolist(), ROWS.response_tokens.tolist(), strict=True)
    ]


def collate(fields: list[dict[str, torch.Tensor]], *, token_id: int = 0) -> list[MicroBatch]:
    plan = make_plan(ROWS, Layout(dp_size=2, batch_size=2, mini_batch_size=1, rollout_n=2))
    batch = TensorBatch.of(plan, fields, infer_schema(ROWS, fields), Collator(how="packed", token_id=token_id))
    steps = plan.steps("actor")
    return [micro for step in steps for rank in range(2) for _, micro in batch.micro_batches(step, rank, NAMES)]


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ["input_ids", "response_mask", "old_log_probs", "advantages"])
def test_a_field_by_token_that_is_no_vector_names_row_and_field(name, dim, row):
    """`input_ids` of shape [1, n] were a bare error of torch's; advantages of shape [n, 1] trained on a product."""
    fields = make_fields()
    fields[row][name] = fields[row][name].unsqueeze(dim)
    with pytest.raises(RowsError, match=rf"{ROWS.key[row]}\b.*field {name} has shape|field {name} has shape"):
        collate(fields)
    everywhere = [{**own, name: own[name].unsqueeze(dim)} for own in make_fields()]
    with pytest.raises(RowsError, match=rf"row {ROWS.key[0]}: field {name} has shape"):
        Collator(how="padded", token_id=0)(
            ROWS, everywhere, weight=torch.ones(3).numpy(), step_loss_tokens=9, names=NAMES
        )


def test_prompts_and_responses_that_are_no_vectors_name_row_and_field():
    fields = [{"prompts": own["input_ids"][:1][None], "responses": own["input_ids"][1:]} for own in make_fields()]
    with pytest.raises(RowsError, match="row p/0/0: field prompts has shape"):
        Collator(how="packed", token_id=0)(ROWS, fields, weight=torch.ones(3).numpy(), step_loss_tokens=9)


def test_an_attention_mask_with_zeros_is_refused_and_ones_are_fine():
    """Its zeros were ignored without a word."""
    fields = [{**own, "attention_mask": torch.ones(len(own["input_ids"]), dtype=torch.long)} for own in make_fields()]
    assert len(collate(fields)) == len(collate(make_fields()))
    fields[1]["attention_mask"][:2] = 0
    with pytest.raises(RowsError, match="row p/1/0: field attention_mask has 2 zeros of 7"):
        collate(fields)


@pytest.mark.parametrize("token_id", [None, -1, True, 1.0, "0"])
def test_a_padding_token_that_is_no_id_is_refused(token_id):
    with pytest.raises(ConfigError, match=r"token_id is .*; it takes a token id"):
        Collator(how="packed", token_id=token_id)
    with pytest.raises(ConfigError, match=r"token_id is .*; it takes a token id"):
        padding_rows(infer_schema(ROWS, make_fields()), 1, token_id=token_id)


def make_model() -> torch.nn.Module:
    config = AutoConfig.for_model("qwen3", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)
    return AutoModelForCausalLM.from_config(config)


def test_a_negative_id_names_row_field_and_token():
    fields = make_fields()
    fields[1]["input_ids"][4] = -1
    with pytest.raises(RowsError, match="row p/1/0: field input_ids has id -1 at token 4"):
        infer_schema(ROWS, fields)


@pytest.mark.parametrize("how", ["packed", "padded", "tree"])
@pytest.mark.parametrize("bad", [VOCAB, -1, 10**12])
@pytest.mark.parametrize(("row", "token"), [(0, 5), (1, 0), (1, 6)])
@pytest.mark.parametrize("forward", [forward_log_probs, forward_values])
def test_a_model_refuses_ids_that_it_has_no_embedding_for_by_row(forward, row, token, bad, how):
    """An IndexError of torch's without the id; on labels alone (a tree's last token), out of a gather."""
    fields = make_fields()
    fields[row]["input_ids"][token] = bad
    micro = Collator(how=how, token_id=0)(ROWS, fields, weight=torch.ones(3).numpy(), step_loss_tokens=9)
    with pytest.raises(RowsError, match=rf"row {ROWS.key[row]}: .*id {bad:,} at token {token} .*{VOCAB} ids"):
        forward(make_model(), micro)


def test_ids_are_checked_without_asking_the_device():
    """On a GPU a lookup outside the embeddings fails later, in a sentence of CUDA's; `meta` has no values."""
    fields = make_fields()
    fields[2]["input_ids"][1] = VOCAB
    micro = Collator(how="packed", token_id=0)(ROWS, fields, weight=torch.ones(3).numpy(), step_loss_tokens=9)
    with pytest.raises(RowsError, match=rf"row q/0/0: .*id {VOCAB} at token 1 "):
        forward_log_probs(make_model().to("meta"), micro.to("meta"))


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_a_padding_token_outside_the_vocabulary_is_refused_also_where_nothing_is_filled(how):
    one = ROWS.take(np.array([1]))
    micro = Collator(how=how, token_id=777)(one, make_fields()[1:2], weight=torch.ones(1).numpy(), step_loss_tokens=5)
    assert 777 not in micro.inputs["input_ids"]
    with pytest.raises(ConfigError, match=rf"token_id.* 777 .*{VOCAB} ids"):
        forward_log_probs(make_model(), micro)
