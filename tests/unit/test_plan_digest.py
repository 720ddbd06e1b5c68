"""The digest that ranks compare before they train, and the seed that it depends on."""

from dataclasses import replace

import numpy as np
import pytest

from raggedright import Layout, Rows, make_plan

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
