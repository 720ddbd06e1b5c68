"""Which step each row belongs to.

`align = "steps"`: whole prompts, the configured number of steps, steps a prompt apart at most. `align = "lcm"`: as
many mini-batches as the padded row count asks for, real rows spread evenly over them (a row apart at most), prompts
kept together as far as that allows. Prompts are shuffled by (seed, epoch) alone: the arithmetic is 64-bit
integers over the sorted names, the same on every machine and for every order of rows.
"""

import numpy as np
from numpy.typing import NDArray

from raggedright.arrays import Ints
from raggedright.plan.layout import Layout
from raggedright.rows import Rows


def num_steps(layout: Layout, mini_batch_size: int) -> int:
    """Optimizer steps of one epoch under `align = "steps"`: fixed by the config."""
    return -(-layout.batch_size // mini_batch_size)


def lcm_multiple(layout: Layout) -> int:
    """What the padded row count is a multiple of under `align = "lcm"`; a role counts only while it trains."""
    parts = [layout.dp_size]
    if layout.actor_trains:
        parts.append(layout.mini_batch_size * layout.rollout_n)
    if layout.critic_mini_batch_size is not None:
        parts.append(layout.critic_mini_batch_size * layout.rollout_n)
        parts.append(layout.critic_dp_size or layout.dp_size)
    return int(np.lcm.reduce(np.array(parts, dtype=object)))


def deal_prompts(rows: Rows, planned: Ints, num_steps: int, *, seed: int, epoch: int) -> Ints:
    """Step of each row by its prompt; rows that are not planned have -1."""
    prompts, prompt = np.unique(rows.prompt_index[planned], return_inverse=True)
    step = np.full(len(rows), -1, dtype=np.int64)
    step[planned] = _shuffled_place(len(prompts), seed, epoch)[prompt] * num_steps // max(len(prompts), 1)
    return step


def deal_rows(rows: Rows, planned: Ints, num_steps: int, *, seed: int, epoch: int) -> Ints:
    """Step of each row so that steps hold equal numbers of rows; rows that are not planned have -1."""
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
    """splitmix64: neighbouring numbers give unrelated ones."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
