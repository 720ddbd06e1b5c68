"""The digest that ranks compare before they train, the seed that it depends on, and 200 plans that stay as they are."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import TypeVar, get_args

import numpy as np
import pytest

from raggedright import Layout, Plan, Rows, make_plan
from raggedright.plan.layout import Align, LossAgg

T = TypeVar("T")

ORIGIN = Layout(dp_size=2, batch_size=45, mini_batch_size=15, rollout_n=8)


def make_rows(num_rows: int, num_prompts: int) -> Rows:
    random = np.random.default_rng(num_rows)
    return Rows.from_columns(
        prompt=[f"p{i % num_prompts}" for i in range(num_rows)],
        session=np.arange(num_rows) // num_prompts,
        trajectory=np.zeros(num_rows, dtype=np.int64),
        prompt_tokens=random.integers(1, 100, num_rows),
        response_tokens=random.integers(1, 800, num_rows),
    )


def changed(rows: Rows, **columns: object) -> Rows:
    fields = ("prompt", "session", "trajectory", "prompt_tokens", "response_tokens", "loss_tokens")
    return Rows.from_columns(**{**{name: getattr(rows, name) for name in fields}, **columns})  # type: ignore[arg-type]


@pytest.mark.parametrize("num_rows", [2, 361])
def test_the_digest_sees_every_change_of_a_row(num_rows: int) -> None:
    """Ranks compare it before they train, so rows that differ in any field must not pass for the same."""
    rows = make_rows(num_rows, min(num_rows, 45))
    digest = make_plan(rows, ORIGIN).digest()
    backwards = rows.take(np.arange(num_rows)[::-1])
    assert make_plan(backwards, ORIGIN).digest() == digest
    bump = np.arange(num_rows) == num_rows // 2
    others = {
        "prompt": np.where(bump, "q", rows.prompt.astype(str)).tolist(),
        "session": rows.session + 100 * bump,
        "trajectory": rows.trajectory + bump,
        "loss_tokens": rows.loss_tokens - bump,
        "prompt_tokens": rows.prompt_tokens + bump,
        "response_tokens": rows.response_tokens + bump,
    }
    same = [name for name in others if make_plan(changed(rows, **{name: others[name]}), ORIGIN).digest() == digest]
    assert same == []


def test_the_digest_sees_a_row_that_is_missing_and_the_layout() -> None:
    rows = make_rows(361, 45)
    digests = {
        make_plan(rows, ORIGIN).digest(),
        make_plan(rows.take(np.arange(360)), ORIGIN).digest(),
        make_plan(rows, replace(ORIGIN, epochs=2)).digest(),
        make_plan(rows, replace(ORIGIN, loss_agg="session-mean")).digest(),
    }
    assert len(digests) == 4


def test_the_digest_does_not_depend_on_the_type_of_strings() -> None:
    rows = make_rows(9, 3)
    numpy_strings = changed(rows, prompt=[np.str_(name) for name in rows.prompt])
    assert make_plan(numpy_strings, ORIGIN).digest() == make_plan(rows, ORIGIN).digest()


def test_the_seed_changes_which_prompts_share_a_step() -> None:
    rows = make_rows(361, 45)
    assert make_plan(rows, ORIGIN).digest() != make_plan(rows, replace(ORIGIN, seed=1)).digest()


def test_neighbouring_seeds_are_shuffles_of_their_own() -> None:
    """Not the same order shifted by one prompt, which seeds that count rounds would meet again and again."""
    one_each = Layout(dp_size=1, batch_size=40, mini_batch_size=1)
    rows = Rows.from_records(
        {"prompt": f"p{i:02}", "session": 0, "trajectory": 0, "prompt_tokens": i, "response_tokens": 1}
        for i in range(40)
    )
    orders = [
        [int(rows.prompt_tokens[step.row[0]]) for step in make_plan(rows, replace(one_each, seed=seed)).steps("actor")]
        for seed in (0, 1)
    ]
    shifted = [i + 1 for i in orders[1]]
    assert [i for i in orders[0] if i in shifted] != [i for i in shifted if i in orders[0]]


def draw_layout(random: Random) -> Layout:
    """Any alignment, collation, roles, budget and multiple, from `Random.random` alone, whose numbers never change."""

    def one_of(*choices: T) -> T:
        return choices[int(random.random() * len(choices))]

    by_rows = one_of(False, False, True)
    return Layout(
        dp_size=one_of(1, 2, 3, 8, 17, 32, 64),
        batch_size=48,
        mini_batch_size=one_of(1, 5, 12, 16, 48),
        rollout_n=one_of(1, 2, 4),
        critic_mini_batch_size=one_of(None, None, 4, 16),
        epochs=one_of(1, 1, 2),
        align=one_of("steps", "lcm"),
        collate=one_of("packed", "padded", "tree"),
        loss_agg=one_of("token-mean", "seq-mean-token-mean", "session-mean", "prompt-mean"),
        micro_batch_rows=one_of(1, 3, 16) if by_rows else None,
        micro_batch_tokens=None if by_rows else one_of(512, 700, 2_048, 16_384),
        micro_batch_multiple=one_of(1, 1, 1, 4),
        over_long=one_of("alone", "drop"),
        min_row_tokens=one_of(2, 2, 16),
        cost_linear=one_of(47_000, 0, 100),
        seed=int(random.random() * 100),
    )


def draw_rows(random: Random) -> Rows:
    """Up to 800 rows of 48 prompts; some without loss tokens, some equally long, a few far longer than the others."""
    num_rows = int(random.random() ** 2 * 800)
    longest = (60, 500, 1_500)[int(random.random() * 3)]
    sessions = [(f"p{int(random.random() * 48):02}", int(random.random() * 4)) for _ in range(num_rows)]
    counts: Counter[tuple[str, int]] = Counter()
    records: list[dict[str, str | int]] = []
    for prompt, session in sessions:
        response = int(random.random() ** 3 * longest)
        records.append({
            "prompt": prompt, "session": session, "trajectory": counts[prompt, session],
            "prompt_tokens": 7 * (int(prompt[1:]) + int(random.random() * 2)), "response_tokens": response,
            "loss_tokens": response if random.random() < 0.8 else 0,
        })  # fmt: skip
        counts[prompt, session] += 1
    return Rows.from_records(records)


def hash_steps(plan: Plan) -> str:
    """What a plan decides, without the layout's settings that `digest` includes."""
    parts: list[object] = [sorted(plan.rows.key[plan.dropped]), plan.multiple]
    names = [*plan.rows.key, *(f"padding {i}" for i in range(plan.num_padding_rows))]
    for role, steps in plan.roles.items():
        for step in steps:
            numbers = (step.bounds.tolist(), step.weight.tolist(), step.epoch, step.num_slots, step.skipped)
            parts.append((role, [str(names[row]) for row in step.row], *numbers))
    return sha256(repr(parts).encode()).hexdigest()


