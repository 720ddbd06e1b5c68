"""Slow and obvious: the packings and the weights that the planner's fast ones must agree with."""

import math
from collections import Counter
from fractions import Fraction

from raggedright import Layout, Rows


def naive_first_fit_decreasing(sizes: list[int], capacity: int) -> list[int]:
    """Bin of each size, the sizes in descending order: the first bin with room, looked for one by one."""
    room: list[int] = []
    bins = []
    for size in sizes:
        b = next((b for b, left in enumerate(room) if left >= size), len(room))
        if b == len(room):
            room.append(capacity)
        room[b] -= size
        bins.append(b)
    return bins


def naive_padded_count(lengths: list[int], capacity: int) -> int:
    """Micro-batches of neighbours in descending length, each as full as rows x longest row allows."""
    count, held, longest = 0, 0, 0
    for length in lengths:
        if held == 0 or (held + 1) * longest > capacity:
            count, held, longest = count + 1, 0, length
        held += 1
    return count


def fewest_bins(lengths: list[int], layout: Layout) -> int:
    """Micro-batches that hold rows of these lengths: by first-fit-decreasing, or the least of padded ones."""
    if layout.micro_batch_rows is not None:
        return math.ceil(len(lengths) / layout.micro_batch_rows)
    budget = layout.micro_batch_tokens
    assert budget is not None
    clipped = sorted((min(length, budget) for length in lengths), reverse=True)
    if layout.collate == "padded":
        return naive_padded_count(clipped, budget)
    return len(set(naive_first_fit_decreasing(clipped, budget)))


def denominators(rows: Rows, step: list[int], loss_agg: str, norm: int | None) -> dict[int, int]:
    """1 / the weight of each row of a step that has loss tokens."""
    loss = {i: int(rows.loss_tokens[i]) for i in step if rows.loss_tokens[i] > 0 and not rows.is_padding[i]}
    session = {i: (str(rows.prompt[i]), int(rows.session[i])) for i in loss}
    of_session: Counter[object] = Counter()
    of_prompt: Counter[object] = Counter()
    for i, tokens in loss.items():
        of_session[session[i]] += tokens
        of_prompt[session[i][0]] += tokens
    match loss_agg:
        case "token-mean":
            return dict.fromkeys(loss, sum(loss.values()))
        case "seq-mean-token-mean":
            return {i: len(loss) * tokens for i, tokens in loss.items()}
        case "seq-mean-token-sum":
            return dict.fromkeys(loss, len(loss))
        case "seq-mean-token-sum-norm":
            assert norm is not None
            return dict.fromkeys(loss, len(loss) * norm)
        case "session-mean":
            return {i: len(of_session) * of_session[session[i]] for i in loss}
        case "prompt-mean":
            return {i: len(of_prompt) * of_prompt[session[i][0]] for i in loss}
        case _:
            raise AssertionError(loss_agg)


def declared_sum(losses: list[int], loss_agg: str, norm: int | None) -> Fraction:
    """What weight x loss tokens adds up to over a step: one mean, or a mean of sums."""
    if loss_agg == "seq-mean-token-sum":
        return Fraction(sum(losses), len(losses))
    if loss_agg == "seq-mean-token-sum-norm":
        assert norm is not None
        return Fraction(sum(losses), len(losses) * norm)
    return Fraction(1)
