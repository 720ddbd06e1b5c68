"""Rounds in which nothing was learned: how they are recognised, and the likely causes according to the metrics.

Nothing was learned in a round if its gradient was exactly zero. With advantages that compare a session only with the
other sessions of its prompt, nothing was learned either if all sessions of every prompt had the same score: an entropy
bonus or a KL loss may still produce a gradient, but the scores produce none.
"""

import builtins
from collections import Counter
from collections.abc import Sequence

from raggedright.report.events import RoundEvent
from raggedright.report.run_numbers import add_counts
from raggedright.report.text import counted

MOSTLY = 0.5  # a fault of at least this share is a likely cause
MAX_CAUSE = 200  # characters of a failed session's cause


def learned_nothing(round: RoundEvent, *, has_group_advantages: bool) -> bool:
    """Whether the actor trained in this round without learning from the scores."""
    norm = round.metrics.get("actor/grad_norm")
    if norm is None:  # the critic warms up, or every step was skipped
        return round.optimizer_steps == 0
    return norm == 0 or (has_group_advantages and round.metrics.get("prompts/no_signal_ratio") == 1)


def no_gradient_words(first_round: int, last: Sequence[RoundEvent]) -> str:
    """The warning about rounds without learning since `first_round`; `last` has the most recent ones."""
    number = last[-1].round
    rounds = f"round {number:,}" if number == first_round else f"rounds {first_round:,} to {number:,}"
    norms = [round.metrics.get("actor/grad_norm", 0.0) for round in last]
    head = f"the scores of {rounds} gave no gradient" if any(norms) else f"{rounds} had no gradient"
    of_last = "" if len(last) == number - first_round + 1 else f" in the last {len(last):,} of them"
    causes = _causes(last)
    if len(causes) > 1:
        causes = [f"({i}) {cause}" for i, cause in enumerate(causes, 1)]
    likely = f"Likely cause{'s' if len(causes) > 1 else ''}{of_last}"
    return f"{head}, so nothing was learned from them. {likely}: {'. '.join(causes)}."


def has_few_with_signal(round: RoundEvent, *, batch_size: int) -> bool:
    """Whether dynamic sampling reached its limit before the batch was full of prompts with signal."""
    return _num_with_signal(round) < batch_size


def few_with_signal_words(
    first_round: int, last: Sequence[RoundEvent], *, batch_size: int, max_sampled_batches: int
) -> str:
    """The warning about rounds in which dynamic sampling reached its limit; its numbers are those of the last round."""
    round = last[-1]
    rounds = f"round {round.round:,}" if round.round == first_round else f"rounds {first_round:,} to {round.round:,}"
    num_sampled = int(round.metrics.get("prompts/sampled", 0))
    with_signal = f"{_num_with_signal(round):,} of {num_sampled:,} sampled prompts"
    all_sampled = num_sampled < max_sampled_batches * batch_size
    remedy = "add prompts to prompts.source, which has no more" if all_sampled else "raise rollout.max_sampled_batches"
    return (
        f"{rounds} did not find {counted(batch_size, 'prompt')} with signal (in the last round {with_signal} had it), "
        f"so the batch was filled with prompts whose sessions all score the same; {remedy}, or choose prompts that are "
        "neither too hard nor too easy."
    )


def _num_with_signal(round: RoundEvent) -> int:
    sampled, ratio = (round.metrics.get(f"prompts/{name}", 0.0) for name in ("sampled", "no_signal_ratio"))
    return builtins.round(sampled * (1 - ratio))


def _causes(rounds: Sequence[RoundEvent]) -> list[str]:
    causes = [*_score_cause(rounds), *_failure_cause(rounds), *_row_causes(rounds), *_length_cause(rounds)]
    return causes or ["none that the metrics show; look at the advantages of the trajectories in the report"]


def _score_cause(rounds: Sequence[RoundEvent]) -> list[str]:
    low, high = (
        limit((r.metrics[name] for r in rounds if name in r.metrics), default=None)
        for limit, name in ((min, "critic/score/min"), (max, "critic/score/max"))
    )
    if low is None or high is None:
        return []
    hard = "the task is too hard or too easy for this model"
    if low == high:
        return [f"every finished session scored {low:g}: {hard}, or the reward is constant"]
    if all(round.metrics.get("prompts/no_signal_ratio") == 1 for round in rounds):
        same = "the sessions of a prompt are too similar (raise rollout.temperature or rollout.n)"
        return [f"the sessions of each prompt scored the same, from {low:g} to {high:g} by prompt: {hard}, or {same}"]
    return []


def _failure_cause(rounds: Sequence[RoundEvent]) -> list[str]:
    outcomes = add_counts(round.ledger.sessions for round in rounds)
    failed = Counter({name: count for name, count in outcomes.items() if name.startswith("failed")})
    if failed.total() < MOSTLY * max(outcomes.total(), 1):
        return []
    cause = failed.most_common(1)[0][0].removeprefix("failed (").removesuffix(")")[:MAX_CAUSE]
    return [f"{failed.total():,} of {counted(outcomes.total(), 'session')} failed, most often with: {cause}"]


def _row_causes(rounds: Sequence[RoundEvent]) -> list[str]:
    outcomes = add_counts(round.ledger.rows for round in rounds)
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
    share = sum(ratios) / len(ratios)
    return [f"{share:.0%} of generations were cut off at the length limit; raise rollout.max_tokens or the agent's"]
