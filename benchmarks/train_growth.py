"""How the cost of a round grows with rows per session, row length and batch size: a table, and docs/speed.svg.

Each case is a round of the trainer on one rank and one thread, in this process. The work of each part is proportional
to something: the model's to tokens (and, with length, to its square), that of the others to rows and to the values of
rows. So seconds per row should be constant, or fall, along a line of the table; with length, seconds per token. All
sizes of a table take turns, one round each, and the cheapest round of a size counts, so that other load on the machine
is not mistaken for growth.

`large_rounds` prints the seconds of rounds with very many sessions: `bench_train.py --only large --sessions 20000`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import torch
from rich.console import Console
from rich.table import Table

import raggedright.train.train_round as clocks
from raggedright.config.load import load_config
from raggedright.train.setup import Setup, set_up
from raggedright.train.train_round import Clock, sample_round, train_round
from raggedright.train.world import World
from train_tasks import ROOT, write_config

sys.path.insert(0, str(ROOT / "verification"))
from curves import Panel, draw  # pyright: ignore[reportMissingImports]: of verification/

PARTS = ("rollout", "store", "plan", "forward", "advantages", "update", "other")
MODEL_PARTS = ("rollout", "forward", "update")
SHOWN = (*MODEL_PARTS, "store")  # in the picture
POSITIONS = 4_352
TURNS = 3  # after one warm-up


@dataclass(frozen=True, slots=True)
class Case:
    """One size: prompts x sessions, rows per session, tokens per row."""

    prompts: int
    sessions: int
    rows: int
    tokens: int


GROWTH = {
    "rows per session": [Case(45, 8, rows, 8) for rows in (1, 2, 4, 8, 16, 32)],
    "row length": [Case(3, 4, 1, tokens) for tokens in (16, 64, 256, 1_024, 4_096)],
    "prompts": [Case(prompts, 8, 2, 8) for prompts in (45, 90, 180, 360, 720, 1_440)],
}
VARIES = {"rows per session": "rows", "row length": "tokens", "prompts": "prompts"}


def measure(cases: list[Case], work: Path) -> list[dict[str, float]]:
    """CPU seconds by part of each case's cheapest round."""
    setups = [prepare(case, work / str(number)) for number, case in enumerate(cases)]
    rounds_by_case: list[list[dict[str, float]]] = [[] for _ in cases]
    for turn in range(TURNS + 1):
        for setup, rounds in zip(setups, rounds_by_case, strict=True):
            rounds.append(run_round(setup, turn + 1))
    for setup in setups:
        setup.close()
    return [min(rounds[1:], key=lambda parts: sum(parts[part] for part in PARTS)) for rounds in rounds_by_case]


def prepare(case: Case, folder: Path) -> Setup:
    """The trainer of a case."""
    made = load_config(ROOT / "configs/compaction.toml").model.made or {}
    config = load_config(
        write_config(
            folder,
            None,
            model={"made": made | {"max_position_embeddings": POSITIONS}},
            prompts={"source": "train_tasks:tasks"},
            agent={"name": "train_tasks:Many", "options": {"rows": case.rows, "tokens": case.tokens}},
            rollout={"n": case.sessions, "max_tokens": 2},
            train={
                "batch_size": case.prompts,
                "mini_batch_size": case.prompts // 3,
                "micro_batch_tokens": max(2_048, case.tokens),
            },
            parallel={"dp": 1, "threads": 1},
        )
        / "config.toml"
    )
    return set_up(config, World(0, 1, torch.device("cpu")))


def run_round(setup: Setup, round: int, now: Callable[[], float] = process_time) -> dict[str, float]:
    """Seconds of a round by part, CPU seconds by default, and its rows; `now` is also the clock of the parts."""
    clocks.perf_counter = now
    clock, began = Clock(), now()
    with clock("rollout"):
        sampled = sample_round(setup, round)
    assert sampled is not None
    result = train_round(setup, round, sampled, clock)
    parts = dict(clock.seconds)
    parts["other"] = now() - began - sum(parts.values())
    setup.store.drop(round)
    return parts | {"rows": float(len(result.table.rows))}


