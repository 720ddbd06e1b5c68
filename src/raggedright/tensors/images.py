"""Images of vision-language models: their placeholder tokens, the smallest image, and positions with axes.

Placeholder tokens stand for images and are not text: the policy gives them probability zero, in rollout and in
training, since a sampled placeholder would need an image. A micro-batch without images gets the smallest image as a
filler, because all ranks of a sharded model must run its vision tower.

Positions have three axes (time, height, width), counted as the Qwen-VL family counts them: text counts up by one on all
axes; the tokens of an image lie on its grid from the next position on; the text after it continues at the end of the
grid's longer side. Invariant: the numbers equal those of the model's own `get_rope_index`. Note: after an image, a
position is smaller than the number of tokens before it, so decoding needs `position_shift`.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from raggedright.errors import ConfigError, RowsError
from raggedright.tensors.row_fields import Fields

Positions = NDArray[np.int64]

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def has_vision(config: object) -> bool:
    """Whether a model reads images."""
    return hasattr(config, "vision_config")


def placeholder_ids(config: object) -> list[int]:
    """The tokens of a model that stand for images, video or audio; none for a text model."""
    if not has_vision(config):
        return []
    ids = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return sorted({token for token in ids if isinstance(token, int)})


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


def image_positions(ids: Positions, grids: Positions, *, image_token_id: int, merge_size: int) -> Positions:
    """[3, tokens] of a row whose images have these grids of patches, [images, 3], in their order."""
    positions = np.empty((3, len(ids)), dtype=np.int64)
    places = np.flatnonzero(ids == image_token_id)
    merged = grids // [1, merge_size, merge_size]
    counts = merged.prod(axis=1)
    if len(places) != counts.sum():
        raise RowsError(
            f"a row has {len(places):,} image tokens and its {len(grids):,} images take {counts.sum():,}; "
            "give each image its placeholder, and no additional placeholders"
        )
    at = start = seen = 0
    for grid, count in zip(merged, counts, strict=True):
        first = int(places[seen])
        positions[:, start:first] = at + np.arange(first - start)
        at += first - start
        positions[:, first : first + count] = at + np.indices(grid).reshape(3, -1)
        at += int(grid[1:].max())
        start, seen = first + int(count), seen + int(count)
    positions[:, start:] = at + np.arange(len(ids) - start)
    return positions


def position_shift(positions: Positions) -> int:
    """The position of the next token minus the number of tokens before it."""
    return int(positions.max()) + 1 - positions.shape[1]
