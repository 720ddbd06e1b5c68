"""Keys and values: of the rows that decode together, and of trajectories between their generations.

Rows of a batch end at the same column: shorter ones have masked columns on the left. Invariants: there are as many
columns as the longest row has tokens; the content of a masked column is finite and has weight zero; rows never mix, so
the numbers of a row do not depend on the other rows (up to the rounding of matrix products of another shape). Layers
with a sliding window keep every column, too, and the model masks what is outside of the window, so that all layers are
joined in the same way.

Between its generations a trajectory's row is kept by name, so that the next generation reads only the new tokens.
Invariants: what is kept was computed with the current weights (the engine clears all of it at an update); using a kept
row changes results by no more than the rounding of matrix products of another shape. Short contexts are not kept,
because reading them again costs less; nor are contexts with images.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from raggedright.rollout.engine import Media, join_media
from raggedright.rollout.local_model import LocalModel

Ids = NDArray[np.int64]

MIN_KEPT_TOKENS = 32
_MIN_SPARE_COLUMNS = 16


class PastRow(NamedTuple):
    """What the model has computed for a row's first tokens: their ids, keys and values by layer, experts."""

    ids: Ids
    layers: list[tuple[Tensor, ...]]  # keys and values, [tokens, heads, size] each
    experts: NDArray[np.integer] | None  # [tokens, layers, topk]

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        experts = 0 if self.experts is None else self.experts.nbytes
        return self.ids.nbytes + experts + sum(part.nbytes for layer in self.layers for part in layer)


class KeptRows:
    """Rows by the key of their trajectory, within a number of bytes: the least recently used ones are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._rows: OrderedDict[bytes, PastRow] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def wants(self, num_tokens: int) -> bool:
        """Whether a row with this number of tokens is worth keeping."""
        return num_tokens >= MIN_KEPT_TOKENS and self._max_bytes > 0

    def take(self, key: bytes, context: Ids) -> PastRow | None:
        """Remove and return the row of a trajectory; None if the context does not begin with its tokens."""
        row = self.drop(key)
        if row is None or not np.array_equal(context[: len(row.ids)], row.ids):
            return None
        # A pass reads one token or more.
        return row if len(row.ids) < len(context) else row._replace(ids=row.ids[:-1])

    def put(self, key: bytes, row: PastRow) -> None:
        """Keep a row, and drop others while there are too many bytes."""
        self.drop(key)
        self._rows[key] = row
        self.num_bytes += row.num_bytes
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._rows)))

    def drop(self, key: bytes) -> PastRow | None:
        """Remove the row of a trajectory, if there is one."""
        row = self._rows.pop(key, None)
        if row is not None:
            self.num_bytes -= row.num_bytes
        return row

    def clear(self) -> None:
        """Remove all rows."""
        self._rows.clear()
        self.num_bytes = 0


class _Layer(DynamicLayer):
    """One layer's keys and values, which are views of the used columns of two larger tensors, `buffers`."""

    def __init__(self, buffers: Sequence[Tensor] = (), num_columns: int = 0) -> None:
        super().__init__()
        self.buffers = [*buffers]
        self.num_columns = num_columns
        if self.buffers:
            self._use(num_columns)

    @property
    def num_spare(self) -> int:
        """Columns that are not used yet."""
        return self.buffers[0].shape[2] - self.num_columns

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns, for which there is room, and return all of them."""
        start, end = self.num_columns, self.num_columns + key_states.shape[-2]
        if self.buffers:
            self.buffers[0][:, :, start:end] = key_states
            self.buffers[1][:, :, start:end] = value_states
        else:
            self.buffers = [key_states, value_states]
        return self._use(end)

    def _use(self, num_columns: int) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, :num_columns] for buffer in self.buffers)
        self.num_columns, self.keys, self.values = num_columns, keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return keys, values


def _new_buffer(like: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A tensor [rows, heads, columns, size] in which the columns of a row are next to each other, as models do it."""
    return like.new_empty(num_rows, num_columns, like.shape[1], like.shape[3]).transpose(1, 2)


def _join_layers(parts: Sequence[tuple[_Layer, Tensor]], num_columns: int, num_spare: int) -> _Layer:
    """These rows of the layers, one below another, with spare columns on the right."""
    buffers = []
    for number, like in enumerate(parts[0][0].buffers):
        buffer = _new_buffer(like, sum(len(rows) for _, rows in parts), num_columns + num_spare)
        start = 0
        for layer, rows in parts:
            source = layer.buffers[number][:, :, max(layer.num_columns - num_columns, 0) : layer.num_columns]
            edge = num_columns - source.shape[2]
            buffer[start : start + len(rows), :, :edge] = 0
            target = buffer[start : start + len(rows), :, edge:num_columns]
            if target.device.type == "cpu":  # one copy instead of two; other devices may not accept a view as `out`
                torch.index_select(source, 0, rows, out=target)
            else:
                target.copy_(source.index_select(0, rows))
            start += len(rows)
        buffers.append(buffer)
    return _Layer(buffers, num_columns)


