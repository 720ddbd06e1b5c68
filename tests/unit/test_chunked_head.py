"""Log-probs and entropy in chunks equal those of whole logits, and no tensor has the shape of whole logits."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from raggedright import Layout, Rows, make_plan
from raggedright.plan.layout import Collate
from raggedright.tensors import Collator, TensorBatch, forward_log_probs, infer_schema
from raggedright.tensors.chunked_head import LogitTransform, capture_hidden
from raggedright.tensors.collate import MicroBatch
from raggedright.tensors.forward import forward_chosen, forward_outputs, whole_outputs

VOCABULARY = 301
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1}
FAMILIES = {  # and what they do to the head's outputs
    "qwen3": ({}, LogitTransform()),
    "llama": ({"tie_word_embeddings": True}, LogitTransform()),
    "phi": ({}, LogitTransform()),  # its head has a bias
    "gemma2": ({"final_logit_softcapping": 3.0}, LogitTransform(cap=3.0)),
    "cohere": ({"logit_scale": 0.25}, LogitTransform(0.25)),
    "granite": ({"logits_scaling": 2.0}, LogitTransform(0.5)),
}


@cache
def _made(family: str) -> Any:
    torch.manual_seed(0)
    settings = {**SIZES, **HEADS, "initializer_range": 0.5, "tie_word_embeddings": False, **FAMILIES[family][0]}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).double().eval()


def model_of(family: str) -> Any:
    return copy.deepcopy(_made(family))


def micro_of(how: Collate = "packed") -> MicroBatch:
    """Three rows of 5, 9 and 2 response tokens."""
    lengths = [5, 9, 2]
    rows = Rows.from_columns(
        prompt=["p"] * 3, session=[0, 0, 1], trajectory=[0, 1, 0], prompt_tokens=[4, 2, 3], response_tokens=lengths
    )
    generator = torch.Generator().manual_seed(1)
    fields = [
        {
            "input_ids": torch.randint(2, VOCABULARY, (total,), generator=generator),
            "response_mask": torch.ones(length, dtype=torch.long),
        }
        for total, length in zip(rows.tokens.tolist(), lengths, strict=True)
    ]
    plan = make_plan(rows, Layout(dp_size=1, batch_size=1, mini_batch_size=1, rollout_n=2, collate=how))
    batch = TensorBatch.of(plan, fields, infer_schema(rows, fields), Collator(how=how, token_id=0))
    ((_, micro),) = batch.micro_batches(plan.steps("actor")[0], 0)
    return micro


def objective(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """A sum in which every token has another weight."""
    weights = torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)
    return (weights * log_probs.exp()).sum() + (weights.flip(0) * entropy).sum()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_equal_whole_logits_in_every_family(family, chunk_tokens):
    model, micro = model_of(family), micro_of()
    for temperature in (1.0, 0.7, torch.linspace(0.5, 1.5, 16, dtype=torch.float64)):
        log_probs, entropy = forward_log_probs(model, micro, temperature=temperature, chunk_tokens=chunk_tokens)
        objective(log_probs, entropy).backward()
        gradients = gradients_of(model)
        whole = whole_outputs(forward_outputs(model, micro), micro.labels, temperature, [])
        objective(*whole).backward()
        expected = gradients_of(model)
        torch.testing.assert_close((log_probs, entropy), whole, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(
                forward_chosen(model, micro, temperature=temperature), whole[0], rtol=0, atol=1e-12
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_does_to_its_logits_is_found(family):
    model, micro = model_of(family), micro_of()
    hidden = capture_hidden(model, micro.inputs, micro.logit_index)
    assert hidden is not None
    assert hidden.transform == FAMILIES[family][1]


@pytest.mark.parametrize("how", ["packed", "padded", "tree"])
def test_ids_without_probability_have_no_gradient(how):
    model, micro, masked = model_of("gemma2" if how != "tree" else "qwen3"), micro_of(how), [7, 300]
    model.config.vision_config, model.config.image_token_id, model.config.video_token_id = {}, *masked
    log_probs, entropy = forward_log_probs(model, micro, chunk_tokens=4)
    objective(log_probs, entropy).backward()
    gradients = gradients_of(model)
    whole = whole_outputs(forward_outputs(model, micro), micro.labels, 1.0, masked)
    objective(*whole).backward()
    torch.testing.assert_close((log_probs, entropy), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, gradients_of(model), rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes, in both passes, except views of parameters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.elements = 0
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        made = [each.numel() for each in tensors if each.untyped_storage().data_ptr() not in self.parameters]
        self.elements = max([self.elements, *made])
        return result


def test_no_tensor_has_the_size_of_whole_logits():
    model, micro = model_of("qwen3"), micro_of()
    whole = len(micro.labels) * VOCABULARY
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.numel() < whole // 4)  # the gradient of a head is as large as the head
    forward_log_probs(model, micro)  # finds the transform
    with Largest(model) as largest:
        objective(*forward_log_probs(model, micro, chunk_tokens=2)).backward()
    assert largest.elements <= whole // 4
    with Largest(model) as largest:
        objective(*whole_outputs(forward_outputs(model, micro), micro.labels, 1.0, [])).backward()
    assert largest.elements == whole


def test_a_frozen_head_has_no_gradient():
    model, micro = model_of("phi"), micro_of()
    model.get_output_embeddings().requires_grad_(False)
    objective(*forward_log_probs(model, micro, chunk_tokens=3)).backward()
    assert not [name for name in gradients_of(model) if "lm_head" in name]


def test_entropy_without_a_graph_has_the_same_value():
    model, micro = model_of("qwen3"), micro_of()
    with_graph = forward_log_probs(model, micro)
    without = forward_log_probs(model, micro, entropy_graph=False)
    assert not without.entropy.requires_grad
    assert torch.equal(with_graph.entropy, without.entropy)
    without.log_probs.sum().backward()
    assert gradients_of(model)


class Doubled(nn.Linear):
    """A head of the user's own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Squashed(nn.Module):
    """A model that does something to its logits that no config says."""

    model: Any

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.config = model, model.config

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, **inputs):
        outputs = self.model(**inputs)
        outputs.logits = torch.sinh(outputs.logits)
        return outputs


