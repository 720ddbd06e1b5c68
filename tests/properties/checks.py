"""Every promise of a plan, recomputed naively from its public arrays with none of the planner's code."""

import math
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np

from properties.naive import declared_sum, denominators, fewest_bins
from raggedright import Layout, Plan, Rows, Step

Batch = tuple[int, int, list[int]]  # dp_rank, slot, positions


def micro_batches(step: Step) -> list[Batch]:
    return [
        (dp_rank, slot, step.micro_batch(dp_rank, slot).tolist())
        for dp_rank in range(step.dp_size)
        for slot in range(step.num_slots)
    ]


def length_of(plan: Plan, position: int) -> int:
    rows = plan.rows
    tokens = int(rows.prompt_tokens[position] + rows.response_tokens[position]) if position < len(rows) else 0
    return max(tokens, plan.layout.min_row_tokens)


def rows_to_plan(rows: Rows, layout: Layout) -> set[int]:
    """Positions of the rows that must be trained: real, and within the budget where over-long rows are dropped."""
    budget = layout.micro_batch_tokens if layout.over_long == "drop" else None
    lengths = np.maximum(rows.prompt_tokens + rows.response_tokens, layout.min_row_tokens)
    fits = [budget is None or length <= budget for length in lengths.tolist()]
    return {i for i in range(len(rows)) if fits[i] and not rows.is_padding[i]}


def passes(plan: Plan) -> list[tuple[str, int, list[Step]]]:
    """The steps of each role and epoch; the forward pass is one of one step."""
    return [
        (role, epoch, [step for step in steps if step.epoch == epoch])
        for role, steps in plan.roles.items()
        for epoch in range(1 if role == "forward" else plan.layout.epochs)
    ]


def real_rows(plan: Plan, step: Step) -> list[int]:
    return [i for i in step.row.tolist() if i < len(plan.rows)]


def lengths_by_rank(plan: Plan, step: Step) -> list[list[int]]:
    lengths: list[list[int]] = [[] for _ in range(step.dp_size)]
    for dp_rank, _, batch in micro_batches(step):
        lengths[dp_rank] += [length_of(plan, i) for i in batch]
    return lengths


def check_conservation(plan: Plan) -> None:
    to_plan = rows_to_plan(plan.rows, plan.layout)
    for role, epoch, steps in passes(plan):
        held = Counter(i for step in steps for _, _, batch in micro_batches(step) for i in batch)
        assert max(held.values(), default=1) == 1, f"{role}, epoch {epoch}: a row, or a padding row, is there twice"
        assert {i for i in held if i < len(plan.rows)} == to_plan, f"{role}, epoch {epoch}"
        last_padding = len(plan.rows) + plan.num_padding_rows
        assert all(i < last_padding for i in held), f"{role}, epoch {epoch}"
    dropped = {i for i in range(len(plan.rows)) if not plan.rows.is_padding[i]} - to_plan
    assert sorted(plan.dropped.tolist()) == sorted(dropped)


def check_equal_counts(plan: Plan) -> None:
    """Arrays hang together, counts are a multiple of what is asked, and only lcm may leave a micro-batch empty."""
    for _, _, steps in passes(plan):
        for step in steps:
            assert step.dp_size == plan.layout.dp_size
            assert step.num_slots % plan.layout.micro_batch_multiple == 0
            assert len(step.bounds) == step.dp_size * step.num_slots + 1
            assert (step.bounds[0], step.bounds[-1]) == (0, len(step.row))
            assert len(step.weight) == len(step.row)
            rows_of_rank = Counter(dp_rank for dp_rank, _, batch in micro_batches(step) for _ in batch)
            for dp_rank, _, batch in micro_batches(step):
                too_few = plan.layout.align == "lcm" and rows_of_rank[dp_rank] < step.num_slots
                assert batch or too_few, f"rank {dp_rank} has an empty micro-batch and {rows_of_rank[dp_rank]} rows"


def check_cap(plan: Plan) -> None:
    layout = plan.layout
    for _, _, steps in passes(plan):
        for step in steps:
            for _, _, batch in micro_batches(step):
                lengths = [length_of(plan, i) for i in batch]
                alone = layout.over_long == "alone" and len(batch) == 1
                if layout.micro_batch_rows is not None:
                    assert len(batch) <= layout.micro_batch_rows
                elif layout.micro_batch_tokens is not None and not alone:
                    tokens = sum(lengths) if layout.collate != "padded" else len(batch) * max(lengths, default=0)
                    assert tokens <= layout.micro_batch_tokens


def check_weights(plan: Plan) -> None:
    rows, layout = plan.rows, plan.layout
    for role in plan.trained_roles:
        for step in plan.steps(role):
            one_over = denominators(rows, real_rows(plan, step), layout.loss_agg, layout.loss_norm_tokens)
            expected = [float(Fraction(1, one_over[i])) if i in one_over else 0.0 for i in step.row.tolist()]
            assert step.weight.tolist() == expected
            assert step.skipped == (not one_over)
            if one_over:
                losses = [int(rows.loss_tokens[i]) for i in one_over]
                declared = declared_sum(losses, layout.loss_agg, layout.loss_norm_tokens)
                assert sum(Fraction(loss, one_over[i]) for i, loss in zip(one_over, losses, strict=True)) == declared
                of_row = np.append(rows.loss_tokens, np.zeros(plan.num_padding_rows, dtype=np.int64))[step.row]
                assert math.isclose(math.fsum(step.weight * of_row), declared, rel_tol=1e-12)


