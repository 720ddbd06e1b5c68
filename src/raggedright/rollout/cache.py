"""The keys and values of a batch's rows, and the model's forward passes over them.

Rows end at the same column: shorter ones have masked columns on the left. Invariants: there are as many columns as
the longest row has tokens; what a masked column holds is finite and weighs exactly zero; rows never mix, so that a
row's numbers do not depend on its neighbours (up to the rounding of matrix products of another shape).

The surprise: layers with a sliding window keep every column too. The model masks what is outside the window, and all
layers can then be moved and joined in the same way. And rows that are dropped, or repeated, are so in name only until
the next pass, which moves all that stay once, to where it has room for what comes.

A row may bring the keys and values of its first tokens (`turn_cache`). A pass reads the last tokens of all its rows, as
many as the row with the most new ones has: then rows need no gap between what they bring and what is read, which would
put a sliding window in the wrong place.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from raggedright.errors import ConfigError
from raggedright.rollout.sight import Media, Sight
from raggedright.rollout.turn_cache import ID_BYTES, PastRow
from raggedright.tensors.forward import vocabulary_size
from raggedright.tensors.media import placeholder_ids
from raggedright.tensors.routing import Routers

# Columns that a cache grows by at least, unless its rows end sooner.
_GROWTH = 16


class _Layer(DynamicLayer):
    """A layer that is written into spare columns; `keys` and `values` are views of those in use."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[Tensor] = []
        self.span = (0, 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns, for which there is room, and give all of them."""
        start, stop = self.span
        end = stop + key_states.shape[-2]
        if self.rooms:
            self.rooms[0][:, :, stop:end] = key_states
            self.rooms[1][:, :, stop:end] = value_states
        else:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.rooms = [key_states, value_states]
        return self.use(start, end)

    def use(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Use these columns of the rooms."""
        self.span = (start, end)
        self.keys, self.values = (room[:, :, start:end] for room in self.rooms)
        return self.keys, self.values

    def load(self, number: int, pasts: Sequence[PastRow | None], num_tokens: Sequence[int], *, spare: int) -> None:
        """Begin with the first tokens of rows that have a past, so many of each, and spare columns on the right."""
        columns = max(num_tokens)
        for i, like in enumerate(next(past for past in pasts if past is not None).layers[number]):
            _, heads, size = like.shape
            room = like.new_zeros(len(pasts), columns + spare, heads, size)
            for row, past, count in zip(room, pasts, num_tokens, strict=True):
                if past is not None and count:
                    row[columns - count : columns] = past.layers[number][i][:count]
            self.rooms.append(room.transpose(1, 2))
        self.dtype, self.device, self.is_initialized = self.rooms[0].dtype, self.rooms[0].device, True
        self.use(0, columns)

    def past(self, place: int, num_tokens: int) -> tuple[Tensor, ...]:
        """A copy of the keys and of the values of one row's tokens: [tokens, heads, size] each."""
        stop = self.span[1]
        # Not contiguous(): that would be a view, which keeps the rows of the whole batch in memory.
        rows = (room[place, :, stop - num_tokens : stop].transpose(0, 1) for room in self.rooms)
        return tuple(row.clone(memory_format=torch.contiguous_format) for row in rows)

    def move(self, moves: "Sequence[tuple[_Layer, _Kept]]", *, columns: int, spare: int) -> None:
        """Move to rooms with the kept rows of these layers, one below another, and spare columns on the right."""
        num_rows = sum(len(kept.rows) for _, kept in moves)
        rooms = []
        for i, old in enumerate(self.rooms):
            _, heads, _, size = old.shape
            # A row's columns are next to each other in memory, as models make them, so that a row is one copy.
            new = old.new_empty(num_rows, columns + spare, heads, size).transpose(1, 2)
            first = 0
            for layer, kept in moves:
                part = new[first : first + len(kept.rows), :, :columns]
                first += len(kept.rows)
                stop, edge = layer.span[1], columns - kept.columns
                if edge:
                    part[:, :, :edge] = 0
                _copy_rows(layer.rooms[i][:, :, stop - kept.columns : stop], kept.rows, part[:, :, edge:])
            rooms.append(new)
        self.rooms = rooms
        self.use(0, columns)


def _copy_rows(source: Tensor, rows: Tensor, target: Tensor) -> None:
    """These rows of the source, into a view; in one copy on CPUs, as other devices may not take a view for `out`."""
    if target.device.type == "cpu":
        torch.index_select(source, 0, rows, out=target)
    else:
        target.copy_(source.index_select(0, rows))


class Forward:
    """A model as prefill and decode see it: which arguments it takes, where it is, how many layers are cached."""

    def __init__(self, model: nn.Module, *, pad_token_id: int, routers: Routers | None = None) -> None:
        self.model = model
        self._routers = routers
        self.routed_experts: Tensor | None = None  # [B, columns, layers, topk] of the last pass, if they are recorded
        self.pad_token_id = pad_token_id
        self.num_layers = _num_plain_layers(model)
        self._modules = list(model.modules())
        self._parameter = next(model.parameters())
        self.vocabulary, self.max_positions = _sizes(model)
        # Eager attention takes its softmax in float32, where float64's mask is -inf: a padded column would be NaN.
        eager = getattr(model.config, "_attn_implementation", None) == "eager"
        self.reads_padded = not (eager and self._parameter.dtype == torch.float64)
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self.sight = Sight(model.config)
        self._never = torch.tensor(placeholder_ids(model.config), dtype=torch.int64, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the inputs go."""
        return self._parameter.device

    def __call__(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache, media: Mapping[str, Tensor]
    ) -> Tensor:
        """The logits after the last column, [B, V], with dropout off and without a graph."""
        extra: dict[str, object] = {**self._keep, **media}
        if self._takes_positions:
            extra["position_ids"] = positions
        # Through the dict, as nn.Module's own attribute setting costs as much as a small model's layer.
        training = [vars(module) for module in self._modules if module.training]
        try:
            for attributes in training:
                attributes["training"] = False
            with torch.no_grad(), self._recording(ids.shape):
                out = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        finally:
            for attributes in training:
                attributes["training"] = True
        logits = out.logits[:, -1]
        return logits.index_fill(1, self._never, -torch.inf) if len(self._never) else logits

    @contextmanager
    def _recording(self, shape: torch.Size) -> Iterator[None]:
        if self._routers is None:
            yield
            return
        with self._routers.recording() as experts:
            yield
        self.routed_experts = experts().unflatten(0, shape).cpu()


def _sizes(model: nn.Module) -> tuple[int, int]:
    """How many tokens the model knows, and how many positions it has (0: it does not say)."""
    assert isinstance(model, PreTrainedModel)
    text = model.config.get_text_config(decoder=True)
    return int(vocabulary_size(model) or text.vocab_size), int(getattr(text, "max_position_embeddings", None) or 0)


def _num_plain_layers(model: nn.Module) -> int:
    """How many layers a plain cache of this model has; a ConfigError where a cache has to be of another kind."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"the local engine runs causal language models of transformers, and {type(model).__name__} is none"
        )
    config = model.config
    name = f"model type {config.model_type!r}"
    remedy = "use a model whose layers all have full or sliding-window attention, or another engine"
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ConfigError(
            "the model's weights are sharded over ranks, whose requests differ; give the engine an unsharded copy with "
            "shared = False, and update its weights"
        )
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} has an encoder, which the local engine cannot feed; {remedy}")
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: transformers has no plain cache for it ({error}); {remedy}") from None
    chunked = "chunked_attention" in (getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds or chunked or getattr(model, "_is_stateful", False):
        words = ", ".join(sorted(kind.__name__ for kind in kinds)) or ("chunked attention" if chunked else "a state")
        raise ConfigError(
            f"{name} keeps more than keys and values by token ({words}), which the local engine cannot join; {remedy}"
        )
    return len(layers)


class _Kept(NamedTuple):
    """Which rows of a layer's rooms are in use, and in how many columns."""

    rows: Tensor
    columns: int


class RowCache:
    """The cache of the rows of one batch, in their order."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._cache = Cache(layers=[_Layer() for _ in range(forward.num_layers)])
        self.lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._shifts = self.lengths  # of each row's positions: not zero after an image
        self._places: NDArray[np.int64] | None = None  # of the rows in the rooms; None where all are in their order

    def routed_experts(self) -> NDArray[np.integer] | None:
        """The experts of each row in the last pass, [B, columns, layers, topk]; a row's own are the last columns."""
        experts = self._forward.routed_experts
        return None if experts is None else experts.numpy()

    @property
    def _layers(self) -> "list[_Layer]":
        return [layer for layer in self._cache.layers if isinstance(layer, _Layer) and layer.rooms]

    def prefill(self, rows: Sequence[bytes], media: Sequence[Media | None], pasts: Sequence[PastRow | None]) -> Tensor:
        """Read the rows' tokens behind their pasts, and the images of those that have some; the logits after each.

        What several rows have word for word, as the sessions of a prompt do at first, is read once.
        """
        words = [i if seen or past else row for i, (row, seen, past) in enumerate(zip(rows, media, pasts, strict=True))]
        firsts = dict(zip(reversed(words), range(len(rows) - 1, -1, -1), strict=True))
        if len(firsts) == len(rows):
            return self._read(rows, media, pasts)
        read = sorted(firsts.values())
        logits = self._read([rows[i] for i in read], [media[i] for i in read], [pasts[i] for i in read])
        number = {words[i]: n for n, i in enumerate(read)}
        which = np.array([number[word] for word in words])
        self.keep(which)
        index = torch.from_numpy(which)
        if (experts := self._forward.routed_experts) is not None:
            self._forward.routed_experts = experts[index]
        return logits.index_select(0, index.to(logits.device))

    def _read(self, rows: Sequence[bytes], media: Sequence[Media | None], pasts: Sequence[PastRow | None]) -> Tensor:
        self.lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)) // ID_BYTES
        columns = new = int(self.lengths.max())
        if any(pasts):
            new = max(len(row) - len(past.ids if past else b"") for row, past in zip(rows, pasts, strict=True))
            new //= ID_BYTES
            self._load(pasts, np.maximum(self.lengths - new, 0).tolist(), spare=new)
            rows = [row[-new * ID_BYTES :] for row in rows]
        positions = np.arange(columns) - (columns - self.lengths)[:, None]
        mask = positions >= 0
        read = mask[:, columns - new :]
        ids = np.full(read.shape, self._forward.pad_token_id, dtype=np.int64)
        ids[read] = np.frombuffer(b"".join(rows), dtype=np.int64)
        plain = np.maximum(positions[:, columns - new :], 0)
        positions, self._shifts = self._forward.sight.positions(rows, media, plain)
        return self._run(ids, positions, mask, self._forward.sight.join(media))

    def _load(self, pasts: Sequence[PastRow | None], num_tokens: Sequence[int], *, spare: int) -> None:
        if any(num_tokens):
            for number, layer in enumerate(self._cache.layers):
                assert isinstance(layer, _Layer)
                layer.load(number, pasts, num_tokens, spare=spare)

    def past(self, row: int) -> list[tuple[Tensor, ...]]:
        """A copy of a row's keys and values, by layer."""
        place = row if self._places is None else int(self._places[row])
        return [layer.past(place, int(self.lengths[row])) for layer in self._layers]

    def decode(self, tokens: Sequence[int], *, ahead: int) -> Tensor:
        """Append one token to each row; the logits after it. No row will get more than `ahead` tokens from here on."""
        positions = (self.lengths + self._shifts)[:, None]
        self.lengths = self.lengths + 1
        columns = int(self.lengths.max())
        mask = np.arange(columns) >= (columns - self.lengths)[:, None]
        layers = self._layers
        if self._places is not None or layers[0].span[1] == layers[0].rooms[0].shape[2]:
            kept = self._kept(columns - 1)
            for layer in layers:
                layer.move([(layer, kept)], columns=columns - 1, spare=min(ahead, max(_GROWTH, columns // 2)))
            self._places = None
        return self._run(np.array(tokens, dtype=np.int64)[:, None], positions, mask, {})

    def _run(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], mask: NDArray[np.bool_], media: Media
    ) -> Tensor:
        device = self._forward.device
        ids_t, positions_t, mask_t = (torch.from_numpy(array).to(device) for array in (ids, positions, mask))
        seen = {name: values.to(device) for name, values in media.items()}
        return self._forward(ids_t, positions_t, mask_t.long(), self._cache, seen)

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Drop all rows but these, and the columns that none of them needs; one that is named twice is there twice."""
        self.lengths, self._shifts = self.lengths[rows], self._shifts[rows]
        self._places = rows if self._places is None else self._places[rows]

    def _kept(self, columns: int) -> _Kept:
        places = np.arange(len(self.lengths)) if self._places is None else self._places
        return _Kept(torch.from_numpy(places).to(self._forward.device), columns)

    def join(self, other: "RowCache") -> None:
        """Put another cache's rows behind these."""
        mine, more = (cache._kept(int(cache.lengths.max())) for cache in (self, other))
        columns = max(mine.columns, more.columns)
        for layer, source in zip(self._layers, other._layers, strict=True):
            layer.move([(layer, mine), (source, more)], columns=columns, spare=_GROWTH)
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self._shifts = np.concatenate([self._shifts, other._shifts])
        self._places = None
