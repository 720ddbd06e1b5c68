"""Sessions like those of a run, of about 57 KB per row, for the store's benchmark."""

import numpy as np

from raggedright.sessions import Session, SessionKey, Trajectory

ROWS_PER_SESSION = 8
PROMPT, RESPONSE = 300, 1_350


def session_rows(seed: int) -> list[Trajectory]:
    """The rows of one session; lengths vary by a third."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(ROWS_PER_SESSION):
        response = int(RESPONSE * rng.uniform(2 / 3, 4 / 3))
        size = PROMPT + response
        rows.append(
            Trajectory(
                input_ids=rng.integers(0, 150_000, size),
                response_mask=np.ones(response, dtype=np.int64),
                rollout_log_probs=-rng.random(response, dtype=np.float32),
                extra={"position_ids": np.broadcast_to(np.arange(size), (1, size)), "values": rng.random(response)},
            )
        )
    return rows


def session_of(rows: list[Trajectory], i: int, round: int) -> Session:
    """The i-th session of a round, eight per prompt, with these rows."""
    return Session(key=SessionKey(round, f"prompt-{i // 8:05d}", i % 8), score=0.5, trajectories=rows)


def row_bytes(rows: list[Trajectory]) -> int:
    """The bytes of these rows' arrays."""
    return sum(array.nbytes for row in rows for array in row.fields.values())
