"""docs/scale.md: what a round costs as ranks and rows grow, from constants measured here and now.

    make scale-page                                  # two minutes; writes docs/scale.md

Plans, digests and ledgers of every size are really made. What a rank receives is really listed, packed and read back,
for `SEALED_ROWS` rows, and multiplied: each of these is linear in rows. What no machine here can run (links between
thousands of ranks) is arithmetic, and the page says so.
"""

import gc
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object  # what all_gather_object sends

from raggedright import Layout, Rows, close_ledger, make_plan
from raggedright.plan.deal import lcm_multiple
from raggedright.store.listing import Listing, join_listings, listing_of_new
from raggedright.store.protocol import NewRow, NewSession, SessionKey
from raggedright.store.rows import rows_of
from raggedright.store.sqlite import SqliteStore
from raggedright.train.passes import TokenTable

ROOT = Path(__file__).parents[1]
SIZES, DP_SIZES = (1_000, 16_000, 128_000, 1_000_000), (8, 64, 512, 4_096)
SEALED_ROWS, STORED_ROWS, SEALING = 64_000, 2_000, 8  # ranks that a list is sealed from
SESSIONS, MEAN_ROWS, NUM_STEPS, CAP = 8, 2, 4, 16_384
PROMPT_TOKENS, MEAN_TOKENS = 300, 2_000
LINK = 10e9  # bytes a second between ranks, assumed


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What every rank does for a plan, in seconds, and what the plan pads."""

    num_rows: int
    dp_size: int
    plan: float
    digest: float
    ledger: float
    padding: int
    padding_lcm: int


@dataclass(frozen=True, slots=True)
class SealCost:
    """What a row costs on its way to the planner."""

    bytes_sent: float
    bytes_held: float
    seconds_listed: float
    seconds_packed: float
    seconds_read: float
    seconds_rows: float


def made_up_rows(num_rows: int, seed: int = 0) -> Rows:
    """About so many rows: 8 sessions a prompt, one to three rows a session, lognormal lengths."""
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
    """CPU seconds of one call, which do not depend on what else the machine does; garbage is collected before."""
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


def seal_cost() -> SealCost:
    """A listing of `SEALED_ROWS` rows, each made by one of `SEALING` ranks and sent as `World.gather` sends it."""
    rows = made_up_rows(SEALED_ROWS)
    new = [*_sessions(rows, lambda tokens, response: {"input_ids": torch.zeros(0, dtype=torch.int64)})]
    shares: list[Listing] = []
    listed = seconds_of(lambda: shares.extend(listing_of_new(new[rank::SEALING]) for rank in range(SEALING)))
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    packed = seconds_of(lambda: sent.extend(_object_to_tensor(each, torch.device("cpu"), None) for each in shares))
    size = sum(int(each) for _, each in sent)
    gc.collect()
    tracemalloc.start()
    copy = join_listings([_tensor_to_object(*each, None) for each in sent])
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    read = seconds_of(lambda: join_listings([_tensor_to_object(*each, None) for each in sent]))
    made = seconds_of(lambda: rows_of(copy))
    return SealCost(*(each / len(rows) for each in (size, held, listed, packed, read, made)))


def stored_bytes(folder: Path) -> tuple[float, float]:
    """Bytes of a row in a SQLite file, and tokens of a row, with the fields that the shipped agents write."""
    rows = made_up_rows(STORED_ROWS)
    new = _sessions(
        rows,
        lambda tokens, response: {
            "input_ids": torch.randint(0, 150_000, (tokens,)),
            "response_mask": torch.ones(response, dtype=torch.int64),
            "rollout_log_probs": torch.rand(response),
        },
    )
    with SqliteStore(folder / "stored.db") as store:
        store.put_all([*new])
    return (folder / "stored.db").stat().st_size / len(rows), float(rows.tokens.mean())


def _sessions(rows: Rows, fields: Callable[[int, int], dict[str, torch.Tensor]]) -> Iterator[NewSession]:
    """Sessions of these rows, with the tags that agents give them."""
    tags = {"role": "agent", "reward": None, "finish_reason": "stop", "weight_version": 0, "metric/exact_match": 1.0}
    prompt, response = rows.prompt_tokens.tolist(), rows.response_tokens.tolist()
    starts = [*np.flatnonzero(np.diff(rows.session_index, prepend=-1)).tolist(), len(rows)]
    for start, end in pairwise(starts):
        new = [
            NewRow(
                prompt_tokens=prompt[i], response_tokens=response[i], loss_tokens=response[i],
                fields=fields(prompt[i] + response[i], response[i]), tags=tags,
            )
            for i in range(start, end)
        ]  # fmt: skip
        yield NewSession(SessionKey(0, rows.prompt[start], int(rows.session[start])), new, score=0.5)


def table_bytes(rows: Rows) -> float:
    """Bytes a response token that ranks sum so that each has the log-probs and the mask of all rows."""
    table = TokenTable(rows, ("response_mask", "old_log_probs"), torch.float32)
    return table._table.nbytes / int(rows.response_tokens.sum())


def page(plans: list[PlanCost], seal: SealCost, row_bytes: float, tokens: float, response: float, table: float) -> str:
    """The page: constants, what follows from them, and what breaks first."""
    largest = [max((plan for plan in plans if plan.num_rows == n), key=lambda plan: plan.dp_size) for n in _rows(plans)]
    by_row = (
        seal.seconds_read
        + seal.seconds_rows
        + sum(getattr(largest[-1], part) / largest[-1].num_rows for part in ("plan", "digest", "ledger"))
    )
    limits = sorted(
        (
            (8e9 / (table * response), "all rows' log-probs and masks on every rank: 8 GB", "`train/passes.py`", TABLE),
            (4e9 / seal.bytes_held, "the list of sessions in columns: 4 GB a rank", "`train/sealed.py`", HELD),
            (30 / by_row, "reading the list, plan, digest, ledger: 30 s on every rank", "`train/round.py`", SECONDS),
        )
    )
    return TEMPLATE.format(
        date=date.today().isoformat(),
        tokens=f"{tokens:,.0f}",
        response=f"{response:,.0f}",
        row_kb=f"{row_bytes / 1e3:.1f}",
        sent=f"{seal.bytes_sent:,.0f}",
        held=f"{seal.bytes_held:,.0f}",
        listed=_us(seal.seconds_listed),
        packed=_us(seal.seconds_packed),
        read=_us(seal.seconds_read),
        made=_us(seal.seconds_rows),
        table=f"{table:.0f}",
        growth="\n".join(_growth(plan, seal, row_bytes, response, table) for plan in largest),
        plan_grid=_grid(plans, lambda plan: f"{plan.plan:.2g}"),
        padding_grid=_grid(plans, lambda plan: f"{plan.padding:,} / {plan.padding_lcm:,}"),
        dps=" | ".join(f"dp {dp:,}" for dp in DP_SIZES),
        rule=" | ".join("---" for _ in DP_SIZES),
        limits="\n".join(f"| {_round(rows)} | {what} | {where} | {do} |" for rows, what, where, do in limits),
        traffic="\n".join(_traffic(n, row_bytes) for n in _rows(plans)),
        link=f"{LINK / 1e9:.0f}",
    )


TABLE = (
    "a smaller `train.batch_size`, more rounds; a loop of your own need exchange no tokens, only scores (GRPO, RLOO)"
)
HELD = "the same; columns that are arrays instead of lists"
SECONDS = "plan once and send each rank its part: the plan is a pure function, so only the digest need agree"


def _rows(plans: list[PlanCost]) -> list[int]:
    return sorted({plan.num_rows for plan in plans})


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _round(rows: float) -> str:
    """Two digits are all that such a figure has."""
    digits = 10 ** (len(str(int(rows))) - 2)
    return f"{int(rows) // digits * digits:,}"


def _growth(plan: PlanCost, seal: SealCost, row_bytes: float, response: float, table: float) -> str:
    n = plan.num_rows
    seconds = [n * seal.seconds_read, n * seal.seconds_rows, plan.plan, plan.digest, plan.ledger]
    cells = [f"{n * seal.bytes_sent / 1e6:,.1f}", f"{n * seal.bytes_held / 1e9:.2f}", *(f"{s:.2f}" for s in seconds)]
    shared = n * response * table
    return f"| {n:,} | {' | '.join(cells)} | {shared / 1e9:.2f} | {2 * shared / LINK:.2f} |"


def _grid(plans: list[PlanCost], cell: Callable[[PlanCost], str]) -> str:
    return "\n".join(
        f"| {n:,} | {' | '.join(cell(plan) for plan in plans if plan.num_rows == n)} |" for n in _rows(plans)
    )


def _traffic(n: int, row_bytes: float) -> str:
    shares = " | ".join(f"{n * row_bytes / dp / 1e6:,.1f}" for dp in DP_SIZES)
    return f"| {n:,} | {n * row_bytes / 1e9:.2f} | {shares} |"


TEMPLATE = """\
# Scale

