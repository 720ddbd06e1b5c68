"""Models, requests and reference numbers that the tests of rollout share."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from raggedright.check.check_inputs import load_model
from raggedright.rollout.engine import EngineContext, Generation, Request, Sampling
from raggedright.rollout.local_engine import LocalEngine
from raggedright.rollout.sampling import noise_key
from raggedright.tensors.images import placeholder_ids

VOCABULARY = 40
TEXT = 35  # tokens below those that stand for images in the vision-language model
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.1,
}
_CONFIGS = {
    "llama": _SIZES,
    "gpt2": _GPT2,
    "mistral": {**_SIZES, "sliding_window": 6},
    "gemma2": {**_SIZES, "sliding_window": 6},
    "gemma3_text": {**_SIZES, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
}


def model_of(name: str, dtype: str = "float64") -> PreTrainedModel:
    """A tiny model with weights of its own, in evaluation mode."""
    if name in _CONFIGS:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **_CONFIGS[name]))
        nn.Module.to(model, getattr(torch, dtype)).eval()
    else:
        model = load_model(name, dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def key(number: int, *, seed: int = 0) -> bytes:
    return noise_key(seed=seed, round=1, prompt=f"p{number}", session=0, attempt=0, trajectory=0)


def requests_of(count: int, *, seed: int = 0, cuts: bool = False, longest: int = 20, most: int = 12) -> list[Request]:
    """Ragged requests with made-up contexts, limits, temperatures and, if asked for, top-k and top-p."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        sampling = Sampling(
            max_tokens=int(rng.integers(1, most + 1)),
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.7])) if cuts else 1.0,
            top_k=int(rng.choice([0, 1, 5, 100])) if cuts else 0,
            top_p=float(rng.choice([1.0, 0.9, 0.3])) if cuts else 1.0,
            stop_ids=frozenset(rng.integers(0, VOCABULARY, 2).tolist()),
        )
        ids = rng.integers(0, TEXT, rng.integers(1, longest + 1)).tolist()
        requests.append(Request(ids=ids, sampling=sampling, noise=key(number, seed=seed)))
    return requests


def local_engine(model: nn.Module, **context: Any) -> LocalEngine:
    return LocalEngine(EngineContext(model=model, **context))


def generate_all(engine: LocalEngine, requests: Sequence[Request]) -> list[Generation]:
    """All answers, from an event loop of their own."""

    async def together() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(together())


def full_log_probs(model: nn.Module, request: Request, answer: Generation) -> list[float]:
    """Of the generated tokens, by one pass over the whole row without a cache, at the request's temperature."""
    ids = torch.tensor([[*request.ids, *answer.ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    logits[:, placeholder_ids(model.config)] = -torch.inf
    log_probs = torch.log_softmax(logits.double() / (request.sampling.temperature or 1.0), dim=-1)
    index = torch.arange(len(request.ids) - 1, ids.shape[1] - 1)
    return log_probs[index, ids[0, len(request.ids) :]].tolist()
