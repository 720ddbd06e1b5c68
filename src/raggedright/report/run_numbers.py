"""The numbers of a run: sums over its rounds, the headline of its page, and the warnings about rounds without learning.

Scores are compared between the first and the last ten rounds, or between the halves of a run of less than 20 rounds.

Nothing was learned in a round if its gradient was exactly zero. Without a critic, nothing was learned either if no
session had an advantage, because all sessions that are compared, those of a prompt or of the round, had the same score:
an entropy bonus or a KL loss may still produce a gradient, but the scores produce none.
"""

import builtins
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import NamedTuple

import numpy as np

from raggedright.arrays import ROUNDING, Floats
from raggedright.ledger import group_similar
from raggedright.report.events import RoundEvent, RunEvents
from raggedright.report.text import counted, duration, number, score_text, share, visible, with_minus

SCORE, EXACT = "critic/score/mean", "session/exact_match/mean"
WINDOW = 10  # rounds at either end of a run whose scores are compared
MAX_WARNINGS, MAX_WARNING_CHARS = 5, 1200
MAX_CREDIBLE = 1e12  # a larger number of seconds or tokens in a file is ignored
MOSTLY = 0.5  # a fault of at least this share is a likely cause
MAX_CAUSE = 200  # characters of a failed session's cause


class Stat(NamedTuple):
    """A number of the headline; `before` is its value in the first rounds."""

    label: str
    value: str
    note: str = ""
    before: str = ""


def headline(events: RunEvents) -> list[Stat]:
    """The numbers at the top of the page."""
    rounds = events.rounds
    rows, padding = _sum(rounds, lambda r: r.rows), _sum(rounds, lambda r: r.padding_rows)
    outcomes = session_outcomes(rounds)
    sessions = outcomes.total() or _sum(rounds, lambda r: r.sessions)
    failed = sum(count for outcome, count in outcomes.items() if outcome.startswith("failed"))
    skipped = _sum(rounds, lambda r: r.skipped_steps)
    by_outcome = row_outcomes(rounds)
    trained = by_outcome["trained"] if by_outcome else rows  # a run of another version may have no ledger
    seconds = wall_seconds(events)
    per_round = f"{duration(seconds / len(rounds))} per round" if seconds and rounds else ""
    return [
        *_rise("Score", events, SCORE),
        *_rise("Exact match", events, EXACT),
        Stat("Rows trained", f"{trained:,}", f"of {counted(sessions, 'session')}"),
        Stat("Padding rows", f"{padding:,}", f"{share(padding, rows + padding)} of all rows"),
        Stat("Sessions failed", f"{failed:,}", f"{share(failed, sessions)} of all sessions"),
        Stat("Optimizer steps", f"{_sum(rounds, lambda r: r.optimizer_steps):,}", f"{skipped:,} skipped"),
        Stat("Wall time", duration(seconds), per_round),
        *_speed(rounds),
    ]


def _rise(label: str, events: RunEvents, name: str) -> list[Stat]:
    values = [value for event in events.rounds if (value := event.metrics.get(name)) is not None and isfinite(value)]
    if len(values) == 0:
        return []
    if len(values) == 1:
        return [Stat(label, number(round(values[0], 3)), "of the only round")]
    first, last, window = ends_of(values)
    note = f"mean of the first and last {'round' if window == 1 else f'{window} rounds'}"
    return [Stat(label, with_minus(score_text(last, 2)), note, with_minus(score_text(first, 2)))]


