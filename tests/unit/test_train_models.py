"""Models of a run, and of the check: what is in a folder that is no model, or half of one, is told in a sentence."""

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from raggedright.check.models import load_model
from raggedright.cli import main
from raggedright.config.sections import Model
from raggedright.errors import ConfigError
from raggedright.train.models import load_actor, make_tokenizer


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
