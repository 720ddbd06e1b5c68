"""Write docs/scale.md: the cost of a round as ranks and rows grow, computed from constants that are measured here.

    make scale-page                                  # two minutes; writes docs/scale.md

Plans, digests and ledgers of every size are made. Session tables are created, serialised and read back for
`GATHERED_ROWS` rows, and the costs are multiplied, because each of them is linear in rows. The communication between
thousands of ranks is computed from an assumed link speed, and the page says so.
"""

import gc
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object  # what all_gather_object sends

from raggedright import Layout, Rows, close_ledger, make_plan
from raggedright.plan.assign import lcm_multiple
from raggedright.sessions import Session, SessionKey, SessionTable, Trajectory
from raggedright.store.sqlite import SqliteStore
from raggedright.train.passes import TokenValues

ROOT = Path(__file__).parents[1]
SIZES, DP_SIZES = (1_000, 16_000, 128_000, 1_000_000), (8, 64, 512, 4_096)
GATHERED_ROWS, STORED_ROWS, GATHERING = 64_000, 2_000, 8  # ranks whose tables are gathered
SESSIONS, MEAN_ROWS, NUM_STEPS, CAP = 8, 2, 4, 16_384
PROMPT_TOKENS, MEAN_TOKENS = 300, 2_000
MAX_SECONDS = 4  # of a plan of a million rows
LINK = 10e9  # bytes per second between ranks, assumed


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Seconds that every rank needs for a plan, and the padding rows of the plan."""

    num_rows: int
    dp_size: int
    plan: float
    digest: float
    ledger: float
    padding: int
    padding_lcm: int


@dataclass(frozen=True, slots=True)
class GatherCost:
    """Cost per row between the end of its session and the planner."""

    bytes_sent: float
    bytes_held: float
    seconds_listed: float
    seconds_packed: float
    seconds_read: float
    seconds_rows: float


def synthetic_rows(num_rows: int, seed: int = 0) -> Rows:
    """About `num_rows` rows: 8 sessions per prompt, one to three rows per session, lognormal lengths."""
    rng = np.random.default_rng(seed)
    num_prompts = max(1, num_rows // (SESSIONS * MEAN_ROWS))
    of_session = rng.integers(1, 2 * MEAN_ROWS, num_prompts * SESSIONS)
    session = np.repeat(np.arange(len(of_session)), of_session)
    trajectory = np.arange(len(session)) - np.repeat(np.cumsum(of_session) - of_session, of_session)
    lengths = rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, len(session)).clip(PROMPT_TOKENS + 2, CAP).astype(np.int64)
    return Rows.from_columns(
        prompt=[f"prompt-{each:06d}" for each in (session // SESSIONS).tolist()],
        session=session % SESSIONS,
        trajectory=trajectory,
        prompt_tokens=np.full(len(session), PROMPT_TOKENS),
        response_tokens=lengths - PROMPT_TOKENS,
    )


def seconds_of(call: Callable[[], object]) -> float:
    """CPU seconds of one call, which other load on the machine hardly changes; garbage is collected before."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def plan_cost(rows: Rows, dp_size: int) -> PlanCost:
    """The plan of a round, as every rank of a run makes it."""
    prompts = rows.num_prompts
    layout = Layout(
        dp_size=dp_size,
        batch_size=prompts,
        mini_batch_size=-(-prompts // NUM_STEPS),
        rollout_n=SESSIONS,
        micro_batch_tokens=CAP,
    )
    plans = []
    seconds = seconds_of(lambda: plans.append(make_plan(rows, layout)))
    plan = plans[0]
    multiple = lcm_multiple(layout)
    return PlanCost(
        len(rows), dp_size, seconds, seconds_of(plan.digest), seconds_of(lambda: close_ledger(plan)),
        plan.num_padding_rows, -len(rows) % multiple,
    )  # fmt: skip


def million_costs(rows: Rows) -> dict[str, float]:
    """CPU seconds of a plan with a critic in 16 steps at dp 1,024, by alignment and collation."""
    size = rows.num_prompts // 16 // 128 * 128  # rows of a mini-batch are a multiple of dp, so the lcm is small
    layout = Layout(
        dp_size=1_024, batch_size=16 * size, mini_batch_size=size, critic_mini_batch_size=size, rollout_n=SESSIONS,
        micro_batch_tokens=CAP,
    )  # fmt: skip
    layouts = {f"steps, {collate}": replace(layout, collate=collate) for collate in ("packed", "padded", "tree")}
    layouts["lcm, packed"] = replace(layout, align="lcm")
    return {name: seconds_of(partial(make_plan, rows, each)) for name, each in layouts.items()}


def gather_cost() -> GatherCost:
    """Tables of `GATHERED_ROWS` rows, created by `GATHERING` ranks and serialised as `World.gather` does it."""
    rows = synthetic_rows(GATHERED_ROWS)
    new = [*_sessions(rows, lambda size: np.zeros(size, dtype=np.int64))]
    shares: list[SessionTable] = []
    listed = seconds_of(lambda: shares.extend(SessionTable.of(0, new[rank::GATHERING]) for rank in range(GATHERING)))
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    packed = seconds_of(lambda: sent.extend(_object_to_tensor(each, torch.device("cpu"), None) for each in shares))
    size = sum(int(each) for _, each in sent)
    gc.collect()
    tracemalloc.start()
    copy = SessionTable.join([_tensor_to_object(*each, None) for each in sent])
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    read = seconds_of(lambda: SessionTable.join([_tensor_to_object(*each, None) for each in sent]))
    made = seconds_of(lambda: copy.rows)
    return GatherCost(*(each / len(rows) for each in (size, held, listed, packed, read, made)))


def stored_bytes(folder: Path) -> tuple[float, float]:
    """Bytes and tokens per row in an SQLite file, with the fields that the built-in agents write."""
    rows = synthetic_rows(STORED_ROWS)
    rng = np.random.default_rng(0)
    with SqliteStore(folder / "stored.db") as store:
        store.append([*_sessions(rows, lambda size: rng.integers(0, 150_000, size))])
    return (folder / "stored.db").stat().st_size / len(rows), float(rows.tokens.mean())


def _sessions(rows: Rows, ids: Callable[[int], np.ndarray]) -> Iterator[Session]:
    """Sessions with these rows, with scores and metrics."""
    prompt, response = rows.prompt_tokens.tolist(), rows.response_tokens.tolist()
    starts = [*np.flatnonzero(np.diff(rows.session_index, prepend=-1)).tolist(), len(rows)]
    for start, end in pairwise(starts):
        trajectories = [
            Trajectory(
                input_ids=ids(prompt[i] + response[i]),
                response_mask=np.ones(response[i], dtype=np.int64),
                rollout_log_probs=np.zeros(response[i], dtype=np.float32),
                finish_reason="stop",
                weight_version=0,
            )
            for i in range(start, end)
        ]
        key = SessionKey(0, rows.prompt[start], int(rows.session[start]))
        yield Session(key=key, score=0.5, metrics={"exact_match": 1.0}, trajectories=trajectories)


def table_bytes(rows: Rows) -> float:
    """Bytes per response token in the sum that gives every rank the log-probs and masks of all rows."""
    table = TokenValues(rows, ("response_mask", "old_log_probs"), torch.float32)
    return table._table.nbytes / int(rows.response_tokens.sum())


def page(
    plans: list[PlanCost],
    million: dict[str, float],
    gather: GatherCost,
    row_bytes: float,
    tokens: float,
    response: float,
    table: float,
) -> str:
    """The page: constants, the costs that follow from them, and the first limits."""
    largest = [max((plan for plan in plans if plan.num_rows == n), key=lambda plan: plan.dp_size) for n in _rows(plans)]
    by_row = (
        gather.seconds_read
        + gather.seconds_rows
        + sum(getattr(largest[-1], part) / largest[-1].num_rows for part in ("plan", "digest", "ledger"))
    )
    limits = sorted(
        (
            (8e9 / (table * response), *TABLE),
            (4e9 / gather.bytes_held, *HELD),
            (30 / by_row, *SECONDS),
        )
    )
    return TEMPLATE.format(
        date=date.today().isoformat(),
        tokens=f"{tokens:,.0f}",
        response=f"{response:,.0f}",
        row_kb=f"{row_bytes / 1e3:.1f}",
        sent=f"{gather.bytes_sent:,.0f}",
        held=f"{gather.bytes_held:,.0f}",
        listed=_us(gather.seconds_listed),
        packed=_us(gather.seconds_packed),
        read=_us(gather.seconds_read),
        made=_us(gather.seconds_rows),
        table=f"{table:.0f}",
        growth="\n".join(_growth(plan, gather, row_bytes, response, table) for plan in largest),
        plan_grid=_grid(plans, lambda plan: f"{plan.plan:.2g}"),
        limit=MAX_SECONDS,
        million="\n".join(f"| {name} | {s:.1f} | {s / MAX_SECONDS:.0%} |" for name, s in million.items()),
        padding_grid=_grid(plans, lambda plan: f"{plan.padding:,} / {plan.padding_lcm:,}"),
        dps=" | ".join(f"dp {dp:,}" for dp in DP_SIZES),
        rule=" | ".join("---" for _ in DP_SIZES),
        limits="\n".join(f"| {_round(rows)} | {what} | {where} | {do} |" for rows, what, where, do in limits),
        traffic="\n".join(_traffic(n, row_bytes) for n in _rows(plans)),
        link=f"{LINK / 1e9:.0f}",
    )


TABLE = (
    "log-probs and masks of all rows on every rank: 8 GB",
    "`train/passes.py`",
    "a smaller `train.batch_size` and more rounds; your own loop only has to exchange scores, not tokens (GRPO, RLOO)",
)
HELD = ("the session table: 4 GB per rank", "`train/train_round.py`", "the same")
SECONDS = (
    "reading the session table, plan, digest, ledger: 30 s on every rank",
    "`train/train_round.py`",
    "plan on one rank and send each rank its part; the plan is a pure function, so only the digest must agree",
)


def _rows(plans: list[PlanCost]) -> list[int]:
    return sorted({plan.num_rows for plan in plans})


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _round(rows: float) -> str:
    """Round down to two significant digits."""
    digits = 10 ** (len(str(int(rows))) - 2)
    return f"{int(rows) // digits * digits:,}"


def _growth(plan: PlanCost, gather: GatherCost, row_bytes: float, response: float, table: float) -> str:
    n = plan.num_rows
    seconds = [n * gather.seconds_read, n * gather.seconds_rows, plan.plan, plan.digest, plan.ledger]
    sizes = (f"{n * gather.bytes_sent / 1e6:,.1f}", f"{n * gather.bytes_held / 1e9:.2f}")
    shared = n * response * table
    cells = (*sizes, *(f"{each:.2f}" for each in (*seconds, shared / 1e9, 2 * shared / LINK)))
    return f"| {n:,} | {' | '.join(cells)} |"


def _grid(plans: list[PlanCost], cell: Callable[[PlanCost], str]) -> str:
    return "\n".join(
        f"| {n:,} | {' | '.join(cell(plan) for plan in plans if plan.num_rows == n)} |" for n in _rows(plans)
    )


def _traffic(n: int, row_bytes: float) -> str:
    shares = " | ".join(f"{n * row_bytes / dp / 1e6:,.1f}" for dp in DP_SIZES)
    return f"| {n:,} | {n * row_bytes / 1e9:.2f} | {shares} |"


TEMPLATE = """\
# Scale

This page shows what a round costs as the number of rows and ranks grows. `make scale-page` measures the constants and
writes this page. It was written on {date} on two shared cores.

Plans of every size on this page were made. Bytes and CPU seconds per row were measured with 64,000 rows and multiplied.
The links between ranks are assumed to have {link} GB/s, because such links were not available. The rows: 8 sessions per
prompt, 1 to 3 rows per session, {tokens} tokens per row on average ({response} of them response tokens), 16,384 tokens
per micro-batch, four optimizer steps per round.

## Constants

| per row | |
| --- | --- |
| size in the store: an SQLite file with the fields that agents write | {row_kb} KB |
| size in the session table: as a rank receives it, as it is in memory | {sent}, {held} bytes |
| time to create, then serialise the session table, on the rank of the session | {listed} + {packed} microseconds |
| time to read and join the tables and then create `Rows`, on every rank | {read} + {made} microseconds |
| size in the all-reduce of log-probs and masks | {table} bytes per response token; 4 more with a reference |

## Per rank and round

The table is for dp 4,096; with fewer ranks only the time of the plan differs (see below). Times are CPU seconds of one
core. `sessions` is the session table as received, `memory` the same table in memory, `tokens` the table of per-token
values, and `all-reduce` the time to sum the latter at the assumed link speed.

| rows | sessions, MB | memory, GB | read, s | Rows, s | plan, s | digest, s | ledger, s | tokens, GB | all-reduce, s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{growth}

## The plan

CPU seconds of `make_plan` for actor and forward pass:

| rows | {dps} |
| --- | {rule} |
{plan_grid}

CPU seconds with a critic and 16 steps at dp 1,024, for about a million rows. The goal is at most {limit} seconds each:

| align, collation | seconds | of the goal |
| --- | --- | --- |
{million}

Padding rows of a round for `align = "steps"` / `"lcm"`. A padding row has two tokens. If dp is larger than the number
of rows in a step, some ranks have no real row with either alignment. The lcm is small only if dp and the rows of a
mini-batch have common factors.

| rows | {dps} |
| --- | {rule} |
{padding_grid}

## The store

GB written and read per round, and MB that one rank reads. SQLite writes about 2,300 rows/s on one machine,
TransferQueue about 350 rows/s per client ([store.md](store.md)). Several clients together write more until the network
of the storage units is saturated; this was not measured.

| rows | all ranks, GB | {dps} |
| --- | --- | {rule} |
{traffic}

## What reaches its limit first

| rows per round | limit | where | remedy |
| --- | --- | --- | --- |
{limits}

The number of ranks is not a limit for the plan. It multiplies the data that is sent: the session table and the token
table go to every rank.
"""


def main() -> None:
    """Measure and write."""
    plans, rows = [], synthetic_rows(0)
    for num_rows in SIZES:
        rows = synthetic_rows(num_rows)
        plans += [plan_cost(rows, dp_size) for dp_size in DP_SIZES]
    million = million_costs(rows)
    rows = synthetic_rows(SIZES[1])
    with tempfile.TemporaryDirectory() as name:
        gather = gather_cost()
        row_bytes, tokens = stored_bytes(Path(name))
    response = float(rows.response_tokens.mean())
    text = page(plans, million, gather, row_bytes, tokens, response, table_bytes(rows))
    (ROOT / "docs" / "scale.md").write_text(text)


if __name__ == "__main__":
    main()
