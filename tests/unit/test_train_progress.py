"""What a run shows while it runs: a bar on a terminal, plain lines elsewhere, and the first failure by its name."""

from io import StringIO

import pytest
from rich.console import Console

from raggedright.report.events import Failure, LedgerCounts, RoundEvent, WarningEvent
from raggedright.train.progress import Progress, round_text


def event(round: int = 1, *failed: Failure, num_failed: int = 0, **metrics: float) -> RoundEvent:
    """A round with a score of 0.25; names of metrics have / as __."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return RoundEvent(
        round=round,
        rows=1_234,
        padding_rows=2,
        metrics={"critic/score/mean": 0.25, "perf/tokens_per_second": 5_000.0, **named},
        ledger=LedgerCounts(sessions={"trained": 9, "failed (timed out)": num_failed}),
        failed=failed,
    )


def shown(*rounds: RoundEvent, terminal: bool = False) -> str:
    out = StringIO()
    progress = Progress(len(rounds), console=Console(file=out, force_terminal=terminal, width=120))
    for each in rounds:
        progress.show(each)
    progress.close()
    return out.getvalue()


def test_lines_without_a_terminal_have_round_score_rows_padding_speed_and_time_left():
    first, last = shown(event(1), event(2), event(3)).splitlines()  # others come every few seconds
    assert first.startswith("round 1/3  score 0.250  1,234 rows + 2 padding  5,000 tokens/s  0:00")
    assert last.startswith("round 3/3")


def test_the_first_failed_session_is_named_once_with_its_cause():
    failure = Failure(prompt="p7", session=2, cause="timed out after 5 s")
    said = shown(event(1), *(event(round, failure, num_failed=3) for round in (2, 3)))
    assert said.count("p7/2: timed out after 5 s") == 1
    assert "round 2: the first session that failed, p7/2" in said
    assert "3 failed" in said


def test_sessions_are_counted_in_a_round_that_takes_its_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("raggedright.train.progress.monotonic", lambda: clock[0])
    out = StringIO()
    progress = Progress(2, console=Console(file=out, width=120))
    progress.show(event(1))
    for done, clock[0] in ((1, 1.0), (2, 6.0), (3, 7.0), (4, 12.0)):
        progress.sessions(2, done, 4)
    clock[0] = 14.0
    progress.show(event(2))
    clock[0] = 18.0  # long after the last such line, and not after the round began
    progress.sessions(3, 1, 4)
    assert out.getvalue().splitlines()[1:3] == [
        "round 2/2  2 of 4 sessions on this rank",
        "round 2/2  4 of 4 sessions on this rank",
    ]
    assert "round 3" not in out.getvalue()


def test_markup_and_names_of_emoji_in_a_cause_are_text():
    cause = "ValueError: [red]not[/red] a colour :boom:"
    assert f"p/0: {cause}" in shown(event(1, Failure(prompt="p", cause=cause)))


def test_a_terminal_has_a_bar_that_counts_rounds():
    assert "2/2" in shown(event(1), event(2), terminal=True)


def test_the_spread_of_scores_and_the_shares_that_are_not_zero_are_shown():
    some = event(critic__score__std=0.5, prompts__no_signal_ratio=0.4, response_length__clip_ratio=0.0)
    assert "score 0.250 std 0.500  1,234 rows + 2 padding  no signal 40%  5,000 tokens/s" in shown(some)


@pytest.mark.parametrize("score", [1e308, -1e308, 1e6])
def test_large_scores_have_an_exponent_and_not_all_their_digits(score: float):
    large = event(critic__score__mean=score, critic__score__std=abs(score))
    assert f"score {score:.3g} std {abs(score):.3g}  " in round_text(large)
    assert "score 999999.500  " in round_text(event(critic__score__mean=999_999.5))


def test_at_80_columns_a_bar_cuts_nothing_off():
    out = StringIO()
    progress = Progress(150, console=Console(file=out, force_terminal=True, width=80, color_system=None))
    some = event(
        num_failed=3,
        critic__score__std=0.5,
        prompts__no_signal_ratio=0.4,
        response_length__clip_ratio=0.1,
        rows__no_loss_ratio=0.2,
    )
    progress.show(some)
    progress.show(WarningEvent(round=3, first_round=1, kind="no gradient", text="rounds 1 to 3 had no gradient"))
    progress.close()
    assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()
    last = " ".join(out.getvalue().rpartition("1/150")[2].split())
    assert all(words in last for words in ("no signal 40%", "cut 10%", "no loss 20%", "tokens/s"))
    assert "warning: rounds 1 to 3 had no gradient" in out.getvalue()
