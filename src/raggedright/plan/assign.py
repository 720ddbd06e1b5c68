"""What is fixed before a step is cut: the step of each row, and the weight of its tokens in that step.

Steps. `align = "steps"`: whole prompts in the configured number of steps, which differ by at most one prompt.
`align = "lcm"`: as many mini-batches as the padded row count requires, with real rows spread evenly over them (they
differ by at most one row) and prompts kept together as far as that allows. Prompts are shuffled by (seed, epoch): the
arithmetic is in 64-bit integers over the sorted names, the same on every machine and for every order of rows.

Weights. The objective of a step is a plain sum of weight x loss over tokens, so every cut and any padding adds up to
the same number. Counted within a step over items that have loss tokens (T tokens, N rows, S sessions, P prompts):

    token-mean               1 / T_step
    seq-mean-token-mean      1 / (N * T_row)
    seq-mean-token-sum       1 / N
    seq-mean-token-sum-norm  1 / (N * L)
    session-mean             1 / (S * T_session)
    prompt-mean              1 / (P * T_prompt)

A row without loss tokens has weight zero and counts in no denominator; the same is true of padding rows.
"""

from typing import get_args

import numpy as np
from numpy.typing import NDArray

from raggedright.arrays import MIX64_STEP, Floats, Ints, mix64, sum_by
from raggedright.errors import ConfigError
from raggedright.plan.layout import Layout, LossAgg
from raggedright.rows import Rows


def num_steps(layout: Layout, mini_batch_size: int) -> int:
    """Optimizer steps of one epoch under `align = "steps"`: fixed by the config."""
    return -(-layout.batch_size // mini_batch_size)


def lcm_multiple(layout: Layout) -> int:
    """The padded row count is a multiple of this under `align = "lcm"`; a role counts only while it trains."""
    parts = [layout.dp_size]
    if layout.actor_trains:
        parts.append(layout.mini_batch_size * layout.rollout_n)
    if layout.critic_mini_batch_size is not None:
        parts.append(layout.critic_mini_batch_size * layout.rollout_n)
        parts.append(layout.critic_dp_size or layout.dp_size)
    return int(np.lcm.reduce(np.array(parts, dtype=object)))


def assign_prompts(rows: Rows, planned: Ints, num_steps: int, *, seed: int, epoch: int) -> Ints:
    """Step of each row by its prompt; rows that are not planned have -1."""
    prompts, prompt = np.unique(rows.prompt_index[planned], return_inverse=True)
    step = np.full(len(rows), -1, dtype=np.int64)
    step[planned] = _shuffled_place(len(prompts), seed, epoch)[prompt] * num_steps // max(len(prompts), 1)
    return step


def assign_rows(rows: Rows, planned: Ints, num_steps: int, *, seed: int, epoch: int) -> Ints:
    """Step of each row so that steps have equal numbers of rows; rows that are not planned have -1."""
    prompts, prompt = np.unique(rows.prompt_index[planned], return_inverse=True)
    by_prompt = planned[np.lexsort((rows.order[planned], _shuffled_place(len(prompts), seed, epoch)[prompt]))]
    step = np.full(len(rows), -1, dtype=np.int64)
    step[by_prompt] = np.arange(len(planned)) * num_steps // max(len(planned), 1)
    return step


def _shuffled_place(count: int, seed: int, epoch: int) -> Ints:
    """Place of each of `count` prompts in a shuffled order: sorted by a hash of its number."""
    start = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(epoch))
    place = np.empty(count, dtype=np.int64)
    place[np.argsort(_mix(start + np.arange(count, dtype=np.uint64)), kind="stable")] = np.arange(count)
    return place


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return mix64(x + MIX64_STEP)


def token_weights(
    rows: Rows, loss_agg: LossAgg, *, step: Ints | None = None, loss_norm_tokens: int | None = None
) -> Floats:
    """Weight of each row's loss tokens, in float64; `step` is the step of each row (default: one step for all).

    A row with a negative step is in no step and has weight zero.
    """
    steps = np.zeros(len(rows), dtype=np.int64) if step is None else step
    counted = np.flatnonzero((rows.loss_tokens > 0) & ~rows.is_padding & (steps >= 0))
    weights = np.zeros(len(rows), dtype=np.float64)
    weights[counted] = 1.0 / _denominators(
        loss_agg, steps[counted], rows.loss_tokens[counted], rows.session_index[counted], rows.prompt_index[counted],
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
            return _group_denominators(step, tokens, session, num_steps)
        case "prompt-mean":
            return _group_denominators(step, tokens, prompt, num_steps)
        case _:
            raise ConfigError(f"loss_agg is {loss_agg!r}; it must be one of {', '.join(get_args(LossAgg))}")


def _group_denominators(step: Ints, tokens: Ints, group: Ints, num_steps: int) -> Ints:
    """Number of groups in the row's step times the tokens of the row's group in that step."""
    num_groups = int(group.max(initial=-1)) + 1
    pairs, pair = np.unique(step * num_groups + group, return_inverse=True)
    groups_of_step = np.bincount(pairs // max(num_groups, 1), minlength=num_steps)
    return groups_of_step[step] * sum_by(pair, tokens, len(pairs))[pair]
