"""What a vision-language model's config says of its images: the tokens they take, and the smallest one.

A micro-batch without images takes the smallest one along: ranks of a sharded model must all run its tower.

The surprise: tokens that stand for images are no text. The policy gives them probability zero, in rollout and in
training alike; a model that sampled one would owe it an image.
"""

import torch

from raggedright.errors import ConfigError
from raggedright.tensors.schema import Fields

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def has_vision(config: object) -> bool:
    """Whether a model reads images."""
    return hasattr(config, "vision_config")


def placeholder_ids(config: object) -> list[int]:
    """The tokens of a model that stand for images and the like; none for a model of text."""
    if not has_vision(config):
        return []
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return sorted({token for token in found if isinstance(token, int)})


def image_filler(config: object) -> Fields:
    """The shortest row with an image that a model of the Qwen-VL family accepts; it has no response, so no weight."""
    vision = getattr(config, "vision_config", None)
    names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    if vision is None or not all(hasattr(vision, name) for name in names) or not hasattr(config, "image_token_id"):
        raise ConfigError(
            f"{type(config).__name__} does not say what its smallest image is (vision_config and image_token_id); "
            "give Collator an image_filler: the fields of one short row with an image"
        )
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    merge, patch = vision.spatial_merge_size, vision.patch_size
    pixels = torch.zeros(merge * merge, channels * vision.temporal_patch_size * patch * patch)
    ids = torch.tensor([config.vision_start_token_id, config.image_token_id, config.vision_end_token_id])  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)).expand(3, -1),
        "multi_modal_inputs": {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, merge, merge]])},
    }
