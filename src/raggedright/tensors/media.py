"""A small image for micro-batches that have none: ranks of a sharded vision-language model must all run its tower."""

from typing import Protocol

import torch

from raggedright.errors import ConfigError
from raggedright.tensors.schema import Fields


class VisionConfig(Protocol):
    """What the size of the smallest image depends on."""

    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int


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
