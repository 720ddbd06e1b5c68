"""Positions with axes (time, height, width) of rows with images, as the Qwen-VL family counts them.

Text counts up by one on all axes; the tokens of an image lie on its grid from the next position on; what follows goes
on behind the grid's longer side. Invariant: the same numbers as the model's own `get_rope_index`.

The surprise: after an image a position is less than the count of tokens before it, so that decoding needs the shift.
"""

import numpy as np
from numpy.typing import NDArray

from raggedright.errors import RowsError

Positions = NDArray[np.int64]


def image_positions(ids: Positions, grids: Positions, *, image_token_id: int, merge_size: int) -> Positions:
    """[3, tokens] of a row whose images have these grids of patches, [images, 3], in their order."""
    positions = np.empty((3, len(ids)), dtype=np.int64)
    places = np.flatnonzero(ids == image_token_id)
    merged = grids // [1, merge_size, merge_size]
    counts = merged.prod(axis=1)
    if len(places) != counts.sum():
        raise RowsError(
            f"a row has {len(places):,} image tokens and its {len(grids):,} images take {counts.sum():,}; "
            "give every image its placeholder, and no placeholder more"
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
    """What the position of the next token is beyond the count of tokens before it."""
    return int(positions.max()) + 1 - positions.shape[1]
