"""Every session and row ends in exactly one state, and a plan that loses a row is caught."""

from dataclasses import replace

import numpy as np
import pytest

from raggedright import Layout, LedgerError, Outcome, Rows, RowsError, close_ledger, make_plan

LAYOUT = Layout(dp_size=2, batch_size=4, mini_batch_size=2, rollout_n=2, micro_batch_tokens=100, over_long="drop")


def batch() -> Rows:
    """Sessions a/0 (two rows), a/1 (one over-long row), b/0 (a row without loss tokens), c/0 (one good, one long)."""
    return Rows.from_columns(
        prompt=["a", "a", "a", "b", "c", "c"],
        session=[0, 0, 1, 0, 0, 0],
        trajectory=[0, 1, 0, 0, 0, 1],
        prompt_tokens=[10] * 6,
        response_tokens=[5, 6, 200, 7, 8, 300],
        loss_tokens=[5, 6, 200, 0, 8, 300],
    )


@pytest.mark.parametrize(
    ("first", "second", "similar"),
    [
        ("no such city for task 16", "no such city for task 17", True),
        ("KeyError: 'Paris'", "KeyError: 'Rome and Oslo'", True),
        ('no "a" in reply', 'no "b" in reply', True),
        ("timed out after 3.5 s", "timed out after 1,200 s", True),
        ("<Agent object at 0x7f3a>", "<Agent object at 0x88bc>", True),
        ("the agent's reply isn't JSON", "the agent's answer isn't JSON", False),
        ("KeyError: 'Paris'", "ValueError: 'Paris'", False),
    ],
)
def test_causes_are_counted_together_if_they_differ_only_in_numbers_and_quoted_text(first, second, similar):
    ledger = close_ledger(make_plan(batch(), LAYOUT), {("p8", 0): first, ("p8", 1): second, ("p9", 0): first})
    shown = f"3 failed (such as {first})" if similar else f"1 failed ({second})"
    assert shown in str(ledger)
    sessions = ledger.to_dict()["sessions"]
    assert isinstance(sessions, dict)
    assert (sessions[f"failed ({first})"], sessions[f"failed ({second})"]) == (2, 1)
    assert ledger.sessions["p8", 1].cause == second


def test_every_row_and_session_has_one_outcome():
    ledger = close_ledger(make_plan(batch(), LAYOUT), failed={("d", 3): "timeout"})
    trained, failed = Outcome("trained"), Outcome("failed", "timeout")
    dropped, skipped = Outcome("dropped", "over_long"), Outcome("skipped", "no loss tokens")
    assert ledger.rows == {
        "a/0/0": trained, "a/0/1": trained, "a/1/0": dropped, "b/0/0": skipped, "c/0/0": trained, "c/0/1": dropped,
    }  # fmt: skip
    assert ledger.sessions == {
        ("a", 0): trained, ("a", 1): dropped, ("b", 0): skipped, ("c", 0): trained, ("d", 3): failed,
    }  # fmt: skip


def test_the_sums_are_printed():
    ledger = close_ledger(make_plan(batch(), LAYOUT), failed={("d", 3): "timeout", ("d", 4): "timeout"})
    assert str(ledger).splitlines() == [
        "sessions: 6 = 2 trained + 1 dropped (over_long) + 2 failed (timeout) + 1 skipped (no loss tokens)",
        "rows: 6 = 3 trained + 2 dropped (over_long) + 1 skipped (no loss tokens)",
        f"padding rows: {ledger.num_padding_rows}",
    ]
    assert ledger.to_dict()["rows"] == {"trained": 3, "dropped (over_long)": 2, "skipped (no loss tokens)": 1}


def test_an_empty_batch_has_an_empty_ledger():
    ledger = close_ledger(make_plan(batch().take(np.array([], dtype=np.int64)), LAYOUT))
    assert str(ledger).splitlines() == ["sessions: 0 = 0", "rows: 0 = 0", "padding rows: 0"]


def test_a_failed_session_with_rows_is_refused():
    with pytest.raises(RowsError, match=r"session a/0 failed \(raised\) but has rows"):
        close_ledger(make_plan(batch(), LAYOUT), failed={("a", 0): "raised"})


@pytest.mark.parametrize("align", ["steps", "lcm"])
@pytest.mark.parametrize("role", ["actor", "critic", "forward"])
def test_a_plan_that_loses_or_repeats_a_row_is_caught(align, role):
    layout = replace(LAYOUT, align=align, critic_mini_batch_size=4, epochs=2)
    plan = make_plan(batch(), layout)
    close_ledger(plan)
    steps = plan.steps(role)
    number = next(i for i, step in enumerate(steps) if (step.row < len(plan.rows)).any())
    for wrong in (int(plan.dropped[0]), len(plan.rows)):  # a row that was dropped; a padding row for a real one
        row = steps[number].row.copy()
        row[np.flatnonzero(row < len(plan.rows))[0]] = wrong
        spoilt = (*steps[:number], replace(steps[number], row=row), *steps[number + 1 :])
        with pytest.raises(LedgerError, match=rf"{role}, epoch 0: row .* is planned [01] times, not [01]"):
            close_ledger(replace(plan, roles={**plan.roles, role: spoilt}))


def test_padding_is_counted_beside_the_rows():
    plan = make_plan(batch(), replace(LAYOUT, dp_size=8))
    ledger = close_ledger(plan)
    assert ledger.num_padding_rows == plan.num_padding_rows > 0
    assert len(ledger.rows) == 6


def test_rows_that_were_sampled_and_left_out_are_skipped_with_their_cause():
    rows = batch()
    left_out = {"no signal": rows.take(rows.prompt == "a"), "batch full": rows.take(rows.prompt == "b")}
    plan = make_plan(rows.take(rows.prompt == "c"), LAYOUT)
    ledger = close_ledger(plan, {("a", 2): "timeout"}, left_out)
    no_signal, full = Outcome("skipped", "no signal"), Outcome("skipped", "batch full")
    assert ledger.sessions == {
        ("c", 0): Outcome("trained"), ("a", 0): no_signal, ("a", 1): no_signal, ("b", 0): full,
        ("a", 2): Outcome("failed", "timeout"),
    }  # fmt: skip
    assert {key: str(outcome) for key, outcome in ledger.rows.items()} == {
        "c/0/0": "trained", "c/0/1": "dropped (over_long)", "b/0/0": "skipped (batch full)",
        **dict.fromkeys(["a/0/0", "a/0/1", "a/1/0"], "skipped (no signal)"),
    }  # fmt: skip
    assert ledger.to_dict()["sessions"] == {
        "trained": 1, "failed (timeout)": 1, "skipped (batch full)": 1, "skipped (no signal)": 2,
    }  # fmt: skip
    with pytest.raises(LedgerError, match=r"a/0/0 is skipped \(no signal\) and is planned"):
        close_ledger(make_plan(rows, LAYOUT), None, left_out)
