"""LoRA: what is refused, what an adapter starts with, and that merging and switching off are exact."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

from raggedright.check import compare
from raggedright.check.cases import Case
from raggedright.check.check_inputs import load_model
from raggedright.config.key_rules import resume_changes
from raggedright.config.load import dump_config, make_config, parse_config
from raggedright.config.schema import Config
from raggedright.config.sections import Lora
from raggedright.errors import ConfigError
from raggedright.rollout.local_model import LocalModel
from raggedright.train.lora import adapter_off, add_adapter, lora_layers, merged_copy, save_adapter
from raggedright.train.setup import full_weights

BASE: dict[str, Any] = {
    "model": {"made": {"model_type": "qwen3"}, "symbols": "01"},
    "prompts": {"source": "tasks.jsonl"},
    "agent": {"name": "compaction"},
    "train": {"rounds": 2, "batch_size": 6, "mini_batch_size": 3},
}
IDS = torch.arange(24).view(2, 12) % 30
MODELS = ["qwen3", "qwen3-moe", "qwen3-vl"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def config_of(**lora: object) -> Config:
    return make_config({**BASE, "lora": lora}, source="test")


def adapted(name: str = "qwen3", dtype: str = "float32", *, seed: int = 0, **lora: Any) -> nn.Module:
    model, settings = load_model(name, dtype), {"rank": 4, **lora}
    add_adapter(model, Lora.model_validate(settings), seed=seed)
    return model


def trained(name: str, dtype: str = "float32") -> nn.Module:
    """A model whose adapter changes its outputs by about as much as training does."""
    return load_model(f"{name}-lora", dtype)


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 4, "dropout": 0.1}, r"lora\.dropout: is 0\.1.*every micro-batch; set it to 0"),
        ({"rank": 0}, r"lora\.rank is 0: it takes 1 or more"),
        ({"rank": 4, "alpha": 0.0}, r"lora\.alpha is 0\.0"),
        ({"rank": 4, "init_lora_weights": "pissa"}, r"lora\.init_lora_weights is 'pissa': it takes 'kaiming' or"),
        ({"rank": 4, "r": 8}, r"lora\.r: there is no such key"),
        ({"rank": 4, "target_modules": 3}, r"lora\.target_modules is 3"),
    ],
)
def test_a_setting_that_would_not_be_exact_or_does_not_exist_is_refused(lora: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**lora)


def test_keys_without_a_rank_have_no_effect_and_are_not_in_the_resolved_config() -> None:
    (warning,) = config_of(alpha=16.0).warnings()
    assert "lora.alpha is 16.0 and has no effect: lora.rank is not set" in warning
    assert "lora" not in dump_config(config_of())
    whole = config_of(rank=4, target_modules=["q_proj"])
    assert not whole.warnings()
    assert parse_config(dump_config(whole), source="again") == whole


@pytest.mark.parametrize("change", [{"rank": 8}, {"rank": None}, {"alpha": 16.0}, {"target_modules": ["q_proj"]}])
def test_a_resumed_run_keeps_its_adapter(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"lora.{next(iter(change))} .* -> "):
        resume_changes(config_of(rank=4), config_of(**{"rank": 4, **change}))


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        ("qwen3", {"target_modules": ["q_proj", "lm_head"]}, "hits lm_head, the model's output head.*leave lm_head"),
        ("qwen3", {"target_modules": ["embed_tokens"]}, r"hits model\.embed_tokens, the model's input embeddings"),
        ("qwen3", {"target_modules": ".*lm_head"}, "hits lm_head"),
        ("qwen3", {"target_modules": ["q_proj", "c_attn"]}, "lora.target_modules has 'c_attn'"),
        ("qwen3", {"target_modules": ["c_attn"]}, "PEFT cannot adapt model type 'qwen3'.*c_attn.*not found"),
        ("qwen3", {"target_modules": "("}, "PEFT cannot adapt model type 'qwen3'"),
        ("qwen3", {"target_modules": ["input_layernorm"]}, "PEFT cannot adapt.*RMSNorm.*not supported"),
        ("qwen3", {"exclude_modules": ["c_attn"]}, r"no modules were excluded.*lora\.exclude_modules"),
        ("qwen3", {"target_parameters": ["mlp.experts.down_proj"]}, r"no parameter was matched.*target_parameters"),
        ("qwen3-moe", {"target_modules": ["gate_proj"]}, "PEFT cannot adapt model type 'qwen3_moe'.*up_proj"),
        ("qwen3-moe", {"target_modules": ["q_proj", "w1"]}, "lora.target_modules has 'w1'"),
        ("qwen3-moe", {"target_parameters": ["down_proj", "w2"]}, "lora.target_parameters has 'w2'"),
    ],
)
def test_targets_that_do_not_fit_the_model_are_refused_by_name(name: str, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted(name, **lora)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora\.rank is 4 and needs peft; run pip install '\.\[lora\]'"):
        adapted()


def test_an_adapter_starts_without_effect_and_from_the_seed_alone() -> None:
    torch.manual_seed(99)
    first = adapted(seed=1)
    torch.rand(7)
    again, other = adapted(seed=1), adapted(seed=2)
    weights = dict(first.named_parameters())
    same = dict(again.named_parameters())
    assert all(torch.equal(weight, same[name]) for name, weight in weights.items())
    assert any(not torch.equal(weights[name], weight) for name, weight in other.named_parameters())
    assert torch.equal(logits_of(first), logits_of(load_model("qwen3", "float32")))
    assert not any(module.training for module in first.modules())


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")]
)
def test_adapters_have_the_dtype_of_the_model_but_never_less_than_float32(dtype: str, expected: str) -> None:
    model, single = adapted(dtype=dtype), dict(adapted().named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert str(parameter.dtype) == f"torch.{expected if 'lora_' in name else dtype}"
        if dtype == "float64":
            assert torch.equal(parameter.float(), single[name])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_with_the_adapter_off_a_model_is_its_base_to_the_bit(name: str, dtype: str) -> None:
    model, base = trained(name, dtype), load_model(name, dtype)
    trains = [parameter.requires_grad for parameter in model.parameters()]
    on = logits_of(model)
    with adapter_off(model):
        assert torch.equal(logits_of(model), logits_of(base))
        assert [parameter.requires_grad for parameter in model.parameters()] == trains
    assert torch.equal(logits_of(model), on)
    assert (on - logits_of(base)).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_copy_is_a_plain_model_with_the_same_outputs(name: str) -> None:
    model, base = trained(name), load_model(name, "float32")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    merged = merged_copy(model)
    assert {key: value.shape for key, value in merged.state_dict().items()} == {
        key: value.shape for key, value in base.state_dict().items()
    }
    assert [type(module) for module in merged.modules()] == [type(module) for module in base.modules()]
    assert not hasattr(merged, "peft_config")
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=0, atol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_adapter_on_the_base_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    model = trained(name)
    save_adapter(model, tmp_path / "adapter")
    with warnings.catch_warnings():  # PEFT warns of the patterns that it made for fused experts itself
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        loaded = PeftModel.from_pretrained(load_model(name, "float32"), str(tmp_path / "adapter"))
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_experts_of_a_family_that_peft_does_not_know_are_adapted_by_name() -> None:
    """PEFT's all-linear adapts the fused experts and routers of Qwen3-MoE, and those of few other families."""
    assert any(name.endswith("mlp.experts") for name in lora_layers(adapted("qwen3-moe")))
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    only = adapted("qwen3-moe", target_modules=["q_proj"], target_parameters=experts)
    assert {name.rpartition("layers.0.")[2] for name in lora_layers(only) if "layers.0" in name} == {
        "self_attn.q_proj", "mlp.experts", "mlp.experts.base_layer",
    }  # fmt: skip
    assert torch.equal(logits_of(only), logits_of(load_model("qwen3-moe", "float32")))


