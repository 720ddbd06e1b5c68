"""Rows with a shared prefix stay together: in the line, under any capacity, and in the plans of trees."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.checks import check_plan, micro_batches
from raggedright import Layout, Plan, Rows, Step, make_plan, measure_imbalance
from raggedright.arrays import Ints, sum_by
from raggedright.plan.layout import Align, Collate
from raggedright.plan.packing import count_bins, first_fit_decreasing
from raggedright.plan.prefix_groups import PrefixGroups, costs_in_trees, keep_together

Line = list[tuple[int, int, int]]  # number of its group, tokens that the group shares, other tokens


def sorted_rows(rows: Line) -> tuple[Ints, Ints, Ints]:
    """PrefixGroups's numbers, what they share and the rows' sizes, in descending size; rows of a number share alike."""
    number, shared, other = (np.array(column) for column in zip(*rows, strict=True))
    shared = np.array([shared[number == n].min() for n in number.tolist()])
    order = np.argsort(-(shared + other), kind="stable")
    return number[order], shared[order], (shared + other)[order]


LINES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 30)), min_size=3, max_size=60)


@given(LINES, st.integers(2, 9), st.integers(0, 60))
def test_bins_are_full_enough_not_too_full_and_none_is_empty(rows: Line, num_bins: int, more: int) -> None:
    number, shared, sizes = sorted_rows(rows)
    capacity = int(sizes[0]) + more
    num_bins = max(num_bins, count_bins(first_fit_decreasing(sizes, capacity)))
    if len(sizes) > num_bins:
        bins = keep_together(sizes, sizes, shared, number, num_bins=num_bins, capacity=capacity)
        if bins is not None:
            assert sorted(set(bins.tolist())) == list(range(num_bins))
            assert sum_by(bins, sizes, num_bins).max() <= capacity


@given(LINES, st.integers(2, 9))
def test_a_cut_tears_one_at_most_where_there_is_room(rows: Line, num_bins: int) -> None:
    number, shared, sizes = sorted_rows(rows)
    if len(sizes) > num_bins:
        bins = keep_together(sizes, sizes, shared, number, num_bins=num_bins, capacity=int(sizes.sum()))
        assert bins is not None
        pairs = set(zip(number.tolist(), bins.tolist(), strict=True))
        assert len(pairs) - len(set(number.tolist())) <= num_bins - 1


@given(LINES, st.randoms(use_true_random=False))
def test_in_a_bin_the_first_row_of_a_group_pays_for_all(rows: Line, random) -> None:
    number, shared, sizes = sorted_rows(rows)
    bins = np.array([random.randrange(4) for _ in rows])
    costs = np.zeros(4, dtype=np.int64)
    for b in range(4):
        for n in set(number[bins == b].tolist()):
            of_group = (bins == b) & (number == n)
            costs[b] += shared[of_group][0] + (sizes - shared)[of_group].sum()
    assert sum_by(bins, costs_in_trees(bins, sizes, shared, number), 4).tolist() == costs.tolist()


def test_a_group_has_one_prompt_and_prompts_of_equal_length() -> None:
    rows = Rows.from_columns(
        prompt=[*"abaab"],
        session=[*range(5)],
        trajectory=[0] * 5,
        prompt_tokens=[4, 4, 4, 9, 4],
        response_tokens=[1] * 5,
    )
    groups = PrefixGroups.of(rows).take(np.array([3, 0, 1, 2, 4, 5, 99]))
    assert groups.number.tolist() == [1, 0, 2, 0, 2, 3, 3]
    assert groups.shared.tolist() == [9, 4, 4, 4, 4, 0, 0]


def sessions_of_prompts(num_prompts: int, sessions: int, *, prompt: int = 400, reply: int = 200, seed: int = 0) -> Rows:
    """Sessions of one trajectory each, whose prompts are about so long and whose replies are at most so long."""
    random = np.random.default_rng(seed)
    num_rows = num_prompts * sessions
    return Rows.from_columns(
        prompt=[f"p{i // sessions:03}" for i in range(num_rows)],
        session=np.arange(num_rows) % sessions,
        trajectory=np.zeros(num_rows, dtype=np.int64),
        prompt_tokens=np.repeat(random.integers(prompt // 2, prompt * 3 // 2, num_prompts), sessions),
        response_tokens=random.integers(1, reply + 1, num_rows),
    )


ORIGIN = Layout(dp_size=2, batch_size=45, mini_batch_size=15, rollout_n=8, micro_batch_tokens=2**20, collate="tree")


def nodes_of(plan: Plan, step: Step) -> Ints:
    """What the trees of each rank compute where sessions of a prompt share it, counted plainly."""
    nodes = np.zeros(step.dp_size, dtype=np.int64)
    for dp_rank, _, batch in micro_batches(step):
        prompts: dict[str, int] = {}
        for i in batch:
            if i < len(plan.rows):
                nodes[dp_rank] += plan.rows.response_tokens[i]
                prompts[plan.rows.prompt[i]] = int(plan.rows.prompt_tokens[i])
        nodes[dp_rank] += sum(prompts.values())
    return nodes


def torn(plan: Plan, step: Step) -> int:
    """How many micro-batches more than one the prompts of a step are in."""
    found: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for dp_rank, slot, batch in micro_batches(step):
        for i in batch:
            if i < len(plan.rows):
                found[plan.rows.prompt[i]].add((dp_rank, slot))
    return sum(len(places) - 1 for places in found.values())


def planned(rows: Rows, layout: Layout) -> Plan:
    plan = make_plan(rows, layout)
    check_plan(plan)
    return plan


@pytest.mark.parametrize("dp_size", [1, 2, 4, 15])
def test_ranks_share_the_work_of_a_tree_and_repeat_next_to_nothing(dp_size: int) -> None:
    """By length alone each of two ranks computed nearly every prompt of a step again."""
    rows = sessions_of_prompts(45, 8)
    alone, plan, packed = (
        planned(rows, layout)
        for layout in (
            replace(ORIGIN, dp_size=1),
            replace(ORIGIN, dp_size=dp_size),
            replace(ORIGIN, dp_size=dp_size, collate="packed"),
        )
    )
    for whole, step, by_length in zip(*(p.steps("actor") for p in (alone, plan, packed)), strict=True):
        assert torn(plan, step) <= dp_size - 1
        assert nodes_of(plan, step).max() * dp_size <= 1.25 * nodes_of(alone, whole).sum()
        assert dp_size == 1 or nodes_of(plan, step).max() < 0.85 * nodes_of(packed, by_length).max()
    assert measure_imbalance(plan).rank < (1.06 if dp_size <= 4 else 1.2)


@pytest.mark.parametrize("budget", [2_000, 4_000, 20_000])
@pytest.mark.parametrize("dp_size", [1, 2, 8])
def test_micro_batches_are_as_many_as_a_packs_and_trees_have_fewer_nodes(dp_size: int, budget: int) -> None:
    """Fewer in all: where a step's rows fill its micro-batches to the brim, they stay where a pack has them."""
    rows = sessions_of_prompts(45, 8)
    layout = replace(ORIGIN, dp_size=dp_size, micro_batch_tokens=budget)
    plans = planned(rows, layout), planned(rows, replace(layout, collate="packed"))
    tree, packed = ([plan.steps("actor"), plan.steps("forward")] for plan in plans)
    assert [step.num_slots for step in tree[0]] == [step.num_slots for step in packed[0]]
    assert plans[0].num_padding_rows == plans[1].num_padding_rows
    for mine, theirs in zip(tree, packed, strict=True):
        nodes = [[nodes_of(plans[0], a).max(), nodes_of(plans[1], b).max()] for a, b in zip(mine, theirs, strict=True)]
        assert all(a <= b for a, b in nodes)
        assert sum(a for a, _ in nodes) < 0.85 * sum(b for _, b in nodes)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 9))
