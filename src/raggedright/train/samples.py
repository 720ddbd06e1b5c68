"""A few whole sessions of a round, token by token, for the report.

Invariants: the same sessions whenever the round has the same scores, the lowest and the highest among them; what is
long is cut and never left out unsaid. Tokens, masks and log-probs are the store's, as they were trained on.
"""

import json
from collections.abc import Mapping

import torch

from raggedright.store.protocol import RowEntry, SessionEntry
from raggedright.train.round import ROW_FIELDS, RoundResult
from raggedright.train.setup import Setup

MOST_TRAJECTORIES = 12  # of a sampled session
MOST_TASK = 400  # characters of a field of its task


def sample_sessions(setup: Setup, result: RoundResult, count: int) -> list[dict[str, object]]:
    """Sessions from the lowest to the highest score, each with its first trajectories."""
    of_rows = result.advantages.split(result.sealed.rows.response_tokens.tolist())
    advantages = dict(zip(result.sealed.keys, of_rows, strict=True))
    tasks = {task.uid: task.data for task in setup.tasks.of_round(result.sealed.round, setup.config.train.batch_size)}
    sampled = []
    for session in _spread(result, count):
        rows = session.rows[:MOST_TRAJECTORIES]
        fields = setup.store.get([row.key for row in rows], ROW_FIELDS)
        trajectories = [
            _trajectory(setup, row, of_row, advantages[row.key].tolist())
            for row, of_row in zip(rows, fields, strict=True)
        ]
        key = session.key
        task = {str(name): _shown(value) for name, value in tasks[key.prompt].items()}
        names = {"prompt": key.prompt, "session": key.session, "score": session.score}
        sampled.append({**names, "task": task, "trajectories": trajectories})
    return sampled


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


def _spread(result: RoundResult, count: int) -> list[SessionEntry]:
    """Sessions at even distances in the order of their scores."""
    ranked = sorted((s for s in result.sealed.sessions if s.rows), key=lambda s: (s.score or 0.0, s.key))
    places = sorted({round(i * (len(ranked) - 1) / max(1, count - 1)) for i in range(min(count, len(ranked)))})
    return [ranked[place] for place in places]


def _trajectory(
    setup: Setup, row: RowEntry, fields: Mapping[str, object], advantages: list[float]
) -> dict[str, object]:
    ids, mask, log_probs = (fields[name] for name in ROW_FIELDS)
    assert isinstance(ids, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    assert isinstance(log_probs, torch.Tensor)
    return {
        "role": row.tags.get("role"),
        "reward": row.tags.get("reward"),
        "finish_reason": row.tags.get("finish_reason"),
        "tokens": [setup.tokenizer.decode([token]) for token in ids.tolist()],
        "prompt_tokens": row.prompt_tokens,
        "mask": mask.tolist(),
        "advantages": advantages,
        "log_probs": log_probs.tolist(),
    }