def test_an_engine_with_a_copy_needs_the_adapter_and_not_the_base() -> None:
    source = trained("qwen3")
    weights = dict(full_weights(source, only_trained=True))
    assert weights
    assert all("lora_" in name for name in weights)
    copy = adapted(rank=3, seed=5)
    assert not LocalModel(copy, pad_token_id=0).load(weights.items())
    assert torch.equal(logits_of(copy), logits_of(source))
    missing = next(iter(weights))
    assert missing in LocalModel(copy, pad_token_id=0).load((n, w) for n, w in weights.items() if n != missing)
    plain = load_model("qwen3", "float32").requires_grad_(False)
    assert "missing" in LocalModel(plain, pad_token_id=0).load([])


def test_dropout_in_an_adapter_is_what_the_check_would_catch() -> None:
    """With dropout, a row's log-probs differ between two passes: the reason for the refusal."""
    case = Case(model="qwen3-lora")
    model, _ = compare.load_case(case)
    assert compare.run_case(case).passed
    layers = lora_layers(model).values()
    try:
        for layer in layers:
            layer.lora_dropout["default"] = nn.Dropout(0.1)
        assert compare.run_case(case).rel_error > 1e-2
    finally:
        for layer in layers:
            layer.lora_dropout["default"] = nn.Identity()
    assert compare.run_case(case).passed


@pytest.mark.parametrize(
    ("name", "collate"),
    [("qwen3-lora", "tree"), ("qwen3-lora", "padded"), ("qwen3-moe-lora", "packed"), ("qwen3-vl-lora", "packed")],
)
def test_no_plan_changes_the_gradient_of_an_adapter(name: str, collate: Any) -> None:
    experts = "balanced" if "moe" in name else "natural"
    case = Case(model=name, collate=collate, dp=3, align="lcm", kl="k3", entropy=True, experts=experts)
    assert compare.run_case(case).passed
