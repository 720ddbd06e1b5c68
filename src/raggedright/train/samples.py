"""A few whole sessions of a round, token by token, for the report.

Invariants: the same sessions whenever the round has the same scores, the lowest and the highest among them; what is
long is cut and never left out unsaid. Tokens, masks and log-probs are the store's, as they were trained on.
"""

import json
from collections.abc import Mapping
from math import isnan

import numpy as np
from numpy.typing import NDArray

from raggedright.report.events import SampledSession, SampledTrajectory
from raggedright.sessions import TOKEN_FIELDS, SessionTable
from raggedright.train.round import RoundResult
from raggedright.train.setup import Setup

MOST_TRAJECTORIES = 12  # of a sampled session
MOST_TASK = 400  # characters of a field of its task


def sample_sessions(setup: Setup, result: RoundResult, count: int) -> tuple[SampledSession, ...]:
    """Sessions from the lowest to the highest score, each with its first trajectories."""
    table = result.table
    advantages = result.advantages.split(table.rows.response_tokens.tolist())
    tasks = {task.uid: task.data for task in result.tasks}
    sampled = []
    for i in _spread(table, count):
        at = np.flatnonzero(table.session_of_row == i)[:MOST_TRAJECTORIES]
        rows = setup.store.read(table.row_keys(at), TOKEN_FIELDS)
        trajectories = [
            _trajectory(setup, table, row, fields, advantages[row].tolist())
            for row, fields in zip(at.tolist(), rows, strict=True)
        ]
        key = table.session_key(i)
        task = {str(name): _shown(value) for name, value in tasks[key.prompt].items()}
        sampled.append(
            SampledSession(
                prompt=key.prompt,
                session=key.session,
                score=float(table.score[i]),
                task=task,
                trajectories=tuple(trajectories),
            )
        )
    return tuple(sampled)


def _shown(value: object) -> object:
    """A field of a task as JSON takes it, or its beginning as text where that is long or no JSON."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        text = str(value)
    else:
        if len(text) <= MOST_TASK:
            return value
    return text[:MOST_TASK]


def _spread(table: SessionTable, count: int) -> list[int]:
    """Positions of sessions at even distances in the order of their scores."""
    ranked = sorted(np.flatnonzero(table.num_rows).tolist(), key=lambda i: (table.score[i], table.session_key(i)))
    places = sorted({round(i * (len(ranked) - 1) / max(1, count - 1)) for i in range(min(count, len(ranked)))})
    return [ranked[place] for place in places]


def _trajectory(
    setup: Setup, table: SessionTable, row: int, fields: Mapping[str, NDArray], advantages: list[float]
) -> SampledTrajectory:
    ids, mask, log_probs = (fields[name].tolist() for name in TOKEN_FIELDS)
    reward = float(table.row_columns["reward"][row])
    return SampledTrajectory(
        role=table.row_columns["role"][row],
        reward=None if isnan(reward) else reward,
        finish_reason=table.row_columns["finish_reason"][row],
        tokens=tuple(str(setup.tokenizer.decode([token])) for token in ids),
        prompt_tokens=int(table.row_columns["prompt_tokens"][row]),
        mask=mask,
        advantages=tuple(advantages),
        log_probs=log_probs,
    )
