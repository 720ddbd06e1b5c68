"""Rounds that learn nothing are told of once they are enough, with causes that the numbers show."""

from pathlib import Path

import pytest

from raggedright.report.events import EventLog, LedgerCounts, RoundEvent, WarningEvent, read_events
from raggedright.report.run_numbers import few_with_signal_words, learned_nothing, no_gradient_words, shown_warnings
from raggedright.report.run_page import write_report
from raggedright.train.record import Streak, _streaks
from unit.made_runs import event
from unit.test_config import config_with

EQUAL = {
    "actor/grad_norm": 0.0,
    "critic/score/min": 0.5,
    "critic/score/max": 0.5,
    "prompts/no_signal_ratio": 1.0,
    "response_length/clip_ratio": 0.1,
}


def round_event(
    round: int, metrics: dict[str, float], sessions: dict[str, int] | None = None, rows: dict[str, int] | None = None
) -> RoundEvent:
    ledger = {"sessions": sessions or {"trained": 8}, "rows": rows or {"trained": 8}}
    return RoundEvent(round=round, metrics=metrics, optimizer_steps=2, ledger=LedgerCounts.model_validate(ledger))


def streak(patience: int) -> Streak:
    return Streak("none", patience, lambda round: round.metrics["actor/grad_norm"] == 0, lambda first, last: "words")


def lengths(found: list[WarningEvent | None]) -> list[tuple[int | None, int]]:
    return [(each.first_round, each.round) for each in found if each]


def test_a_warning_comes_after_the_configured_rounds_when_they_double_and_when_they_end():
    norms = [1.0] + [0.0] * 9 + [1.0, 0.0]
    rounds = [round_event(number, {"actor/grad_norm": norm}) for number, norm in enumerate(norms, 1)]
    counted = streak(2)
    assert lengths([counted.add(round) for round in rounds]) == [(2, 3), (2, 5), (2, 9), (2, 10)]
    assert counted.end(num_rounds=12) is None


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_run_too_short_for_a_warning_still_has_one_if_no_round_had_a_gradient(num_rounds: int):
    counted = streak(3)
    assert lengths([counted.add(round_event(number, EQUAL)) for number in range(1, num_rounds + 1)]) == []
    assert lengths([counted.end(num_rounds=num_rounds)]) == [(1, num_rounds)]
    assert counted.end(num_rounds=num_rounds) is None


def test_a_gradient_of_entropy_alone_is_none_of_the_scores_where_sessions_of_a_prompt_are_compared():
    round = round_event(1, {**EQUAL, "critic/score/max": 1.0, "actor/grad_norm": 0.3})
    assert learned_nothing(round, has_group_advantages=True, has_critic=False)
    assert not learned_nothing(round, has_group_advantages=False, has_critic=False)
    assert "the scores of round 1 gave no gradient" in no_gradient_words(1, [round])


def test_a_gradient_of_entropy_or_kl_alone_is_none_of_the_scores_where_all_sessions_are_compared():
    """reinforce++ with an entropy bonus trained on a constant score without a word."""
    round = round_event(1, {**EQUAL, "actor/grad_norm": 0.3})
    rounded = round_event(1, {**round.metrics, "critic/score/min": 0.3, "critic/score/max": 0.1 + 0.2})
    unknown = round_event(1, {"actor/grad_norm": 0.3})
    assert learned_nothing(round, has_group_advantages=False, has_critic=False)
    assert learned_nothing(rounded, has_group_advantages=False, has_critic=False)
    assert not learned_nothing(unknown, has_group_advantages=False, has_critic=False)
    assert not learned_nothing(round, has_group_advantages=False, has_critic=True)


