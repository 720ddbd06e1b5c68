"""What a store has recorded, as whole sessions: for tests that compare them."""

import numpy as np
from numpy.typing import NDArray

from raggedright.sessions import TOKEN_FIELDS, Session, Trajectory
from raggedright.store.session_store import Store


def recorded_sessions(store: Store, *rounds: int) -> list[Session]:
    """Every attempt of every session of these rounds, by default of all that have finished sessions, and of round 1."""
    sessions = []
    for round in rounds or sorted({1, *store.rounds()}):
        table = store.sessions(round, every_attempt=True)
        keys = table.row_keys(np.arange(len(table.session_of_row)))
        rows = [
            _trajectory(fields, dict(zip(table.row_columns, values, strict=True)))
            for fields, *values in zip(store.read(keys), *table.row_columns.values(), strict=True)
        ]
        for i in range(len(table)):
            sessions.append(
                Session(
                    key=table.session_key(i),
                    score=None if table.failed[i] else float(table.score[i]),
                    cause=table.cause[i],
                    metrics={n: float(column[i]) for n, column in table.metrics.items() if not np.isnan(column[i])},
                    trajectories=[rows[j] for j in np.flatnonzero(table.session_of_row == i)],
                )
            )
    return sessions


def _trajectory(fields: dict[str, NDArray], said: dict) -> Trajectory:
    return Trajectory(
        **{name: fields[name] for name in TOKEN_FIELDS},
        extra={name: value for name, value in fields.items() if name not in TOKEN_FIELDS},
        role=said["role"],
        reward=None if np.isnan(said["reward"]) else float(said["reward"]),
        finish_reason=said["finish_reason"],
        generations=int(said["generations"]),
        cut_generations=int(said["cut_generations"]),
        weight_version=int(said["weight_version"]),
    )