def _load_layer(pasts: Sequence[PastRow | None], number: int, num_tokens: Sequence[int], num_spare: int) -> _Layer:
    """A layer that begins with the first tokens of kept rows, `num_tokens` of each, and has spare columns."""
    num_columns = max(num_tokens)
    buffers = []
    for part, like in enumerate(next(past for past in pasts if past is not None).layers[number]):
        buffer = _new_buffer(like.transpose(0, 1)[None], len(pasts), num_columns + num_spare).zero_()
        for row, past, count in zip(buffer, pasts, num_tokens, strict=True):
            if past is not None and count:
                row[:, num_columns - count : num_columns] = past.layers[number][part][:count].transpose(0, 1)
        buffers.append(buffer)
    return _Layer(buffers, num_columns)


class RowCache:
    """The cache of the rows of one batch, in their order, and the passes of the model over it."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self._layers = [_Layer() for _ in range(model.num_layers)]
        self.lengths: Ids = np.zeros(0, dtype=np.int64)
        self._shifts: Ids = np.zeros(0, dtype=np.int64)  # of each row's positions: not zero after an image

    @property
    def is_full(self) -> bool:
        """Whether there is no spare column; then rows have to be joined before they are decoded."""
        return not self._layers[0].num_spare

    def prefill(self, rows: Sequence[Ids], media: Sequence[Media | None], pasts: Sequence[PastRow | None]) -> Tensor:
        """Read the tokens of the rows after those of their pasts, with their images; the logits after each row.

        A pass reads the last tokens of all rows, as many as the row with the most new tokens has. So there is no gap
        between kept and new tokens, which would put a sliding window in the wrong place.
        """
        self.lengths = np.array([len(row) for row in rows])
        num_columns = int(self.lengths.max())
        num_new = max(len(row) - (len(past.ids) if past else 0) for row, past in zip(rows, pasts, strict=True))
        num_kept = np.maximum(self.lengths - num_new, 0).tolist()
        if any(num_kept):
            self._layers = [_load_layer(pasts, number, num_kept, num_new) for number in range(len(self._layers))]
            rows = [row[-num_new:] for row in rows]
        positions = np.arange(num_columns) - (num_columns - self.lengths)[:, None]
        mask = positions >= 0
        is_read = mask[:, num_columns - num_new :]
        ids = np.full(is_read.shape, self._model.pad_token_id, dtype=np.int64)
        ids[is_read] = np.concatenate(rows)
        plain = np.maximum(positions[:, num_columns - num_new :], 0)
        positions, self._shifts = self._model.positions(rows, media, plain)
        return self._model.forward(ids, positions, mask, Cache(layers=[*self._layers]), join_media(media))

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row; the logits after it."""
        positions = (self.lengths + self._shifts)[:, None]
        self.lengths = self.lengths + 1
        num_columns = int(self.lengths.max())
        mask = np.arange(num_columns) >= (num_columns - self.lengths)[:, None]
        ids = np.array(tokens, dtype=np.int64)[:, None]
        return self._model.forward(ids, positions, mask, Cache(layers=[*self._layers]), {})

    def past(self, row: int) -> list[tuple[Tensor, ...]]:
        """A copy of a row's keys and values, by layer; not a view, which would keep the whole batch in memory."""
        stop = self._layers[0].num_columns
        start = stop - int(self.lengths[row])
        return [
            tuple(
                buffer[row, :, start:stop].transpose(0, 1).clone(memory_format=torch.contiguous_format)
                for buffer in buffers
            )
            for buffers in (layer.buffers for layer in self._layers)
        ]

    @classmethod
    def join(cls, parts: "Sequence[tuple[RowCache, Sequence[int]]]") -> "RowCache":
        """A cache of these rows of other caches, in as many columns as they need; a row may occur several times.

        The other caches are emptied layer by layer, so that at most one layer is in memory twice.
        """
        joined = cls(parts[0][0]._model)
        joined.lengths = np.concatenate([part.lengths[rows] for part, rows in parts])
        joined._shifts = np.concatenate([part._shifts[rows] for part, rows in parts])
        num_columns = int(joined.lengths.max())
        num_spare = max(_MIN_SPARE_COLUMNS, num_columns // 2)
        indexes = [torch.tensor(rows, device=joined._model.device) for _, rows in parts]
        for number in range(len(joined._layers)):
            layers = [part._layers.pop(0) for part, _ in parts]
            joined._layers[number] = _join_layers([*zip(layers, indexes, strict=True)], num_columns, num_spare)
        return joined
