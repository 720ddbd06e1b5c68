from dataclasses import fields, replace
from typing import Literal, get_args, get_origin

import pytest

from raggedright import ConfigError, Layout, Plan, Rows, make_plan

GOOD = Layout(dp_size=2, batch_size=45, mini_batch_size=15, rollout_n=8, critic_mini_batch_size=9)
AT_LEAST_ONE = (
    "dp_size",
    "batch_size",
    "mini_batch_size",
    "rollout_n",
    "critic_mini_batch_size",
    "epochs",
    "loss_norm_tokens",
    "micro_batch_tokens",
    "micro_batch_rows",
    "micro_batch_multiple",
    "min_row_tokens",
)
AT_LEAST_ZERO = ("cost_linear", "cost_quadratic", "seed")
OPTIONAL = ("critic_mini_batch_size", "loss_norm_tokens", "micro_batch_tokens", "micro_batch_rows")
CHOICES = {field.name: get_args(field.type) for field in fields(Layout) if get_origin(field.type) is Literal}
EQUAL_ROWS: dict[str, object] = {"cut": "equal-rows", "micro_batch_rows": None}
# For each setting two values that give different plans of the same rows, and what else must be set for that.
TWO_WAYS: dict[str, tuple[object, object, dict[str, object]]] = {
    "dp_size": (2, 3, {}),
    "batch_size": (6, 4, {}),
    "mini_batch_size": (2, 3, {}),
    "rollout_n": (2, 3, {"align": "lcm"}),
    "critic_mini_batch_size": (3, 2, {}),
    "actor_trains": (True, False, {}),
    "epochs": (1, 2, {}),
    "align": ("steps", "lcm", {}),
    "loss_agg": ("token-mean", "session-mean", {}),
    "loss_norm_tokens": (10, 20, {"loss_agg": "seq-mean-token-sum-norm"}),
    "micro_batch_tokens": (60, 90, {"micro_batch_rows": None}),
    "micro_batch_rows": (2, 3, {}),
    "collate": ("packed", "padded", {"micro_batch_rows": None, "micro_batch_tokens": 60}),
    "micro_batch_multiple": (1, 2, {}),
    "min_row_tokens": (2, 40, {"micro_batch_rows": None, "micro_batch_tokens": 60}),
    "over_long": ("alone", "drop", {"micro_batch_rows": None, "micro_batch_tokens": 40}),
    "cost_linear": (1, 100, {}),
    "cost_quadratic": (0, 1, {"cost_linear": 1}),
    "seed": (0, 1, {}),
    "cut": ("micro-batches", "equal-rows", {"micro_batch_rows": None}),
    "rows_multiple": (1, 5, EQUAL_ROWS),
    "critic_dp_size": (2, 3, EQUAL_ROWS),
    "critic_rows_multiple": (1, 5, EQUAL_ROWS),
    "critic_loss_agg": ("token-mean", "session-mean", EQUAL_ROWS),
    "critic_loss_norm_tokens": (10, 20, {**EQUAL_ROWS, "critic_loss_agg": "seq-mean-token-sum-norm"}),
}


def error_of(**settings: object) -> str:
    with pytest.raises(ConfigError) as error:
        replace(GOOD, **settings)  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_a_size_below_one_is_named_with_its_value(name: str, value: int) -> None:
    least = 2 if name == "min_row_tokens" else 1
    assert f"{name} is {value}; it must be an integer of at least {least}" in error_of(**{name: value})


def test_a_row_has_room_for_a_prompt_token_and_a_response_token() -> None:
    """The shortest padding row is 1 + 1 tokens, so that no layout may ask for a shorter one."""
    assert "min_row_tokens is 1; it must be an integer of at least 2" in error_of(min_row_tokens=1)


@pytest.mark.parametrize("name", AT_LEAST_ZERO)
def test_a_negative_cost_or_seed_is_named_with_its_value(name: str) -> None:
    assert f"{name} is -1; it must be an integer of at least 0" in error_of(**{name: -1})


@pytest.mark.parametrize("value", [1.5, 2.0, "8", True, [8], float("inf")])
@pytest.mark.parametrize("name", [*AT_LEAST_ONE, *AT_LEAST_ZERO])
def test_a_setting_that_is_no_integer_is_named_with_its_value(name: str, value: object) -> None:
    message = error_of(**{name: value})
    assert f"{name} is {value!r}" in message
    assert "integer" in message


@pytest.mark.parametrize("name", [name for name in (*AT_LEAST_ONE, *AT_LEAST_ZERO) if name not in OPTIONAL])
def test_a_setting_that_must_be_given_is_named_where_it_is_none(name: str) -> None:
    assert f"{name} is None" in error_of(**{name: None})


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_is_named_with_those_there_are(name: str) -> None:
    for wrong in ("other", "", None, 3):
        message = error_of(**{name: wrong})
        assert f"{name} is {wrong!r}" in message
        assert all(choice in message for choice in CHOICES[name])


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_taken(name: str) -> None:
    for choice in CHOICES[name]:
        others: dict[str, object] = {"micro_batch_tokens": None} if name == "cut" else {}
        layout = replace(GOOD, loss_norm_tokens=1, **{**others, name: choice})  # type: ignore[arg-type]
        assert getattr(layout, name) == choice


