"""The comparison shows what each rule costs on the same rows."""

import pytest

from raggedright import Layout, Rows, make_plan
from raggedright.plan import measure
from raggedright.plan.measure import RULES, WhatIf, compare_rules


def ragged(num_rows: int, num_sessions: int, sessions_a_prompt: int) -> Rows:
    session = [i % num_sessions for i in range(num_rows)]
    return Rows.from_columns(
        prompt=[f"p{s // sessions_a_prompt:02}" for s in session],
        session=[s % sessions_a_prompt for s in session],
        trajectory=[i // num_sessions for i in range(num_rows)],
        prompt_tokens=[10 + i % 7 for i in range(num_rows)],
        response_tokens=[1 + i * 13 % 90 for i in range(num_rows)],
    )


def compare(num_rows: int = 361, **options) -> dict[str, WhatIf]:
    layout = Layout(**{"dp_size": 2, "batch_size": 45, "mini_batch_size": 15, "rollout_n": 8, **options})
    return {rule.rule: rule for rule in compare_rules(ragged(num_rows, 360, 8), layout)}


def test_the_rules_of_the_verification_run_side_by_side():
    rules = compare()
    assert list(rules) == ["align steps", "align lcm", "drop the remainder", "copy rows", "pad at the end"]
    assert [rule.steps for rule in rules.values()] == [3, 4, 3, 4, 4]
    assert [rule.padding_rows for rule in rules.values()] == [0, 119, 0, 0, 119]
    assert [rule.lost_rows for rule in rules.values()] == [0, 0, 1, 0, 0]
    assert [rule.copied_rows for rule in rules.values()] == [0, 0, 0, 119, 0]
    assert [rule.fewest_rows for rule in rules.values()] == [120, 90, 120, 120, 1]
    assert rules["align lcm"].padding_tokens == 238


def test_padding_at_the_end_leaves_steps_without_a_row():
    """verl 0.9.1 pads the last mini-batches; a padding-only mini-batch still stepped AdamW."""
    rules = compare(num_rows=125, critic_mini_batch_size=45)
    assert rules["pad at the end"].fewest_rows == 0
    assert rules["align lcm"].fewest_rows == 41
    assert rules["align steps"].padding_rows == 0


def test_ours_are_no_less_level_than_theirs():
    rules = compare(micro_batch_tokens=400)
    for theirs in RULES:
        assert rules["align steps"].imbalance.slot < rules[theirs].imbalance.slot


def test_lost_and_copied_rows_are_counted_of_any_rule(monkeypatch):
    monkeypatch.setattr(measure, "RULES", {"first row thrice": lambda row, *_: row[[0, 0, 0]]})
    assert (compare()["first row thrice"].lost_rows, compare()["first row thrice"].copied_rows) == (360, 2)


@pytest.mark.parametrize("options", [{}, {"align": "lcm"}, {"epochs": 2}, {"seed": 3}])
def test_a_plan_that_is_there_already_changes_nothing(options):
    layout = Layout(dp_size=2, batch_size=45, mini_batch_size=15, rollout_n=8, **options)
    rows = ragged(361, 360, 8)
    assert compare_rules(rows, layout, plan=make_plan(rows, layout)) == compare_rules(rows, layout)


def test_every_rule_reports_its_progress():
    reported: list[tuple[str, int, int]] = []
    layout = Layout(dp_size=2, batch_size=45, mini_batch_size=15, rollout_n=8)
    compare_rules(ragged(361, 360, 8), layout, report=lambda *words: reported.append(words))
    assert list(dict.fromkeys(rule for rule, _, _ in reported)) == ["align steps", "align lcm", *RULES]
    assert ("pad at the end", 360, 480) in reported


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_tiny_batches_can_be_compared(num_rows):
    rules = compare(num_rows=num_rows)
    assert rules["drop the remainder"].lost_rows == num_rows
    assert rules["drop the remainder"].steps == 0
    assert rules["align steps"].steps == 3


def test_during_the_critics_warm_up_its_steps_are_compared():
    rules = compare(critic_mini_batch_size=9, actor_trains=False)
    assert rules["align steps"].steps == 5
    assert rules["align lcm"].steps == 432 // 72