class Indexed(Squashed):
    """A model that works with the logits of certain tokens."""

    def forward(self, **inputs):
        outputs = self.model(**inputs)
        outputs.logits[..., 200] = -5.0
        return outputs


@pytest.mark.parametrize("kind", ["own head", "squashed", "indexed"])
def test_a_model_with_another_head_computes_whole_logits(kind):
    model, micro = model_of("qwen3"), micro_of()
    if kind == "own head":
        model.lm_head.__class__ = Doubled
    elif kind == "squashed":
        model = Squashed(model)
    else:
        model = Indexed(model)
    for _ in range(2):
        outputs = forward_log_probs(model, micro, chunk_tokens=3)
        whole = whole_outputs(forward_outputs(model, micro), micro.labels, 1.0, [])
        torch.testing.assert_close(tuple(outputs), whole, rtol=0, atol=0)
        assert capture_hidden(model, micro.inputs, micro.logit_index) is None
    assert "forward" not in vars(model.get_output_embeddings())


def test_an_error_before_the_head_reaches_the_caller():
    model, micro = model_of("qwen3"), micro_of()
    handle = model.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        forward_log_probs(model, micro)
    handle.remove()
    assert capture_hidden(model, micro.inputs, micro.logit_index) is not None


def test_mixed_precision_is_as_close_as_whole_logits_are():
    model, micro = model_of("qwen3").float(), micro_of()
    exact = whole_outputs(forward_outputs(model, micro), micro.labels, 1.0, [])
    objective(*exact).backward()
    expected = gradients_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = forward_log_probs(model, micro, chunk_tokens=3)
    objective(*outputs).backward()
    gradients = gradients_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = whole_outputs(forward_outputs(model, micro), micro.labels, 1.0, [])
    objective(*whole).backward()
    whole_gradients = gradients_of(model)
    assert outputs.log_probs.dtype == torch.float32
    for ours, theirs, true in zip(outputs, whole, exact, strict=True):
        assert (ours - true).abs().max() <= 1.5 * (theirs - true).abs().max() + 1e-3
    name = "lm_head.weight"
    assert gradients[name].dtype == torch.float32
    error, whole_error = (torch.dist(each[name], expected[name]) for each in (gradients, whole_gradients))
    assert error <= 1.5 * whole_error
