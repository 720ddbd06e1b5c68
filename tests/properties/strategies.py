"""Random batches and layouts for hypothesis: small ones drawn row by row, so that they shrink, larger ones by seed."""

from itertools import product
from random import Random
from typing import get_args

from hypothesis import strategies as st

from raggedright import Layout, Plan, Rows, make_plan
from raggedright.plan.layout import Align, Collate, LossAgg, OverLong

LOSS_AGGS: tuple[LossAgg, ...] = get_args(LossAgg)
Counts = tuple[int, int, int]  # prompt, response and loss tokens of a row
Sessions = list[list[list[Counts]]]  # by prompt, session, trajectory


def make_rows(prompts: Sessions, *, padding_every: int = 0) -> Rows:
    """Rows of nested lists, by prompt, session and trajectory; every so many of them flagged as padding."""
    records = [
        {"prompt": f"p{p}", "session": s, "trajectory": t, "prompt_tokens": a, "response_tokens": b, "loss_tokens": c}
        for p, sessions in enumerate(prompts)
        for s, trajectories in enumerate(sessions)
        for t, (a, b, c) in enumerate(trajectories)
    ]
    for i, record in enumerate(records, start=1):
        if padding_every and i % padding_every == 0:
            record["is_padding"] = True
    return Rows.from_records(records)


@st.composite
def counts(draw: st.DrawFn, longest: int = 60) -> Counts:
    response = draw(st.integers(0, longest))
    return draw(st.integers(0, longest)), response, draw(st.one_of(st.just(response), st.integers(0, response)))


def drawn_sessions() -> st.SearchStrategy[Sessions]:
    """A few prompts of 0-3 sessions, each of 0-3 rows."""
    return st.lists(st.lists(st.lists(counts(), max_size=3), max_size=3), max_size=5)


@st.composite
def seeded_sessions(draw: st.DrawFn) -> Sessions:
    """Up to some hundred rows of one shape: level, spread, near the budget, one giant, or without loss tokens."""
    random = Random(draw(st.integers(0, 10**6)))
    shape = draw(st.sampled_from(["equal", "uniform", "lognormal", "halves", "giant", "lossless"]))
    num_prompts, most_sessions = draw(st.sampled_from([1, 8, 20, 30])), draw(st.sampled_from([1, 4, 8]))
    most_rows = draw(st.sampled_from([1, 3]))
    sample = {
        "equal": lambda: 40,
        "uniform": lambda: random.randint(1, 200),
        "lognormal": lambda: min(400, int(random.lognormvariate(3.5, 1))),
        "halves": lambda: random.randint(60, 200),
        "giant": lambda: random.randint(1, 9),
        "lossless": lambda: random.randint(1, 80),
    }[shape]

    def row() -> Counts:
        response = sample()
        loss = 0 if shape == "lossless" and random.random() < 0.9 else random.choice((response, response // 2))
        return (random.randint(0, 3) if shape != "equal" else 4), response, loss

    prompts = [
        [[row() for _ in range(random.randint(0, most_rows))] for _ in range(random.randint(0, most_sessions))]
        for _ in range(num_prompts)
    ]
    if shape == "giant":
        prompts[0].append([(5, 2_000, 2_000)])
    return prompts


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    sessions = draw(st.one_of(drawn_sessions(), seeded_sessions()))
    return make_rows(sessions, padding_every=draw(st.sampled_from([0, 0, 0, 3])))


@st.composite
def layouts(draw: st.DrawFn, rows: Rows, align: Align | None = None) -> Layout:
    """Any layout that fits these rows; sizes stay small under lcm, where padding grows with them."""
    chosen: Align = align or draw(st.sampled_from(get_args(Align)))
    sizes = [1, 2, 3, 4] if chosen == "lcm" else [1, 2, 5, 11, 30]
    critic = draw(st.sampled_from([None, None, *sizes]))
    over_long: OverLong = draw(st.sampled_from(get_args(OverLong)))
    min_row_tokens = draw(st.sampled_from([2, 2, 8, 64]))
    rule, budget = draw(st.sampled_from(["micro_batch_tokens", "micro_batch_rows"])), draw(st.integers(1, 9))
    if rule == "micro_batch_tokens":
        longest = max(int(rows.tokens.max(initial=0)), min_row_tokens)
        least = longest if over_long == "error" else min_row_tokens
        budget = least + draw(st.one_of(st.just(0), st.integers(0, max(longest, 400))))
    linear, quadratic = draw(st.sampled_from([(47_000, 1), (1, 0), (0, 1), (8_192, 1)]))
    return Layout(
        dp_size=draw(st.one_of(st.integers(1, 4), st.integers(1, 64))),
        batch_size=draw(st.integers(1, 30)),
        mini_batch_size=draw(st.sampled_from(sizes)),
        rollout_n=draw(st.integers(1, 4)),
        critic_mini_batch_size=critic,
        actor_trains=critic is None or draw(st.booleans()),
        epochs=draw(st.sampled_from([1, 1, 2, 3])),
        align=chosen,
        loss_agg=draw(st.sampled_from(LOSS_AGGS)),
        loss_norm_tokens=draw(st.integers(1, 5_000)),
        micro_batch_tokens=budget if rule == "micro_batch_tokens" else None,
        micro_batch_rows=budget if rule == "micro_batch_rows" else None,
        collate=draw(st.sampled_from(get_args(Collate))),
        micro_batch_multiple=draw(st.sampled_from([1, 1, 2, 4])),
        min_row_tokens=min_row_tokens,
        over_long=over_long,
        cost_linear=linear,
        cost_quadratic=quadratic,
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def plans(draw: st.DrawFn, align: Align | None = None) -> Plan:
    rows = draw(batches())
    return make_plan(rows, draw(layouts(rows, align)))


ODD_BATCHES: dict[str, Sessions] = {
    "zero rows": [],
    "sessions without rows": [[[], []], [[]]],
    "one row": [[[(3, 5, 5)]]],
    "one empty row": [[[(0, 0, 0)]]],
    "fewer rows than ranks": [[[(3, 5, 5)], [(2, 7, 7)]], [[(1, 1, 1)]]],
    "one giant row": [[[(2, 3, 3)] for _ in range(4)] for _ in range(8)] + [[[(100, 900, 900)]]],
    "all rows equal": [[[(4, 12, 12)] for _ in range(4)] for _ in range(10)],
    "n differs by prompt": [[[(p, 9 + s, 5)] * (s % 3) for s in range(p)] for p in range(8)],
    "prompts without loss tokens": [[[(2, 6, 6 * (p % 2))] for _ in range(4)] for p in range(6)],
    "no loss token at all": [[[(2, 6, 0)] for _ in range(4)] for _ in range(6)],
}


def odd_layouts() -> list[Layout]:
    """Every align, collation, rule and role over a few rank counts, for the odd batches."""
    grid = product(get_args(Align), get_args(Collate), (True, False), (1, 8, 64), (None, 1))
    return [
        Layout(
            dp_size=dp_size,
            batch_size=6,
            mini_batch_size=2,
            rollout_n=4,
            critic_mini_batch_size=critic,
            align=align,
            collate=collate,
            micro_batch_tokens=1_000 if by_tokens else None,
            micro_batch_rows=None if by_tokens else 3,
            micro_batch_multiple=1 + i % 2,
            loss_agg=LOSS_AGGS[i // 2 % len(LOSS_AGGS)],
            loss_norm_tokens=100,
        )
        for i, (align, collate, by_tokens, dp_size, critic) in enumerate(grid)
    ]