What a round costs as rows and ranks grow. `make scale-page` measures the constants and writes this page; made {date} on
two shared cores. Plans of every size here were really made; bytes and CPU seconds a row were measured on 64,000 rows
and multiplied; links between ranks are assumed to carry {link} GB/s, since no machine here has them. Rows: 8 sessions a
prompt, 1 to 3 rows a session, {tokens} tokens a row in the mean ({response} of them response), 16,384 a micro-batch,
four optimizer steps a round.

## Constants

| of a row | |
| --- | --- |
| in the store: a SQLite file, the fields that agents write | {row_kb} KB |
| in the sealed list: as a rank receives it, as it holds it | {sent}, {held} bytes |
| listed, then packed, by the rank that ran it | {listed} + {packed} microseconds |
| read and joined, then made into Rows, by every rank | {read} + {made} microseconds |
| in the sum that gives all ranks all log-probs and masks | {table} bytes a response token; with a reference 4 more |

## Every rank, every round

At dp 4,096; with fewer ranks only the plan's time differs (below). CPU seconds of one core. `sum` is the token table's
all-reduce at the assumed speed.

| rows | list, MB | held, GB | read, s | Rows, s | plan, s | digest, s | ledger, s | token table, GB | sum, s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{growth}

## The plan

CPU seconds of `make_plan`, actor and forward pass.