@pytest.mark.parametrize("advantages", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_the_warning_names_the_terms_of_the_loss_that_were_trained_alone(advantages: str):
    config = config_with(
        algorithm={"advantages": advantages, "entropy_coef": 0.01},
        reference={"kl": "loss", "coef": 0.1},
        logging={"no_gradient_rounds": 1},
    )
    warning = _streaks(config, [])[0].add(round_event(1, {**EQUAL, "actor/grad_norm": 0.3}))
    assert warning
    terms = "the entropy bonus (algorithm.entropy_coef) and the KL term (reference.coef)"
    assert f"; only {terms} trained the model. Likely cause" in warning.text


def test_a_critic_that_warms_up_is_no_run_without_a_gradient():
    assert not learned_nothing(round_event(1, {"critic/grad_norm": 0.5}), has_group_advantages=False, has_critic=True)


@pytest.mark.parametrize(
    ("metrics", "sessions", "rows", "words"),
    [
        ({}, {}, {}, ["every finished session scored 0.5", "reward is constant"]),
        ({"critic/score/max": 1.0}, {}, {}, ["sessions of each prompt scored the same, from 0.5 to 1", "temperature"]),
        ({}, {"trained": 2, "failed (a)": 1, "failed (timed out)": 5}, {}, ["18 of 24 sessions failed", "timed out"]),
        (
            {},
            {"trained": 1, "failed (KeyError: 'a')": 2, "failed (no city 16)": 1, "failed (no city 17)": 4},
            {},
            ["21 of 24 sessions failed, most often (15 times) with: no city 17"],
        ),
        ({}, {}, {"trained": 1, "skipped (no loss tokens)": 3}, ["9 of 12 rows had no loss token", "await"]),
        ({}, {}, {"dropped (over_long)": 4}, ["12 of 12 rows were dropped", "train.micro_batch_tokens"]),
        (
            {"response_length/clip_ratio": 0.9},
            {},
            {},
            ["90% of generations were cut off at the length limit", "rollout.max_tokens"],
        ),
        ({"prompts/no_signal_ratio": 0.5, "critic/score/max": 1.0}, {}, {}, ["none that the metrics show"]),
    ],
)
def test_the_likely_causes_are_those_that_the_numbers_show(
    metrics: dict[str, float], sessions: dict[str, int], rows: dict[str, int], words: list[str]
):
    rounds = [round_event(number, {**EQUAL, **metrics}, sessions, rows) for number in (4, 5, 6)]
    text = no_gradient_words(4, rounds)
    assert text.startswith("rounds 4 to 6 had no gradient")
    assert all(each in text for each in words), text


def test_the_report_has_the_last_warning_of_a_streak_at_its_top(tmp_path: Path):
    """Later rounds that a resumed run trains again take their warnings with them."""
    with EventLog(tmp_path / "events.jsonl") as log:
        for number in (1, 2, 3, 4, 2):
            log.write(event("round", round=number, metrics=EQUAL))
            if number != 4:
                text = f"<b>rounds 1 to {number}</b>"
                log.write(event("warning", round=number, first_round=1, kind="no gradient", text=text))
    events = read_events(tmp_path / "events.jsonl")
    assert [warning.round for warning in events.warnings] == [1, 2]
    assert shown_warnings(events) == ["<b>rounds 1 to 2</b>"]
    page = write_report(tmp_path).read_text()
    assert page.index("&lt;b&gt;rounds 1 to 2") < page.index('class="stats"')
    assert "rounds 1 to 3" not in page


@pytest.mark.parametrize(
    ("num_sampled", "remedy"),
    [(16, "raise rollout.max_sampled_batches"), (11, "add prompts to prompts.source, which has no more")],
)
def test_the_remedy_for_few_prompts_with_signal_is_the_limit_that_was_reached(num_sampled: int, remedy: str):
    rounds = [round_event(1, {"prompts/sampled": num_sampled, "prompts/no_signal_ratio": 1.0})]
    words = few_with_signal_words(1, rounds, batch_size=4, max_sampled_batches=4)
    assert remedy in words
    assert f"0 of {num_sampled} sampled prompts had it" in words