RECORDED = [
    "b0555dacafe42dfb",
    "c7c08ef8ad9c6a67",
    "ce00f14df3472775",
    "cec565eafa90ba45",
    "875b4313ef275145",
    "da771e3189522c42",
    "7c383598cf0b071a",
    "13059cf57e459972",
    "6f3e51a7c7ce4298",
    "bb78ddf0747cef83",
]  # of 20 plans each


RECORDED_EQUAL_ROWS = [
    "1642a277b9e12f92", "a3389bef784b5590", "4a97d7fcaa8e336d", "1961901a8ce3cccf", "7159f9df95a258b5",
    "7a22a5aeca95852a", "510e714f67f2897d", "9d40f8e80d1962ad", "adb8c0a0ace599eb", "5dcfc94e4cf1bc89",
]  # fmt: skip


def draw_equal_rows_layout(random: Random) -> Layout:
    """A layout with equal rows: any alignment, critic warm-up, and a critic with its own ranks and weights."""

    def one_of(*choices: T) -> T:
        return choices[int(random.random() * len(choices))]

    align: Align = one_of("steps", "lcm")
    rollout_n, mini_batch_size = one_of(1, 2, 4), one_of(1, 5, 12, 16, 48)
    min_row_tokens, seed, actor_trains = one_of(2, 2, 16), int(random.random() * 100), one_of(True, True, False)
    critic_mini_batch_size = one_of(None, 4, 16) if actor_trains else one_of(4, 16)

    def role() -> tuple[int, int, LossAgg, int]:
        return one_of(1, 2, 3, 8, 17, 32), one_of(1, 1, 2, 6), one_of(*get_args(LossAgg)), one_of(100, 1000)

    dp_size, rows_multiple, loss_agg, loss_norm_tokens = role()
    critic = role() if critic_mini_batch_size else (None, None, None, None)
    return Layout(
        cut="equal-rows", batch_size=48, mini_batch_size=mini_batch_size, rollout_n=rollout_n, align=align,
        critic_mini_batch_size=critic_mini_batch_size, actor_trains=actor_trains, min_row_tokens=min_row_tokens,
        seed=seed, dp_size=dp_size, rows_multiple=rows_multiple, loss_agg=loss_agg, loss_norm_tokens=loss_norm_tokens,
        critic_dp_size=critic[0], critic_rows_multiple=critic[1], critic_loss_agg=critic[2],
        critic_loss_norm_tokens=critic[3],
    )  # fmt: skip


def hash_plans(part: int, draw: Callable[[Random], Layout]) -> str:
    hashes = []
    for seed in range(20 * part, 20 * part + 20):
        random = Random(seed)
        hashes.append(hash_steps(make_plan(draw_rows(random), draw(random))))
    return sha256("".join(hashes).encode()).hexdigest()[:16]


@pytest.mark.parametrize("part", range(10))
def test_200_random_plans_are_those_recorded(part: int) -> None:
    """A change that should not change plans keeps these; a change that should has an entry under Numerics."""
    assert hash_plans(part, draw_layout) == RECORDED[part]


@pytest.mark.parametrize("part", range(10))
def test_200_random_plans_with_equal_rows_are_those_recorded(part: int) -> None:
    assert hash_plans(part, draw_equal_rows_layout) == RECORDED_EQUAL_ROWS[part]
