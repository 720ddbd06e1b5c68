"""Weights and models: which versions an engine speaks of, what it loads, and which models it refuses."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rollout_cases import generate_all, local_engine, model_of, requests_of
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from raggedright.errors import ConfigError
from raggedright.rollout.engine import EngineError

REQUESTS = requests_of(6)


def _moved(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def test_a_shared_model_is_not_loaded_and_its_version_is_said() -> None:
    model = model_of("qwen3")
    engine = local_engine(model)

    def untouched() -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the weights were read")
        yield "", torch.zeros(0)

    before = generate_all(engine, REQUESTS)
    assert {answer.weight_version for answer in before} == {0}
    _moved(model)
    engine.update_weights(untouched(), version=7)
    after = generate_all(engine, REQUESTS)
    assert {answer.weight_version for answer in after} == {7}
    assert [answer.ids for answer in after] != [answer.ids for answer in before]


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_copy_generates_as_the_weights_it_was_given(name: str) -> None:
    trained, copy = _moved(model_of(name)), model_of(name)
    engine = local_engine(copy, shared=False)
    engine.update_weights(((n, p.detach().float()) for n, p in trained.named_parameters()), version=1)
    for mine, theirs in zip(copy.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach().float().double(), rtol=0, atol=0)
    engine.update_weights(trained.state_dict().items(), version=2)
    assert generate_all(engine, REQUESTS) == [
        answer._replace(weight_version=2) for answer in generate_all(local_engine(trained), REQUESTS)
    ]


def test_weights_that_do_not_fit_are_named_and_nothing_is_generated_with_them() -> None:
    trained = model_of("qwen3")
    engine = local_engine(model_of("qwen3"), shared=False)
    weights = dict(trained.named_parameters())
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = nn.Parameter(torch.zeros(3, 32))
    weights["model.nothing"] = nn.Parameter(torch.zeros(1))
    words = (
        r"version 4 do not fit.* 1 missing: model\.norm\.weight; 1 unknown: model\.nothing; "
        r"1 of another shape: lm_head\.weight is \(3, 32\) and the model has \(40, 32\)"
    )
    with pytest.raises(EngineError, match=words):
        engine.update_weights(weights.items(), version=4)
    with pytest.raises(EngineError, match=r"last update of weights failed .*update them again"):
        generate_all(engine, REQUESTS)
    engine.update_weights(trained.named_parameters(), version=5)
    assert generate_all(engine, REQUESTS)[0].weight_version == 5


_TINY = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next", "llama4_text"])
def test_models_that_keep_more_than_keys_and_values_are_refused_by_name(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_TINY))
    with pytest.raises(ConfigError, match=f"model type '{kind}'"):
        local_engine(model)


def test_models_of_another_make_are_refused() -> None:
    with pytest.raises(ConfigError, match="Linear is none"):
        local_engine(nn.Linear(2, 2))
    config = AutoConfig.for_model("t5", vocab_size=40, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ConfigError, match="model type 't5' has an encoder"):
        local_engine(model)
    with pytest.raises(ConfigError, match="max_batch_rows is 0"):
        local_engine(model_of("qwen3"), max_batch_rows=0)
    with pytest.raises(ConfigError, match="pad_token_id is 40"):
        local_engine(model_of("qwen3"), pad_token_id=40)


def test_sharded_weights_are_refused_with_the_remedy() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = model_of("qwen3")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match="unsharded copy with shared = False"):
            local_engine(model)
    finally:
        dist.destroy_process_group()