def check_forward_ranks(plan: Plan) -> None:
    """A row's log-probs are computed on the rank that trains it in the first epoch."""
    first = next(iter(plan.roles))
    trained = {
        i: dp_rank
        for step in plan.steps(first)
        if step.epoch == 0
        for dp_rank, _, batch in micro_batches(step)
        for i in batch
    }
    (forward,) = plan.steps("forward")
    for dp_rank, _, batch in micro_batches(forward):
        assert all(trained[i] == dp_rank for i in batch if i < len(plan.rows))
    assert not forward.weight.any()
    assert not forward.skipped


def round_up(count: int, multiple: int) -> int:
    return multiple * math.ceil(count / multiple)


def check_steps(plan: Plan) -> None:
    """What align steps adds: the number of steps, whole prompts spread evenly, the least padding."""
    layout = plan.layout
    sizes = {"actor": layout.mini_batch_size, "critic": layout.critic_mini_batch_size}
    to_plan = rows_to_plan(plan.rows, layout)
    for role in plan.trained_roles:
        mini_batch_size = sizes[role]
        assert mini_batch_size is not None
        per_epoch = math.ceil(layout.batch_size / mini_batch_size)
        assert [step.epoch for step in plan.steps(role)] == [e for e in range(layout.epochs) for _ in range(per_epoch)]
    for role, _, steps in passes(plan):
        if role == "forward":
            continue
        step_of_prompt: dict[str, set[int]] = defaultdict(set)
        for number, step in enumerate(steps):
            for i in real_rows(plan, step):
                step_of_prompt[plan.rows.prompt[i]].add(number)
            lengths = [length_of(plan, i) for i in real_rows(plan, step)]
            padding = len(step.row) - len(lengths)
            enough = round_up(fewest_bins(lengths, layout), layout.dp_size * layout.micro_batch_multiple)
            assert step.num_micro_batches <= enough
            assert padding == max(0, step.num_micro_batches - len(lengths))
            assert lengths or not padding, "padding alone"
        assert all(len(numbers) == 1 for numbers in step_of_prompt.values()), "a prompt in two steps"
        prompts = Counter(number for numbers in step_of_prompt.values() for number in numbers)
        held = [prompts[number] for number in range(len(steps))]
        assert max(held) - min(held) <= 1
        assert sum(held) == len({plan.rows.prompt[i] for i in to_plan})


def check_lcm(plan: Plan) -> None:
    """What align lcm adds: the least multiple, equal mini-batches, real rows and ranks even."""
    layout = plan.layout
    sizes = {"actor": layout.mini_batch_size, "critic": layout.critic_mini_batch_size}
    parts = [layout.dp_size, *((sizes[role] or 0) * layout.rollout_n for role in plan.trained_roles)]
    multiple = math.lcm(*parts)
    assert plan.multiple == multiple
    num_rows = len(rows_to_plan(plan.rows, layout))
    assert plan.num_padding_rows == -num_rows % multiple
    for role, _, steps in passes(plan):
        size = sizes.get(role)
        rows_per_step = num_rows + plan.num_padding_rows if size is None else size * layout.rollout_n
        assert sum(len(step.row) for step in steps) == num_rows + plan.num_padding_rows
        assert all(len(step.row) == rows_per_step for step in steps)
        real = [len(real_rows(plan, step)) for step in steps]
        assert max(real, default=0) - min(real, default=0) <= 1
        whole = Counter(dict.fromkeys(range(layout.dp_size), 0))
        for step in steps:
            held = Counter(dict.fromkeys(range(layout.dp_size), 0))
            held.update(dp_rank for dp_rank, _, batch in micro_batches(step) for _ in batch)
            assert max(held.values()) - min(held.values()) <= 1
            whole.update(held)
            if role != "forward":
                bins = [fewest_bins(lengths, layout) for lengths in lengths_by_rank(plan, step)]
                assert step.num_slots <= round_up(max(bins), layout.micro_batch_multiple)
        assert len(set(whole.values())) == 1


def check_plan(plan: Plan) -> None:
    check_conservation(plan)
    check_equal_counts(plan)
    check_cap(plan)
    check_weights(plan)
    check_forward_ranks(plan)
    if plan.layout.align == "steps":
        check_steps(plan)
        assert plan.multiple is None
    else:
        check_lcm(plan)


def by_key(plan: Plan) -> dict[str, list[object]]:
    """The whole assignment with keys for positions, to compare plans of rows in another order."""
    keys = [*plan.rows.key.tolist(), *(f"padding {i}" for i in range(plan.num_padding_rows))]
    return {
        role: [
            (
                (step.epoch, step.num_slots, step.skipped),
                (step.bounds.tolist(), step.weight.tolist()),
                [keys[i] for i in step.row.tolist()],
            )
            for step in steps
        ]
        for role, steps in plan.roles.items()
    }
