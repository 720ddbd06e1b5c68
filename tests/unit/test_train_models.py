"""Models of a run, and of the check: what is in a folder that is no model, or half of one, is told in a sentence."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from raggedright.check.check_inputs import load_model
from raggedright.cli import main
from raggedright.config.sections import Model
from raggedright.errors import ConfigError
from raggedright.train.load_models import load_actor, load_tokenizer, make_tokenizer
from verification.families import build, small_config


@pytest.fixture
def cut_short(tmp_path: Path) -> Path:
    """A model's folder whose weights were not written to their end."""
    config = AutoConfig.for_model("qwen3", vocab_size=12, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return tmp_path


def test_weights_that_are_cut_short_are_told_with_their_folder(cut_short: Path) -> None:
    with pytest.raises(ConfigError, match=rf"model\.path is {cut_short}: transformers cannot load it"):
        load_actor(Model(path=str(cut_short)), make_tokenizer("0123456789"), seed=0)
    with pytest.raises(ConfigError, match=rf"--model {cut_short}: transformers cannot load it"):
        load_model(str(cut_short), "float32")


def test_a_folder_that_is_no_model_is_refused_and_a_run_folder_says_where_its_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("not a model directory, it has no config.json\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main(["check", "--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(f"it has no config.json; did you mean {tmp_path / 'model'}?\n")


DROPOUT = {  # as each family calls it
    "opt": {"dropout": 0.3},
    "biogpt": {"hidden_dropout_prob": 0.3, "activation_dropout": 0.3},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    "gpt2": {"resid_pdrop": 0.3},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
}


def loaded(name: str, folder: Path, **section: Any) -> nn.Module:
    """A family's small model as the trainer loads it from a folder."""
    build(name, **DROPOUT.get(name, {})).save_pretrained(folder)
    return load_actor(Model(path=str(folder), **section), make_tokenizer("0123456789"), seed=0)


def gradient_of(model: nn.Module) -> list[torch.Tensor]:
    ids = torch.arange(12).view(2, 6) + 3
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", DROPOUT)
def test_no_kind_of_dropout_is_live_and_activations_are_computed_again(name: str, tmp_path: Path) -> None:
    """Two passes over the same row were up to 0.32 apart in families with a name of their own for dropout."""
    plain = loaded(name, tmp_path)
    model = copy.deepcopy(loaded(name, tmp_path, activation_checkpointing=True))
    passes: list[str] = []
    for module in model.modules():
        if type(module).__name__.endswith(("DecoderLayer", "GPT2Block")):
            next(module.children()).register_forward_hook(lambda *_: passes.append("pass"))
    ours = gradient_of(model)
    assert len(passes) == 2 * 2  # two layers, forward and again
    for gradient, expected in zip(ours, gradient_of(plain), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", ["falcon", "persimmon"])
def test_a_family_whose_dropout_is_a_module_of_another_name_loads(name: str, tmp_path: Path) -> None:
    assert not loaded(name, tmp_path).training


@pytest.mark.parametrize("name", ["bloom", "gpt_neox_japanese"])
def test_a_family_without_sdpa_attention_is_refused_with_what_to_set(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"model type '{name}' has no sdpa attention; set model.attention = 'eager'"):
        loaded(name, tmp_path)
    assert not loaded(name, tmp_path, attention="eager").training


def test_a_setting_that_a_family_computes_itself_is_refused() -> None:
    model = Model(made={"model_type": "falcon", "head_dim": 8}, symbols="01")
    with pytest.raises(ConfigError, match=r"model\.made: transformers refuses it \(.*'head_dim' of 'FalconConfig'"):
        load_actor(model, load_tokenizer(model), seed=0)


def test_a_family_whose_activations_cannot_be_computed_again_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="activation_checkpointing is true and model type 'xlnet' has no layers"):
        loaded("xlnet", tmp_path, attention="eager", activation_checkpointing=True)


def test_a_setting_that_a_made_model_derives_from_others_is_refused_by_name() -> None:
    made = {"model_type": "falcon", "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    with pytest.raises(ConfigError, match="head_dim"):
        load_actor(Model(made=made, symbols="0123456789"), make_tokenizer("0123456789"), seed=0)


@pytest.mark.parametrize("source", ["made", "path"])
def test_bfloat16_leaves_the_rotary_frequencies_in_float32(source: str, tmp_path: Path) -> None:
    """As transformers loads them: rounded to bfloat16 they are off by up to 1 in 500."""
    tokenizer, config = make_tokenizer("0123456789"), small_config("llama", rope_theta=10_000.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    given: dict[str, Any] = (
        {"path": str(tmp_path)} if source == "path" else {"made": config.to_diff_dict(), "symbols": "0123456789"}
    )
    half, precise = (load_actor(Model(**given, dtype=d), tokenizer, seed=0) for d in ("bfloat16", "float32"))
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    frequencies = dict(half.named_buffers())
    assert frequencies
    for name, expected in precise.named_buffers():
        assert torch.equal(frequencies[name].double(), expected.double())