def ends_of(values: Sequence[float] | Floats) -> tuple[float, float, int]:
    """The mean of the first and of the last values, which do not overlap, and how many values each mean has."""
    window = min(WINDOW, max(1, len(values) // 2))
    first, last = (float(np.sum(np.divide(few, window))) for few in (values[:window], values[-window:]))
    return first, last, window  # divided first, because the sum of large scores may overflow


def _speed(rounds: Iterable[RoundEvent]) -> list[Stat]:
    pairs = [(r.metrics.get("perf/tokens", 0.0), r.metrics.get("perf/tokens_per_second", 0.0)) for r in rounds]
    known = [(tokens, speed) for tokens, speed in pairs if 0 < tokens < MAX_CREDIBLE and 1e-9 < speed < MAX_CREDIBLE]
    if not known:
        return []
    total = sum(tokens for tokens, _ in known)
    per_second = total / sum(tokens / speed for tokens, speed in known)
    return [Stat("Tokens per second", number(float(round(per_second))), f"{number(total)} in total")]


def wall_seconds(events: RunEvents) -> float | None:
    """The seconds of the end event; for a resumed run at least the sum over its rounds."""
    of_rounds = sum(seconds for _, seconds in parts_total(events))
    stated = (events.end.seconds if events.end else None) or 0.0
    return max(stated if stated < MAX_CREDIBLE else 0.0, of_rounds) or None


def parts_total(events: RunEvents) -> list[tuple[str, float]]:
    """Seconds by part over all rounds, in the order in which the events list them."""
    total: dict[str, float] = {}
    for each in events.rounds:
        for part, seconds in each.seconds.items():
            if 0 <= seconds < MAX_CREDIBLE:
                total[part] = total.get(part, 0.0) + seconds
    return list(total.items())


def session_outcomes(rounds: Iterable[RoundEvent]) -> Counter[str]:
    """Sessions by outcome; failures with similar causes are counted together."""
    return group_similar(_add_counts(each.ledger.sessions for each in rounds))


def row_outcomes(rounds: Iterable[RoundEvent]) -> Counter[str]:
    """Rows by outcome."""
    return _add_counts(each.ledger.rows for each in rounds)


def _add_counts(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _sum(rounds: Iterable[RoundEvent], of: Callable[[RoundEvent], int | None]) -> int:
    return sum(of(each) or 0 for each in rounds)


def shown_warnings(events: RunEvents) -> list[str]:
    """The last warning of each streak of rounds, at most the MAX_WARNINGS most recent ones."""
    last = {(each.kind, each.round if each.first_round is None else each.first_round): each for each in events.warnings}
    texts = [visible(each.text, MAX_WARNING_CHARS) for each in sorted(last.values(), key=lambda each: each.round)]
    left = len(texts) - MAX_WARNINGS
    return [*([f"{counted(left, 'earlier warning')} in events.jsonl"] if left > 0 else []), *texts[-MAX_WARNINGS:]]


def learned_nothing(round: RoundEvent, *, has_group_advantages: bool, has_critic: bool) -> bool:
    """Whether the actor trained in this round without learning from the scores."""
    norm = round.metrics.get("actor/grad_norm")
    if norm is None:  # the critic warms up, or every step was skipped
        return round.optimizer_steps == 0
    if norm == 0 or has_critic:
        return norm == 0
    if has_group_advantages:
        return round.metrics.get("prompts/no_signal_ratio") == 1
    low, high = (round.metrics.get(f"critic/score/{name}", nan) for name in ("min", "max"))
    return high - low <= ROUNDING * max(abs(low), abs(high))


def no_gradient_words(first_round: int, last: Sequence[RoundEvent], *, other_terms: Sequence[str] = ()) -> str:
    """The warning about rounds without learning since `first_round`; `last` has the most recent ones.

    `other_terms` are the terms of the loss that do not depend on the scores, with the keys that set them.
    """
    number, rounds = last[-1].round, _rounds_in_words(first_round, last[-1].round)
    norms = [round.metrics.get("actor/grad_norm", 0.0) for round in last]
    head = f"{rounds} had no gradient, so nothing was learned from them"
    if any(norms):
        trained = f"; only {' and '.join(other_terms)} trained the model" if other_terms else ""
        head = f"the scores of {rounds} gave no gradient, so nothing was learned from them{trained}"
    of_last = "" if len(last) == number - first_round + 1 else f" in the last {len(last):,} of them"
    causes = [*_score_cause(last), *_failure_cause(last), *_row_causes(last), *_length_cause(last)]
    causes = causes or ["none that the metrics show; look at the advantages of the trajectories in the report"]
    if len(causes) > 1:
        causes = [f"({i}) {cause}" for i, cause in enumerate(causes, 1)]
    likely = f"Likely cause{'s' if len(causes) > 1 else ''}{of_last}"
    return f"{head}. {likely}: {'. '.join(causes)}."


def has_few_with_signal(round: RoundEvent, *, batch_size: int) -> bool:
    """Whether dynamic sampling reached its limit before the batch was full of prompts with signal."""
    return _num_with_signal(round) < batch_size


def few_with_signal_words(
    first_round: int, last: Sequence[RoundEvent], *, batch_size: int, max_sampled_batches: int
) -> str:
    """The warning about rounds in which dynamic sampling reached its limit; its numbers are those of the last round."""
    num_sampled = int(last[-1].metrics.get("prompts/sampled", 0))
    with_signal = f"{_num_with_signal(last[-1]):,} of {num_sampled:,} sampled prompts"
    all_sampled = num_sampled < max_sampled_batches * batch_size
    remedy = "add prompts to prompts.source, which has no more" if all_sampled else "raise rollout.max_sampled_batches"
    return (
        f"{_rounds_in_words(first_round, last[-1].round)} did not find {counted(batch_size, 'prompt')} with signal "
        f"(in the last round {with_signal} had it), so the batch was filled with prompts whose sessions all score the "
        f"same; {remedy}, or choose prompts that are neither too hard nor too easy."
    )


def _rounds_in_words(first: int, last: int) -> str:
    return f"round {last:,}" if first == last else f"rounds {first:,} to {last:,}"


def _num_with_signal(round: RoundEvent) -> int:
    sampled, ratio = (round.metrics.get(f"prompts/{name}", 0.0) for name in ("sampled", "no_signal_ratio"))
    return builtins.round(sampled * (1 - ratio))


def _score_cause(rounds: Sequence[RoundEvent]) -> list[str]:
    lows = [r.metrics["critic/score/min"] for r in rounds if "critic/score/min" in r.metrics]
    highs = [r.metrics["critic/score/max"] for r in rounds if "critic/score/max" in r.metrics]
    if not lows or not highs:
        return []
    low, high = min(lows), max(highs)
    hard = "the task is too hard or too easy for this model"
    if low == high:
        return [f"every finished session scored {low:g}: {hard}, or the reward is constant"]
    if all(round.metrics.get("prompts/no_signal_ratio") == 1 for round in rounds):
        same = "the sessions of a prompt are too similar (raise rollout.temperature or rollout.n)"
        return [f"the sessions of each prompt scored the same, from {low:g} to {high:g} by prompt: {hard}, or {same}"]
    return []


def _failure_cause(rounds: Sequence[RoundEvent]) -> list[str]:
    outcomes = session_outcomes(rounds)
    failed = Counter({name: count for name, count in outcomes.items() if name.startswith("failed")})
    if failed.total() < MOSTLY * max(outcomes.total(), 1):
        return []
    outcome, count = failed.most_common(1)[0]
    cause = outcome.removeprefix("failed (").removeprefix("such as ").removesuffix(")")[:MAX_CAUSE]
    sessions = counted(outcomes.total(), "session")
    return [f"{failed.total():,} of {sessions} failed, most often ({count:,} times) with: {cause}"]


def _row_causes(rounds: Sequence[RoundEvent]) -> list[str]:
    outcomes = row_outcomes(rounds)
    remedies = {
        "skipped (no loss tokens)": "had no loss token; is an `await` missing before generate()?",
        "dropped (over_long)": "were dropped; raise train.micro_batch_tokens, or set train.over_long to alone",
    }
    rows = counted(outcomes.total(), "row")
    return [
        f"{outcomes[name]:,} of {rows} {remedy}"
        for name, remedy in remedies.items()
        if outcomes[name] and outcomes[name] >= MOSTLY * outcomes.total()
    ]


def _length_cause(rounds: Sequence[RoundEvent]) -> list[str]:
    name = "response_length/clip_ratio"
    ratios = [round.metrics[name] for round in rounds if name in round.metrics]
    if not ratios or sum(ratios) < MOSTLY * len(ratios):
        return []
    mean = sum(ratios) / len(ratios)
    return [f"{mean:.0%} of generations were cut off at the length limit; raise rollout.max_tokens or the agent's"]