@pytest.mark.parametrize("name", ["rows_multiple", "critic_dp_size", "critic_rows_multiple"])
def test_a_setting_that_the_cut_does_not_use_is_refused_by_name(name: str) -> None:
    assert f"{name} is 2" in error_of(**{name: 2})
    message = error_of(cut="equal-rows")
    assert "micro_batch_tokens" in message
    assert "equal-rows" in message


def test_the_critics_settings_default_to_the_actors() -> None:
    layout = replace(GOOD, micro_batch_tokens=None, cut="equal-rows", rows_multiple=4, loss_agg="session-mean")
    assert layout.critic == replace(layout.actor, mini_batch_size=9)
    assert replace(layout, critic_mini_batch_size=None).critic is None
    with pytest.raises(ConfigError, match="critic_loss_norm_tokens"):
        replace(layout, critic_loss_agg="seq-mean-token-sum-norm")


@pytest.mark.parametrize("value", ["no", 0, None])
def test_actor_trains_is_a_boolean(value: object) -> None:
    message = error_of(actor_trains=value)
    assert f"actor_trains is {value!r}" in message
    assert "integer" not in message


def test_micro_batches_go_by_tokens_or_rows_but_not_both() -> None:
    message = error_of(micro_batch_tokens=8_192, micro_batch_rows=8)
    assert "micro_batch_tokens is 8,192" in message
    assert "micro_batch_rows is 8" in message


def test_a_budget_below_the_shortest_row_is_an_error_with_both_numbers() -> None:
    message = error_of(micro_batch_tokens=1_000, min_row_tokens=1_024)
    assert "micro_batch_tokens is 1,000" in message
    assert "min_row_tokens 1,024" in message
    assert replace(GOOD, micro_batch_tokens=1_024, min_row_tokens=1_024).capacity == 1_024


def test_rows_that_cost_nothing_are_an_error() -> None:
    message = error_of(cost_linear=0, cost_quadratic=0)
    assert "cost_linear" in message
    assert "cost_quadratic" in message


def test_the_norm_mode_asks_for_its_constant() -> None:
    message = error_of(loss_agg="seq-mean-token-sum-norm")
    assert "seq-mean-token-sum-norm" in message
    assert "loss_norm_tokens" in message
    assert replace(GOOD, loss_agg="seq-mean-token-sum-norm", loss_norm_tokens=1).loss_norm_tokens == 1


def test_some_role_must_train() -> None:
    message = error_of(actor_trains=False, critic_mini_batch_size=None)
    assert "actor_trains" in message
    assert "critic_mini_batch_size" in message


def test_the_budget_is_8192_tokens_unless_something_else_is_said() -> None:
    bare = Layout(dp_size=1, batch_size=1, mini_batch_size=1)
    assert (bare.micro_batch_tokens, bare.micro_batch_rows, bare.capacity) == (8_192, None, 8_192)
    by_rows = Layout(dp_size=1, batch_size=1, mini_batch_size=1, micro_batch_rows=3)
    assert (by_rows.micro_batch_tokens, by_rows.micro_batch_rows, by_rows.capacity) == (None, 3, 3)
    assert (bare.cost_linear, bare.cost_quadratic) == (47_000, 1)


def cuts_of(plan: Plan) -> list:
    """All that a plan decides, without the layout's own values, which its digest has too."""
    return [
        plan.dropped.tolist(),
        *(
            (role, s.epoch, s.dp_size, s.num_slots, s.skipped, s.row.tolist(), s.weight.tolist(), s.bounds.tolist())
            for role, steps in plan.roles.items()
            for s in steps
        ),
    ]


@pytest.mark.parametrize("name", [field.name for field in fields(Layout)])
def test_every_setting_changes_a_plan(name: str) -> None:
    rows = Rows.from_columns(
        prompt=[f"p{i % 6}" for i in range(36)],
        session=[i // 6 % 3 for i in range(36)],
        trajectory=[i // 18 for i in range(36)],
        prompt_tokens=[1 + i % 4 for i in range(36)],
        response_tokens=[1 + i * i * 7 % 53 for i in range(36)],
    )
    base = Layout(dp_size=2, batch_size=6, mini_batch_size=2, rollout_n=3, critic_mini_batch_size=3, micro_batch_rows=3)
    *values, others = TWO_WAYS[name]
    one, other = (replace(base, **{**others, name: value}) for value in values)  # type: ignore[arg-type]
    assert cuts_of(make_plan(rows, one)) == cuts_of(make_plan(rows, replace(one)))
    assert cuts_of(make_plan(rows, one)) != cuts_of(make_plan(rows, other))
