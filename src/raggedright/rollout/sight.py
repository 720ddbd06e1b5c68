"""Images in a batch of the rollout: whose pixels the model reads, and the positions of rows that have some.

Rows with and without images share a pass. Pixels are read once, with the context; afterwards an image is keys and
values like any token, and only the shift of its row's positions remains.
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raggedright.errors import RowsError
from raggedright.rollout.engine import EngineError
from raggedright.tensors.media import placeholder_ids
from raggedright.tensors.positions import image_positions, position_shift

Media = Mapping[str, Tensor]
GRIDS = "image_grid_thw"


class Sight:
    """What a model's config says of images; a model of text sees none."""

    def __init__(self, config: object) -> None:
        vision = getattr(config, "vision_config", None)
        self._image_token_id: int = getattr(config, "image_token_id", -1)
        self._placeholders = placeholder_ids(config)
        self._merge_size: int | None = getattr(vision, "spatial_merge_size", None)

    def check(self, context: "array[int]", media: Media | None) -> None:
        """Refuse a context whose images cannot be placed, and one with a placeholder and no image."""
        if media is None and not len(self._placeholders):
            return
        ids = np.frombuffer(context, dtype=np.int64)
        if media is None:
            if (found := np.isin(ids, self._placeholders)).any():
                at = int(found.argmax())
                raise EngineError(f"a request has no images and its token {at:,}, {ids[at]}, stands for one")
            return
        if self._merge_size is None or GRIDS not in media:
            cause = "the model sees none" if self._merge_size is None else f"{GRIDS} is not among them"
            raise EngineError(f"a request has media ({', '.join(media)}) and {cause}; leave them out")
        try:
            self._axes(ids, media)
        except RowsError as error:
            raise EngineError(f"a request's images do not fit its ids: {error}") from None

    def _axes(self, ids: NDArray[np.int64], media: Media) -> NDArray[np.int64]:
        assert self._merge_size is not None
        grids = media[GRIDS].numpy()
        return image_positions(ids, grids, image_token_id=self._image_token_id, merge_size=self._merge_size)

    def positions(
        self, rows: Sequence[bytes], media: Sequence[Media | None], plain: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions of rows that end at the last column, with axes where some row has images; the shift of each."""
        shifts = np.zeros(len(rows), dtype=np.int64)
        if not any(media):
            return plain, shifts
        axes = np.repeat(plain[None], 3, axis=0)
        for i, (row, seen) in enumerate(zip(rows, media, strict=True)):
            if seen:
                ids = np.frombuffer(row, dtype=np.int64)
                axes[:, i, -len(ids) :] = found = self._axes(ids, seen)
                shifts[i] = position_shift(found)
        return axes, shifts

    def join(self, media: Sequence[Media | None]) -> Media:
        """The media of all rows, one after another."""
        given = [seen for seen in media if seen]
        return {name: torch.cat([seen[name] for seen in given]) for name in given[0]} if given else {}
