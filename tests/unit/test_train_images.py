"""Vision-language models in the trainer: families, processors, critics, and rows that mix in any collation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from vision_cases import END, MADE, START, image_of, load, model_section

from raggedright.check.cases import Case
from raggedright.check.compare import run_case
from raggedright.config.sections import Model
from raggedright.errors import ConfigError
from raggedright.plan.layout import Collate
from raggedright.rows import Rows
from raggedright.tensors.collate import Collator, MicroBatch
from raggedright.tensors.forward import forward_log_probs, forward_values
from raggedright.tensors.images import image_filler
from raggedright.train.load_models import load_actor, load_critic, load_tokenizer
from raggedright.train.passes import model_fields
from raggedright.train.vision_models import load_vision, save_vision


def micro_of(family: str, how: Collate, *, rows: slice = slice(None)) -> MicroBatch:
    """Four rows: an image in the prompt, one in the middle of the response, both, none."""
    model, tokenizer, vision = load(family)
    rng = np.random.default_rng(0)
    seen = START + vision.placeholder + END
    fields, records = [], []
    for number, (first, second) in enumerate(((1, 0), (0, 1), (1, 1), (0, 0))):
        parts, media = [], []
        for text in (f"{number}:{seen * first}=", "12r", f"g{seen * second}", "3="):
            look = vision.encoder_for([image_of(rng)] * (seen in text))
            parts.append(look(text) if seen in text else tokenizer.encode(text, add_special_tokens=False))
            media += [look.media] if look.media else []
        ids = [token for part in parts for token in part]
        mask = [1] * 3 + [0] * len(parts[2]) + [1] * 2
        joined = {name: torch.cat([part[name] for part in media]) for name in media[0]} if media else {}
        arrays = {"input_ids": np.array(ids), "response_mask": np.array(mask), **vision.fields(ids, joined)}
        fields.append(model_fields(arrays, has_vision=True))
        counts = {"prompt_tokens": len(parts[0]), "response_tokens": len(mask), "loss_tokens": 5}
        records.append({"prompt": "p", "session": number, "trajectory": 0, **counts})
    collator = Collator(how=how, token_id=0, mrope=True, image_filler=image_filler(model.config))
    kept = Rows.from_records(records[rows])
    return collator(kept, fields[rows], weight=np.full(len(kept), 0.05), step_loss_tokens=20)


@pytest.mark.parametrize("family", MADE)
@pytest.mark.parametrize("how", ["packed", "padded"])
def test_rows_together_have_the_log_probs_that_they_have_alone(family: str, how: Collate):
    model, _, _ = load(family)
    together = micro_of(family, how)
    found = together.per_row(forward_log_probs(model, together).log_probs)
    for number, row in enumerate(found):
        alone = micro_of(family, "padded", rows=slice(number, number + 1))
        assert torch.allclose(row, forward_log_probs(model, alone).log_probs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "case",
    [
        Case(cut="one", dp=1, entropy=True),
        Case(cut="rows", dp=3, align="lcm"),
        Case(cut="pipeline", dp=2, collate="padded", kl="k3"),
    ],
)
def test_no_plan_changes_the_gradient_of_the_older_families(family: str, case: Case, tmp_path: Path):
    model, _, _ = load(family)
    model.save_pretrained(tmp_path)
    result = run_case(replace(case, model=str(tmp_path)))
    assert result.passed, result


def test_the_entropy_and_the_gradient_are_those_of_the_tokens_that_can_be_sampled():
    model, _, vision = load("qwen3_vl")
    micro = micro_of("qwen3_vl", "packed")
    log_probs, entropy = forward_log_probs(model, micro)
    ((log_probs + entropy) * (micro.weights.loss != 0)).sum().backward()
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    grad = head.weight.grad
    assert grad is not None
    assert not grad[[*vision.placeholder_ids]].any()
    assert bool(torch.isfinite(grad).all() & grad.any())
    model.zero_grad(set_to_none=True)
    most = torch.log(torch.tensor(len(head.weight) - len(vision.placeholder_ids), dtype=torch.float64))
    assert bool(((entropy > 0) & (entropy <= most)).all())


def test_a_critic_has_one_value_per_token():
    section = model_section("qwen3_vl")
    _, tokenizer, _ = load("qwen3_vl")
    critic, again = (load_critic(section, None, tokenizer, seed=0) for _ in range(2))
    micro = micro_of("qwen3_vl", "packed")
    values = forward_values(critic, micro)
    assert values.shape == micro.labels.shape
    assert values.std() > 0
    assert torch.equal(values, forward_values(again, micro))


def test_a_saved_model_is_loaded_with_its_processor(tmp_path: Path):
    made, tokenizer, vision = load("qwen3_vl")
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    save_vision(vision, None, tmp_path)
    assert isinstance(AutoModelForImageTextToText.from_pretrained(tmp_path), PreTrainedModel)
    section = Model.model_validate({"path": str(tmp_path), "dtype": "float64"})
    tokenizer = load_tokenizer(section)
    model = load_actor(section, tokenizer, seed=1)
    loaded = load_vision(section, tokenizer, model)
    assert loaded is not None
    assert type(loaded.processor).__name__ == "Qwen3VLProcessor"
    looks = [each.encoder_for([image_of(np.random.default_rng(1))]) for each in (vision, loaded)]
    text = f"1{START}{vision.placeholder}{END}="
    assert looks[0](text) == looks[1](text)
    assert all(torch.equal(value, looks[1].media[name]) for name, value in looks[0].media.items())
    weights = dict(made.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"model_type": "llava", "text_config": {}, "vision_config": {}}, "llava reads images in a form that is not"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, "a vision_config and no text_config"),
        ({"model_type": "qwen3_vl", "text_config": {"hidden_size": "x"}, "vision_config": {}}, "transformers refuses"),
    ],
)
def test_what_cannot_be_made_is_told_before_the_first_round(made: dict, words: str):
    section = Model.model_validate({"made": made, "symbols": "01"})
    tokenizer = load_tokenizer(section)
    with pytest.raises(ConfigError, match=words):
        load_actor(section, tokenizer, seed=0)


def test_a_folder_without_an_image_processor_is_told(tmp_path: Path):
    made, tokenizer, _ = load("qwen3_vl")
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    section = Model.model_validate({"path": str(tmp_path)})
    with pytest.raises(ConfigError, match="whose image processor cannot be loaded"):
        load_vision(section, tokenizer, load_actor(section, tokenizer, seed=0))
