"""Sessions for the tests of stores, and an exact comparison of rows: names, dtypes, shapes and bits."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from raggedright.sessions import RowKey, Session, SessionKey, Trajectory
from raggedright.store.session_store import Store

VALUES: dict[str, NDArray] = {
    "routed_experts": np.arange(24, dtype=np.uint8).reshape(4, 3, 2),
    "position_ids": np.arange(12).reshape(3, 4),
    "transposed": np.arange(20, dtype=np.int32).reshape(5, 4).T,
    "scalar": np.array(1.5, dtype=np.float16),
    "empty": np.zeros((0, 7), dtype=np.float32),
    "mask": np.array([True, False]),
    "not_finite": np.array([np.nan, np.inf, -np.inf, -0.0]),
    "multi_modal_inputs.pixel_values": np.linspace(0, 1, 24, dtype=np.float32).reshape(4, 6),
    "teacher_log_probs": np.linspace(-2, 0, 5),
    "ünï/\"' ": np.array([1, -(2**63)]),
}


def same(a: Mapping[str, NDArray], b: Mapping[str, NDArray]) -> bool:
    """Whether two rows have identical arrays."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].tobytes() == b[n].tobytes() for n in a
    )


def tokens(count: int, *, start: int = 0, **fields: object) -> Trajectory:
    """A trajectory with one prompt token and `count` response tokens."""
    defaults = {
        "input_ids": np.arange(start, start + count + 1),
        "response_mask": np.ones(count, dtype=np.int64),
        "rollout_log_probs": np.linspace(-3, 0, count, dtype=np.float32),
    }
    return Trajectory(**{**defaults, **fields})  # pyright: ignore[reportArgumentType]


def key(prompt: str = "p", session: int = 0, attempt: int = 0, *, round: int = 0) -> SessionKey:
    return SessionKey(round, prompt, session, attempt)


def finished(of: SessionKey, *trajectories: Trajectory, score: float = 0.5, **metrics: float) -> Session:
    return Session(key=of, score=score, metrics=metrics, trajectories=trajectories)


def failed(of: SessionKey, cause: str = "timed out") -> Session:
    return Session(key=of, cause=cause)


def row(of: SessionKey, trajectory: int = 0) -> RowKey:
    return RowKey(*of, trajectory)


def keys_in(store: Store, *rounds: int) -> list[SessionKey]:
    """The keys of the sessions that a store lists."""
    tables = [store.sessions(round) for round in rounds or (0,)]
    return [table.session_key(i) for table in tables for i in range(len(table))]
