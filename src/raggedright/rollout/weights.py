"""Loading full weights into a copy of the model, by name, as they come.

Nothing is gathered beforehand, so that a sharded model can hand over one tensor at a time. Tied parameters count as
one: any of their names will do.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> str:
    """Copy every parameter (and what buffers are given); what is wrong, in words, or nothing.

    After a problem the model is a mixture of old and new.
    """
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    seen: set[int] = set()
    unknown: list[str] = []
    shapes: list[str] = []
    with torch.no_grad():
        for name, tensor in weights:
            target = targets.get(name)
            if target is None:
                unknown.append(name)
            elif target.shape != tensor.shape:
                shapes.append(f"{name} is {tuple(tensor.shape)} and the model has {tuple(target.shape)}")
                seen.add(id(target))
            else:
                target.copy_(tensor)
                seen.add(id(target))
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in seen]
    parts = [
        f"{len(names):,} {what}: {_first(names)}"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", shapes))
        if names
    ]
    return "; ".join(parts)


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
