"""Per-token weights of rows: fixed from counts alone, before anything is cut into ranks or micro-batches.

The objective of a step is a plain sum of weight x loss over tokens, so every cut and any padding adds up to the
same number. Counted within a step over items that have loss tokens (T tokens, N rows, S sessions, P prompts):

    token-mean               1 / T_step
    seq-mean-token-mean      1 / (N * T_row)
    seq-mean-token-sum       1 / N
    seq-mean-token-sum-norm  1 / (N * L)
    session-mean             1 / (S * T_session)
    prompt-mean              1 / (P * T_prompt)

A row without loss tokens weighs exactly zero and counts in no denominator; so does padding.
"""

from typing import get_args

import numpy as np

from raggedright.arrays import Floats, Ints, sum_by
from raggedright.errors import ConfigError
from raggedright.plan.layout import LossAgg
from raggedright.rows import Rows


def token_weights(
    rows: Rows, loss_agg: LossAgg, *, step: Ints | None = None, loss_norm_tokens: int | None = None
) -> Floats:
    """Weight of each row's loss tokens, in float64; `step` says which step each row is in (default: all in one).

    A row with a negative step is in none and weighs zero.
    """
    steps = np.zeros(len(rows), dtype=np.int64) if step is None else step
    counts = np.flatnonzero((rows.loss_tokens > 0) & ~rows.is_padding & (steps >= 0))
    weights = np.zeros(len(rows), dtype=np.float64)
    weights[counts] = 1.0 / _denominators(
        loss_agg, steps[counts], rows.loss_tokens[counts], rows.session_index[counts], rows.prompt_index[counts],
        loss_norm_tokens,
    )  # fmt: skip
    return weights


def _denominators(
    loss_agg: LossAgg, step: Ints, tokens: Ints, session: Ints, prompt: Ints, norm: int | None
) -> Floats | Ints:
    num_steps = int(step.max(initial=-1)) + 1
    rows_of_step = np.bincount(step, minlength=num_steps)[step]
    match loss_agg:
        case "token-mean":
            return sum_by(step, tokens, num_steps)[step]
        case "seq-mean-token-mean":
            return rows_of_step * tokens
        case "seq-mean-token-sum":
            return rows_of_step
        case "seq-mean-token-sum-norm":
            if norm is None:
                raise ConfigError("loss_agg seq-mean-token-sum-norm divides by a constant; set loss_norm_tokens")
            return rows_of_step * np.float64(norm)
        case "session-mean":
            return _mean_of_groups(step, tokens, session, num_steps)
        case "prompt-mean":
            return _mean_of_groups(step, tokens, prompt, num_steps)
        case _:
            raise ConfigError(f"loss_agg is {loss_agg!r}; it takes one of {', '.join(get_args(LossAgg))}")


def _mean_of_groups(step: Ints, tokens: Ints, group: Ints, num_steps: int) -> Ints:
    """Groups in the row's step times tokens of the row's group in that step."""
    num_groups = int(group.max(initial=-1)) + 1
    pairs, pair = np.unique(step * num_groups + group, return_inverse=True)
    groups_of_step = np.bincount(pairs // max(num_groups, 1), minlength=num_steps)
    return groups_of_step[step] * sum_by(pair, tokens, len(pairs))[pair]
