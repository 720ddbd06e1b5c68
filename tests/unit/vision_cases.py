"""Tiny vision-language models of each family, their processors, and requests with images."""

from functools import lru_cache

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raggedright.agents.vision import Vision
from raggedright.config.sections import Model
from raggedright.rollout.engine import Request, Sampling
from raggedright.train.load_models import load_actor, load_tokenizer
from raggedright.train.vision_models import load_vision

SYMBOLS = "0123456789-:=rgb"
START, END = "<|vision_start|>", "<|vision_end|>"
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
}
_SIZES = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_VISION = {**_SIZES, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "initializer_range": 0.1}
_VISION_3 = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MADE: dict[str, dict[str, object]] = {
    "qwen2_vl": {
        "text_config": _TEXT,
        "vision_config": {**_SIZES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "initializer_range": 0.1},
    },
    "qwen2_5_vl": {
        "text_config": _TEXT,
        "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {"text_config": {**_TEXT, "head_dim": 8}, "vision_config": _VISION_3},
    "qwen3_vl_moe": {"text_config": {**_TEXT, **_EXPERTS, "head_dim": 8}, "vision_config": _VISION_3},
}


def model_section(family: str, dtype: str = "float64", **more: object) -> Model:
    made = {"model_type": family, **MADE[family]}
    return Model.model_validate({"made": made, "symbols": SYMBOLS, "dtype": dtype, **more})


@lru_cache
def load(family: str, dtype: str = "float64") -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Vision]:
    section = model_section(family, dtype)
    tokenizer = load_tokenizer(section)
    model = load_actor(section, tokenizer, seed=0)
    vision = load_vision(section, tokenizer, model)
    assert isinstance(model, PreTrainedModel)
    assert vision is not None
    return model, tokenizer, vision


def image_of(rng: np.random.Generator, *, most: int = 3) -> np.ndarray:
    """Noise of one to `most` squared tokens; a token is 8 x 8 pixels."""
    height, width = 8 * rng.integers(1, most + 1, 2)
    return rng.integers(0, 256, (height, width, 3)).astype(np.uint8)


def requests_of(vision: Vision, count: int, *, seed: int = 0) -> list[Request]:
    """Ragged contexts with none, one or two images."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        images = [image_of(rng) for _ in range(number % 3)]
        parts = [START + vision.placeholder + END + "rgb"[: rng.integers(0, 4)] for _ in images]
        look = vision.encoder_for(images)
        ids = look("0123456789"[: rng.integers(1, 8)] + "".join(parts)) if images else rng.integers(0, 16, 9).tolist()
        sampling = Sampling(max_tokens=int(rng.integers(2, 7)))
        requests.append(Request(ids=ids, sampling=sampling, noise=bytes([number, seed]), media=look.media or None))
    return requests
