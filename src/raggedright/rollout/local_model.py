"""The model of the local engine: which models it can run, one forward pass, images, and loading weights.

Rows with and without images share a pass. Pixels are read once, with the context; afterwards an image is keys and
values like any token, and only the shift of its row's positions remains.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from raggedright.errors import ConfigError, RowsError
from raggedright.rollout.engine import EngineError, Media
from raggedright.tensors.forward import vocabulary_size
from raggedright.tensors.images import image_positions, placeholder_ids, position_shift
from raggedright.tensors.routing import Routers

GRIDS = "image_grid_thw"


class LocalModel:
    """A causal language model of transformers, with or without images, as the local engine uses it."""

    def __init__(self, model: nn.Module, *, pad_token_id: int, routers: Routers | None = None) -> None:
        self.model = model
        self.pad_token_id = pad_token_id
        self.num_layers = _num_plain_layers(model)
        assert isinstance(model, PreTrainedModel)
        text = model.config.get_text_config(decoder=True)
        self.vocabulary = int(vocabulary_size(model) or text.vocab_size)
        self.max_positions = int(getattr(text, "max_position_embeddings", None) or 0)  # 0: the config does not say
        self.device = next(model.parameters()).device
        # Eager attention computes its softmax in float32, where float64's mask is -inf: a padded column would be NaN.
        eager = getattr(model.config, "_attn_implementation", None) == "eager"
        self.reads_padded = not (eager and next(model.parameters()).dtype == torch.float64)
        self.routed_experts: Tensor | None = None  # [B, columns, layers, topk] of the last pass, if they are recorded
        self._routers = routers
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._placeholder_ids = placeholder_ids(model.config)
        self._image_token_id: int = getattr(model.config, "image_token_id", -1)
        self._merge_size: int | None = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", None)

    def forward(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], mask: NDArray[np.bool_], cache: Cache, media: Media
    ) -> Tensor:
        """The logits after the last column, [B, V], with dropout off and without a graph."""
        inputs: dict[str, object] = {name: values.to(self.device) for name, values in media.items()}
        if self._takes_positions:
            inputs["position_ids"] = torch.from_numpy(positions).to(self.device)
        inputs["input_ids"] = torch.from_numpy(ids).to(self.device)
        inputs["attention_mask"] = torch.from_numpy(mask).to(self.device).long()
        with torch.no_grad(), self._evaluation_mode(), self._recording(ids.shape):
            out = self.model(past_key_values=cache, use_cache=True, **inputs, **self._last_logits_only)
        logits = out.logits[:, -1]
        if not self._placeholder_ids:
            return logits
        return logits.index_fill(1, torch.tensor(self._placeholder_ids, device=self.device), -torch.inf)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Switch off dropout, and restore each module's mode afterwards: the model may be in training."""
        training = [module for module in self.model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def _recording(self, shape: tuple[int, ...]) -> Iterator[None]:
        if self._routers is None:
            yield
            return
        with self._routers.recording() as experts:
            yield
        self.routed_experts = experts().unflatten(0, shape).cpu()

    def check_media(self, ids: NDArray[np.int64], media: Media | None) -> None:
        """Refuse a context whose images cannot be placed, and one with a placeholder but no image."""
        if not media:
            if self._placeholder_ids and (is_placeholder := np.isin(ids, self._placeholder_ids)).any():
                at = int(is_placeholder.argmax())
                raise EngineError(f"a request has no images and its token {at:,}, {ids[at]}, stands for one")
            return
        if self._merge_size is None or GRIDS not in media:
            cause = "the model takes none" if self._merge_size is None else f"{GRIDS} is not among them"
            raise EngineError(f"a request has media ({', '.join(media)}) and {cause}; leave them out")
        try:
            self._image_positions(ids, media)
        except RowsError as error:
            raise EngineError(f"a request's images do not fit its ids: {error}") from None

    def positions(
        self, rows: Sequence[NDArray[np.int64]], media: Sequence[Media | None], plain: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions of rows that end at the last column, with 3 axes if a row has images; the shift of each row."""
        shifts = np.zeros(len(rows), dtype=np.int64)
        if not any(media):
            return plain, shifts
        positions = np.repeat(plain[None], 3, axis=0)
        for i, (ids, images) in enumerate(zip(rows, media, strict=True)):
            if images:
                of_row = self._image_positions(ids, images)
                positions[:, i, -len(ids) :] = of_row
                shifts[i] = position_shift(of_row)
        return positions, shifts

    def _image_positions(self, ids: NDArray[np.int64], media: Media) -> NDArray[np.int64]:
        assert self._merge_size is not None
        grids = media[GRIDS].numpy()
        return image_positions(ids, grids, image_token_id=self._image_token_id, merge_size=self._merge_size)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> str:
        """Copy every parameter (and the buffers that are among the weights) by name; the problem in words, or "".

        Tensors are copied one at a time, so that a sharded model can gather one at a time. Tied parameters count as
        one: any of their names will do. If some parameters require gradients, as a LoRA adapter does, the others may
        be missing. After a problem the model is a mixture of old and new weights.
        """
        model = self.model
        targets = dict(model.named_parameters(remove_duplicate=False))
        targets |= dict(model.named_buffers(remove_duplicate=False))
        loaded: set[int] = set()
        unknown: list[str] = []
        shapes: list[str] = []
        with torch.no_grad():
            for name, tensor in weights:
                target = targets.get(name)
                if target is None:
                    unknown.append(name)
                    continue
                loaded.add(id(target))
                if target.shape == tensor.shape:
                    target.copy_(tensor)
                else:
                    shapes.append(f"{name} is {tuple(tensor.shape)} and the model has {tuple(target.shape)}")
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        missing = [name for name, p in trained or model.named_parameters() if id(p) not in loaded]
        problems = {"missing": missing, "unknown": unknown, "of another shape": shapes}
        return "; ".join(f"{len(names):,} {what}: {_first(names)}" for what, names in problems.items() if names)


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _num_plain_layers(model: nn.Module) -> int:
    """The number of layers of the model's cache; a ConfigError if the cache is not keys and values by token."""
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