def test_rows_of_a_prompt_are_in_one_micro_batch_but_for_one_prompt_a_cut(
    num_prompts: int, sessions: int, dp_size: int, seed: int
) -> None:
    rows = sessions_of_prompts(num_prompts, sessions, prompt=100, reply=3, seed=seed)
    plan = planned(rows, replace(ORIGIN, dp_size=dp_size, mini_batch_size=45))
    (step,) = plan.steps("actor")
    assert torn(plan, step) <= step.num_micro_batches - 1


def test_a_giant_row_is_not_waited_for_by_rows_that_could_have_been_next_to_it() -> None:
    """Runs would halve the rest over and over; then rows are spread by length, as in a pack."""
    rows = sessions_of_prompts(8, 4, prompt=4, reply=20)
    giant = {"prompt": "z", "session": 0, "trajectory": 0, "prompt_tokens": 4, "response_tokens": 900}
    rows = Rows.from_records([*rows.to_records(), giant])
    layout = replace(ORIGIN, mini_batch_size=45, micro_batch_tokens=1_000, micro_batch_multiple=4)
    tree, packed = planned(rows, layout), planned(rows, replace(layout, collate="packed"))
    assert nodes_of(tree, tree.steps("actor")[0]).max() <= nodes_of(packed, packed.steps("actor")[0]).max()


@pytest.mark.parametrize("collate", ["packed", "padded"])
def test_prompts_change_no_other_collation(collate: Collate) -> None:
    rows = sessions_of_prompts(12, 4)
    layout = replace(ORIGIN, collate=collate, micro_batch_tokens=3_000, mini_batch_size=45)
    moved = rows.prompt_tokens // 2
    columns = {name: getattr(rows, name) for name in ("prompt", "session", "trajectory")}
    other = Rows.from_columns(**columns, prompt_tokens=moved, response_tokens=rows.tokens - moved)
    a, b = (planned(r, layout).steps("actor")[0] for r in (rows, other))
    assert (a.row.tolist(), a.bounds.tolist()) == (b.row.tolist(), b.bounds.tolist())


@pytest.mark.parametrize("align", ["steps", "lcm"])
def test_imbalance_is_that_of_trees(align: Align) -> None:
    rows = sessions_of_prompts(12, 4)
    layout = replace(ORIGIN, align=align, mini_batch_size=45, cost_linear=1, cost_quadratic=0, micro_batch_tokens=5_000)
    plan = planned(rows, layout)
    (step,) = plan.steps("actor")
    nodes = nodes_of(plan, step)
    for dp_rank, _, batch in micro_batches(step):
        nodes[dp_rank] += 2 * sum(i >= len(rows) for i in batch)  # a padding row's tokens
    assert measure_imbalance(plan).rank == pytest.approx(nodes.max() * 2 / nodes.sum(), rel=1e-12)