| rows | {dps} |
| --- | {rule} |
{plan_grid}

Padding rows of a round, `align = "steps"` / `"lcm"`. A padding row has two tokens. Where dp is above the rows of a
step, ranks are idle, whatever pads them. An lcm is small only where dp and the rows of a mini-batch share factors.

| rows | {dps} |
| --- | {rule} |
{padding_grid}

## The store

GB put and read a round, and MB that one rank reads. SQLite puts about 2,300 rows/s on one machine, TransferQueue about
350 a client ([store.md](store.md)); clients add up until the network of its units is full, which was not measured here.

| rows | all, GB | {dps} |
| --- | --- | {rule} |
{traffic}

## What breaks first

| rows a round | what | where | what to do |
| --- | --- | --- | --- |
{limits}

The number of ranks breaks nothing in the plan. It multiplies what is sent: the list and the token table go to every
rank.
"""


def main() -> None:
    """Measure and write."""
    plans = []
    for num_rows in SIZES:
        rows = made_up_rows(num_rows)
        plans += [plan_cost(rows, dp_size) for dp_size in DP_SIZES]
    rows = made_up_rows(SIZES[1])
    with tempfile.TemporaryDirectory() as name:
        seal = seal_cost()
        row_bytes, tokens = stored_bytes(Path(name))
    response = float(rows.response_tokens.mean())
    (ROOT / "docs" / "scale.md").write_text(page(plans, seal, row_bytes, tokens, response, table_bytes(rows)))


if __name__ == "__main__":
    main()