def large_rounds(work: Path, *, sessions: int, rounds: int) -> None:
    """Print the seconds by part of rounds of the verification run's agent with this many sessions, on one rank."""
    prompts = sessions // 8
    train = {"batch_size": prompts, "mini_batch_size": prompts // 5}
    folder = write_config(work / "large", None, rollout={"n": 8}, train=train, parallel={"dp": 1})
    setup = set_up(load_config(folder / "config.toml"), World(0, 1, torch.device("cpu")))
    title = f"{8 * prompts:,} sessions per round, dp 1, {torch.get_num_threads()} threads: seconds by part"
    table = Table("round", "rows", *PARTS, "sum", "CPU", title=title)
    for round in range(1, rounds + 1):
        cpu_began = process_time()
        parts = run_round(setup, round, perf_counter)
        figures = [f"{parts[part]:,.2f}" for part in PARTS]
        total = sum(parts[part] for part in PARTS)
        table.add_row(
            str(round), f"{parts['rows']:,.0f}", *figures, f"{total:,.1f}", f"{process_time() - cpu_began:,.1f}"
        )
    setup.close()
    Console(width=130).print(table)


def growth(work: Path) -> None:
    """Measure all, print the tables and draw the picture."""
    torch.set_num_threads(1)
    panels = []
    for what, cases in GROWTH.items():
        parts_by_case = measure(cases, work / what.replace(" ", "-"))
        unit = "token" if what == "row length" else "row"
        table = Table(what, "rows", *PARTS, "sum", title=f"CPU microseconds a {unit}, one rank")
        per = {part: [] for part in PARTS}
        for case, parts in zip(cases, parts_by_case, strict=True):
            count = parts["rows"] * (case.tokens if unit == "token" else 1)
            for part in PARTS:
                per[part].append(1e6 * parts[part] / count)
            figures = [f"{per[part][-1]:,.1f}" for part in PARTS]
            total = sum(per[part][-1] for part in PARTS)
            table.add_row(f"{getattr(case, VARIES[what]):,}", f"{parts['rows']:,.0f}", *figures, f"{total:,.1f}")
        Console(width=130).print(table)
        panels.append(panel(what, unit, per, [f"{getattr(case, VARIES[what]):,}" for case in cases]))
        tell_growth(what, unit, per)
    picture = draw(panels, columns=3, title="CPU time a row or token, by part and size", width=300, height=150)
    (ROOT / "docs/speed.svg").write_text(picture)


def panel(what: str, unit: str, per: dict[str, list[float]], sizes: list[str]) -> Panel:
    """The curves of one table, as shares of the largest figure; small parts are one curve together."""
    rest = [sum(values) for values in zip(*(per[part] for part in PARTS if part not in SHOWN), strict=True)]
    curves = {part: per[part] for part in SHOWN} | {"rest": rest}
    top = max(max(values) for values in curves.values())
    scaled = {part: [value / top for value in values] for part, values in curves.items()}
    return Panel(f"{what} (1 = {top:,.0f} us a {unit})", scaled, sizes)


def tell_growth(what: str, unit: str, per: dict[str, list[float]]) -> None:
    """Whether a part grew faster than its work: the last two sizes compared with the cheapest before them."""
    for part, values in per.items():
        if what == "row length" and part in MODEL_PARTS:
            continue  # attention grows with its square
        ratio = values[-1] / max(min(values[:-1]), 1e-9)
        grew = ratio > 1.5 and values[-1] > 1
        if grew:
            print(f"grows     {part} with {what}: {ratio:.2f} x the time per {unit} at the largest size", flush=True)
    if what != "row length":
        totals = [sum(values[i] for values in per.values()) for i in range(len(per["plan"]))]
        ratio = totals[-1] / min(totals)
        met = ratio <= 1.3
        print(
            f"goal {'met   ' if met else 'missed'}  time per row does not grow with {what}: {ratio:.2f} x", flush=True
        )
