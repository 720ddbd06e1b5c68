"""Values that a store has to keep as they are, and how two of them are compared: type, dtype, shape and bits."""

import struct

import numpy as np
import torch
from torch import Tensor

from raggedright.store.protocol import Key, NewRow, SessionKey


def same(a: object, b: object) -> bool:
    """Whether two values are the same to the last bit, in type, dtype and shape."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = zip(a.items(), b.items(), strict=True) if len(a) == len(b) else [((0, 0), (0, 1))]
        return all(same(k, q) and same(v, w) for (k, v), (q, w) in pairs)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return a == b


def _bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(torch.uint8).numpy().tobytes()


def tokens(count: int, *, start: int = 0, **fields: object) -> NewRow:
    """A row of `count` response tokens after one of the prompt, with the usual fields and these."""
    usual = {
        "input_ids": torch.arange(start, start + count + 1),
        "response_mask": torch.ones(count, dtype=torch.bool),
        "rollout_log_probs": torch.linspace(-3.0, 0.0, count),
    }
    return NewRow(prompt_tokens=1, response_tokens=count, loss_tokens=count, fields={**usual, **fields})


def bare(**fields: object) -> NewRow:
    """A row of two tokens with these fields alone."""
    return NewRow(prompt_tokens=1, response_tokens=1, loss_tokens=1, fields=fields)


def key(prompt: str = "p", session: int = 0, attempt: int = 0, *, round: int = 0) -> SessionKey:
    return SessionKey(round, prompt, session, attempt)


def row(session: SessionKey, trajectory: int = 0) -> Key:
    return Key(*session, trajectory)


VALUES: dict[str, object] = {
    "ragged": torch.tensor([5, 6, 7]),
    "routed_experts": torch.arange(24, dtype=torch.uint8).reshape(4, 3, 2),
    "mrope_3": torch.arange(12).reshape(3, 4),
    "mrope_4": torch.arange(20, dtype=torch.int32).reshape(5, 4).T,
    "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 7, dtype=torch.float16),
    "mask": torch.tensor([True, False]),
    "not_finite": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    "media": {"pixel_values": torch.rand(4, 6), "grid": {"thw": torch.tensor([[1, 2, 2]])}, "names": ["a", None]},
    "no_media": {},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "array_scalar": np.float32(0.1),
    "text": 'ünï "quoted" \n\0 end',
    "no_text": "",
    "raw": b"\x00\xff",
    "whole": -(2**100),
    "zero": 0,
    "number": 0.1,
    "nan": float("nan"),
    "infinite": -float("inf"),
    "true": True,
    "nothing": None,
    "list": [1, 2.0, "three", [], [None]],
    "pair": (1, (2,), ()),
}
