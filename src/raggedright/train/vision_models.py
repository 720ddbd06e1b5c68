"""Vision-language models: the supported families, their processor, and the config of one that is made from scratch.

The families are those whose images are pixel_values and image_grid_thw and whose positions have three axes. Both
collations are exact for them; any other family is refused before the first round.

Note: the processor is the family's class without its video part, which transformers cannot make without torchvision.
Images are resized by Pillow on every machine, so the pixels of a run do not depend on what is installed.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    PROCESSOR_MAPPING,
    AutoImageProcessor,
    BaseImageProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
)

from raggedright.agents.vision import Vision
from raggedright.config.sections import Model
from raggedright.errors import ConfigError
from raggedright.tensors.images import has_vision, image_positions, placeholder_ids

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
MADE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_MADE_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_MAX_IMAGE_TOKENS = 1280
_VIDEO_FILES = ("video_preprocessor_config.json", "chat_template.json")


def check_family(config: PretrainedConfig) -> None:
    """Refuse a vision-language model whose images or positions have another form."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model: {config.model_type} reads images in a form that is not supported, so neither collation is exact "
            f"for its rows; use one of {', '.join(FAMILIES)}, or a text model"
        )


def made_values(made: Mapping[str, object], tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The config of a model that is made from scratch, with the tokenizer's ids filled in."""
    text = made.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("model.made has a vision_config and no text_config; give both, each a transformers config")
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(_MADE_IDS, MADE_TOKENS, strict=True)}
    return {**ids, **made, "text_config": {"vocab_size": len(tokenizer), **special, **text}}


def load_vision(model: Model, tokenizer: PreTrainedTokenizerBase, actor: nn.Module) -> Vision | None:
    """What agents need for images; None for a text model."""
    config = actor.config
    assert isinstance(config, PretrainedConfig)
    if not has_vision(config):
        return None
    images = _image_processor(model, config)
    vision = Vision(
        processor=_without_videos(PROCESSOR_MAPPING[type(config)])(images, tokenizer, tokenizer.chat_template),
        image_token_id=config.image_token_id,
        placeholder_ids=placeholder_ids(config),
        merge_size=config.vision_config.spatial_merge_size,
    )
    _check_positions(actor, vision)
    return vision


def _image_processor(model: Model, config: PretrainedConfig) -> BaseImageProcessor:
    if model.path is not None:
        try:
            return AutoImageProcessor.from_pretrained(model.path, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            cause = str(error).splitlines()[0]
            raise ConfigError(
                f"model.path is {model.path}, whose image processor cannot be loaded ({cause}); "
                "save the model's processor into it"
            ) from None
    vision = config.vision_config
    smallest = (vision.patch_size * vision.spatial_merge_size) ** 2
    return Qwen2VLImageProcessorPil(  # all of these families use it
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        size={"shortest_edge": smallest, "longest_edge": smallest * _MAX_IMAGE_TOKENS},
    )


def _without_videos(family: Any) -> Any:
    """The family's processor for images and text only; transformers reads the parts from its signature."""

    def __init__(self: Any, image_processor: object, tokenizer: object, chat_template: object = None) -> None:  # noqa: N807
        family.__init__(self, image_processor, tokenizer, None, chat_template=chat_template)

    return type(family.__name__, (family,), {"__init__": __init__, "__module__": family.__module__})


def _check_positions(actor: nn.Module, vision: Vision) -> None:
    """Refuse a model whose positions on a row with two images differ from ours."""
    base = getattr(actor, "model", None)
    assert base is not None
    merge, token = vision.merge_size, vision.image_token_id
    grids = torch.tensor([[1, 2 * merge, 3 * merge], [1, 2 * merge, merge]])
    plain = 0 if token else 1
    ids = torch.tensor([plain, *[token] * 6, plain, plain, *[token] * 2, plain])
    theirs, _ = base.get_rope_index(ids[None], (ids == token).int()[None], image_grid_thw=grids)
    ours = image_positions(ids.numpy(), grids.numpy(), image_token_id=token, merge_size=merge)
    if (theirs[:, 0].numpy() != ours).any():
        raise ConfigError(
            f"model: {type(actor).__name__} computes other positions for a row with images than raggedright; "
            "this version of transformers changed them: use an older one"
        )


def with_value_head(model: nn.Module) -> nn.Module:
    """The same model with a new head that has one output per token."""
    assert isinstance(model, PreTrainedModel)
    old = model.get_output_embeddings()
    assert isinstance(old, nn.Linear)
    head = nn.Linear(old.in_features, 1, bias=False, dtype=old.weight.dtype)
    nn.init.normal_(head.weight, std=model.config.get_text_config().initializer_range)
    model.set_output_embeddings(head)
    return model


def save_vision(vision: Vision, source: str | None, folder: Path) -> None:
    """Save the processor next to a saved model; the files of its video part are copied from the source."""
    vision.processor.save_pretrained(folder)
    for name in _VIDEO_FILES:
        if source is not None and (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)
