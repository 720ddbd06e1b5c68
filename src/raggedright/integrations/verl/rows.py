"""verl's batch as Rows: a key is `{uid}_{session}_{trajectory}`, its tags carry lengths and mark padding.

The surprise: `uid` may itself hold underscores; the last two parts are the numbers.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from raggedright.arrays import Ints
from raggedright.errors import RowsError
from raggedright.rows import Rows


def rows_of(keys: Sequence[str], tags: Sequence[Mapping[str, object]], loss_tokens: Ints) -> Rows:
    """The rows of a batch, in its order; `loss_tokens` counts each row's response mask."""
    names = [_name(key) for key in keys]
    lengths = [
        [_length(key, tag, name) for name in ("prompt_len", "response_len")]
        for key, tag in zip(keys, tags, strict=True)
    ]
    return Rows.from_columns(
        prompt=[prompt for prompt, _, _ in names],
        session=[session for _, session, _ in names],
        trajectory=[trajectory for _, _, trajectory in names],
        prompt_tokens=[prompt for prompt, _ in lengths],
        response_tokens=[response for _, response in lengths],
        loss_tokens=loss_tokens,
        is_padding=np.array([is_padding(tag) for tag in tags], dtype=bool),
    )


def is_padding(tag: Mapping[str, object]) -> bool:
    """Whether a row's tags mark it as padding."""
    return bool(tag.get("is_padding", False))


def _name(key: str) -> tuple[str, int, int]:
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise RowsError(
            f"row {key!r}: a key of verl's agent loop reads uid_session_trajectory; the last two are numbers"
        )
    return parts[0], int(parts[1]), int(parts[2])


def _length(key: str, tag: Mapping[str, object], name: str) -> int:
    value = tag.get(name)
    if not isinstance(value, int):
        raise RowsError(f"row {key}: its tags have {name} {value!r}; the agent loop puts the number of tokens there")
    return value
