"""The cost of Ray and TransferQueue: a round compared with the local launcher's, and the time per row of the store.

    python benchmarks/bench_cluster.py [--quick] [--rounds N] [--blocks N]

The verification round has 45 prompts x 8 sessions on two ranks, and about 360 to 1,000 rows. It is run by the local
launcher with SQLite, by Ray with SQLite and by Ray with TransferQueue; each is started once, and they take turns, a few
rounds at a time (cluster_gate.py). Figures are medians over rounds; `start` is the time from the command to the end of
the first round. The second table appends rows of about 57 KB in blocks of 360, as the trainer does with sessions that
end together, and reads them 360 at a time. Everything runs on one machine: the figures include no network.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import bench_store
from store_rows import ROWS_PER_SESSION
from train_tasks import write_config

HERE = Path(__file__).resolve().parent
PROGRAMS: dict[str, dict[str, dict[str, object]]] = {
    "local, sqlite": {},
    "ray, sqlite": {"parallel": {"dp": 2, "launcher": "ray"}, "store": {"backend": "sqlite"}},
    "ray, transfer_queue": {"parallel": {"dp": 2, "launcher": "ray"}},
}
PARTS = ("rollout", "store", "plan", "forward", "advantages", "update")
WARM = 3
SIZES = (360, 1_440, 5_760, 23_040)
START_SECONDS, BLOCK_SECONDS = 600.0, 600.0


@dataclass(slots=True)
class Program:
    """A run that takes turns with others."""

    name: str
    folder: Path
    process: subprocess.Popen
    start: float = 0.0
    rounds: list[dict[str, float]] = field(default_factory=list)

    def run(self, until: int, *, count_from: int) -> None:
        """Let it run up to this round, and record the figures of the rounds from `count_from` on."""
        (self.folder / "until").write_text(str(until))
        deadline = time.monotonic() + START_SECONDS + BLOCK_SECONDS
        while len(rounds := self.seconds()) < until:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not reach round {until}; see {self.folder}.log")
            time.sleep(0.05)
        self.rounds += rounds[count_from - 1 :]

    def seconds(self) -> list[dict[str, float]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        rounds = [event for line in lines if (event := json.loads(line))["event"] == "round"]
        return [{**event["seconds"], "rows": event["rows"]} for event in rounds]

    def part(self, name: str) -> float:
        return median(each.get(name, 0.0) for each in self.rounds)

    @property
    def round(self) -> float:
        return median(sum(each.values()) - each["rows"] for each in self.rounds)


def start(name: str, where: Path) -> Program:
    folder = where / name.replace(", ", "-")
    agent = {"name": "cluster_gate:Gated", "options": {"folder": str(folder)}}
    logging = {"trackers": [], "sample_every": 1_000_000}
    write_config(folder, None, agent=agent, logging=logging, **PROGRAMS[name])
    command = [sys.executable, "-m", "raggedright", "train", str(folder / "config.toml")]
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=HERE, start_new_session=True)
    return Program(name, folder, process)


def compare_rounds(rounds: int, blocks: int, where: Path) -> None:
    programs = []
    try:
        for name in PROGRAMS:
            began = time.monotonic()
            programs.append(program := start(name, where))
            program.run(1, count_from=2)
            program.start = time.monotonic() - began
            program.run(1 + WARM, count_from=2 + WARM)
        for block in range(blocks):
            for program in programs:
                first = 2 + WARM + block * (rounds + 1)
                program.run(first + rounds, count_from=first + 1)
    finally:
        for program in programs:
            program.process.send_signal(signal.SIGINT)
        for program in programs:
            (program.folder / "until").write_text("1000000")
            program.process.wait(120)
    base = programs[0].round
    table = Table("launcher, store", "start s", "rows", "round s", "x", *PARTS, title="a verification round, two ranks")
    for each in programs:
        figures = [f"{each.part(part):.3f}" for part in PARTS]
        table.add_row(
            each.name,
            f"{each.start:.0f}",
            f"{each.part('rows'):.0f}",
            f"{each.round:.3f}",
            f"{each.round / base:.2f}",
            *figures,
        )
    Console(width=150).print(table)


def measure_store(sizes: tuple[int, ...]) -> None:
    bench_store.SESSIONS_PER_APPEND["transfer_queue"] = 360 // ROWS_PER_SESSION
    table = Table(
        "rows", "append rows/s", "MB/s", "read rows/s", "MB/s", "list s", title="TransferQueue, rows of ~57 KB"
    )
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            figures = bench_store.measure("transfer_queue", size, Path(folder))
        table.add_row(f"{size:,}", *(f"{x:,.0f}" for x in figures[:4]), f"{figures[4]:.3f}")
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and rows")
    parser.add_argument("--rounds", type=int, default=8, help="a block")
    parser.add_argument("--blocks", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        compare_rounds(4 if args.quick else args.rounds, 2 if args.quick else args.blocks, Path(where))
    measure_store(SIZES[:2] if args.quick else SIZES)


if __name__ == "__main__":
    main()
