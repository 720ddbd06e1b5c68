"""The trainer's speed: where the time of a round goes, compared with a bare loop and with TRL, and how the cost grows.

    python benchmarks/bench_train.py [--quick] [--rounds N] [--blocks N]
    python benchmarks/bench_train.py --only large [--sessions 20000]

The verification round has 45 prompts x 8 sessions, three optimizer steps, and, with a policy that writes well-formed
replies (trained once, kept in runs/bench), about 950 rows. `bare` is the same round in plain torch without a store,
plan, ledger or metrics (train_bare.py). In the comparison with TRL a session has one trajectory of up to three tokens:
360 rows and three optimizer steps per round, TRL in one process with two threads. All programs are started once and
take turns, a few rounds at a time; figures are medians over rounds. `--quick` skips the growth of the cost.

`--only large` prints two rounds of very many sessions by part; it takes minutes and does not run with the others.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from train_gate import Round
from train_tasks import ROOT, write_config

HERE = Path(__file__).resolve().parent
POLICY = ROOT / "runs/bench/policy"
POLICY_ROUNDS = 40
WARM = 6
PARTS = ("rollout", "put", "store", "plan", "forward", "advantages", "update", "record", "other")
OVERHEAD = ("put", "store", "plan", "record", "other")
PROTOTYPE = 0.27  # seconds per round of the bare prototype, on two idle cores
TRL_PYTHON = ROOT / ".venv-trl/bin/python"


@dataclass(slots=True)
class Program:
    """One of the programs that take turns: the processes of its ranks and the rounds that it has reported."""

    name: str
    ranks: list[subprocess.Popen]
    rounds: list[Round] = field(default_factory=list)

    def run(self, rounds: int) -> None:
        """Run some rounds while the others wait."""
        self.tell(str(rounds))
        self.rounds += self.receive()

    def tell(self, line: str) -> None:
        stdin = self.ranks[0].stdin
        assert stdin is not None
        stdin.write(f"{line}\n")
        stdin.flush()

    def receive(self) -> list[Round]:
        stdout = self.ranks[0].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended before it answered; its output is above")
        return json.loads(line)

    def end(self) -> None:
        """Close the gate, and end processes that do not end by themselves."""
        self.tell("")
        for rank in self.ranks[1:]:
            rank.terminate()
        for rank in self.ranks:
            try:
                rank.wait(timeout=20)
            except subprocess.TimeoutExpired:
                rank.kill()

    def median(self, part: str = "round") -> float:
        return median(parts.get(part, 0.0) for parts in self.rounds)

    @property
    def rows_a_second(self) -> float:
        return median(parts["rows"] / parts["round"] for parts in self.rounds)


def start(
    name: str, script: str, folder: Path, *, dp: int = 1, threads: int = 1, python: Path | str = sys.executable
) -> Program:
    """Start the ranks of a program; it reports when it has warmed up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(dp):
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if dp > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dp)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        command = [str(python), str(HERE / script), str(folder), str(WARM)]
        ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env))
    return Program(name, ranks)


def policy() -> Path:
    """A model that writes well-formed replies, trained once."""
    model = POLICY / "model"
    if not model.is_dir():
        print(f"training a policy for {POLICY_ROUNDS} rounds, once", flush=True)
        command = [sys.executable, "-m", "raggedright", "train", str(ROOT / "configs/compaction.toml"), "--fresh"]
        command += ["--train.rounds", str(POLICY_ROUNDS), "--eval.every", "0", "--out", str(POLICY)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return model


def take_turns(programs: list[Program], *, blocks: int, rounds: int) -> None:
    """Some rounds of each program, repeatedly."""
    for program in programs:
        program.receive()  # it has warmed up
    for _ in range(blocks):
        for program in programs:
            program.run(rounds)
    for program in programs:
        program.end()
    for program in programs:
        for parts in program.rounds:
            parts["other"] = parts["round"] - sum(parts.get(part, 0.0) for part in PARTS if part != "other")


def verification_round(model: Path, work: Path, *, blocks: int, rounds: int) -> None:
    """Where the time goes: dp 2 and dp 1, both stores, and the bare loop."""
    dp1, memory = {"parallel": {"dp": 1}}, {"store": {"backend": "memory"}}
    ours = [
        start("dp 2, sqlite", "train_rank.py", write_config(work / "dp2", model), dp=2),
        start("dp 1, sqlite", "train_rank.py", write_config(work / "dp1", model, **dp1), threads=2),
        start("dp 1, memory", "train_rank.py", write_config(work / "memory", model, **dp1, **memory), threads=2),
    ]
    bare = [
        start("bare, dp 2", "train_bare.py", model, dp=2),
        start("bare, dp 1", "train_bare.py", model, threads=2),
    ]
    take_turns([*ours, *bare], blocks=blocks, rounds=rounds)
    table = Table("", "rows", "round, s", *PARTS, "rounds/s", title="the verification round, milliseconds by part")
    for program in [*ours, *bare]:
        parts = [f"{1e3 * program.median(part):.0f}" if program in ours else "" for part in PARTS]
        seconds = program.median()
        table.add_row(program.name, f"{program.median('rows'):,.0f}", f"{seconds:.3f}", *parts, f"{1 / seconds:.2f}")
    Console(width=150).print(table)
    two = ours[0]
    share = median(sum(parts.get(part, 0.0) for part in OVERHEAD) / parts["round"] for parts in two.rounds)
    goal(
        "plan, store, ledger, metrics and all the rest take less than 10 % of the round", 100 * share, "%", share < 0.1
    )
    ratio = two.median() / bare[0].median()
    goal("a round takes at most 1.3 x the bare loop's, side by side", ratio, "x", ratio <= 1.3)
    ratio = two.median() / PROTOTYPE
    goal(
        f"a round takes at most 1.3 x the prototype's {PROTOTYPE} s (which was measured another day)",
        ratio,
        "x",
        ratio <= 1.3,
    )
    print(f"dp 2 compared with dp 1: {ours[1].median() / two.median():.2f} x the rounds/s; ", end="")
    print(f"sqlite compared with memory: {ours[1].median() / ours[2].median():.2f} x the time", flush=True)


def beside_trl(work: Path, *, blocks: int, rounds: int) -> None:
    """Trained rows per second with one trajectory per session."""
    tasks = {"prompts": {"source": "train_tasks:tasks"}, "agent": {"name": "train_tasks:once"}}
    changes = {**tasks, "rollout": {"max_tokens": 3}, "algorithm": {"entropy_coef": 0.0}}
    model = POLICY.parent / "made"
    if not model.is_dir():
        make_model(model)
    ours = start("raggedright, dp 2", "train_rank.py", write_config(work / "single", model, **changes), dp=2)
    one = write_config(work / "single1", model, **changes, parallel={"dp": 1})
    programs = [ours, start("raggedright, dp 1, 2 threads", "train_rank.py", one, threads=2)]
    programs.append(start("TRL 1.16, 2 threads", "trl_round.py", model, threads=2, python=TRL_PYTHON))
    take_turns(programs, blocks=blocks, rounds=rounds)
    columns = ("", "rows", "round, s", "forward and update, s", "trained rows/s")
    table = Table(*columns, title="one trajectory a session, three optimizer steps")
    for program in programs:
        passes = program.median("forward") + program.median("update")  # TRL does not report the parts
        figures = (f"{program.median('rows'):,.0f}", f"{program.median():.3f}", f"{passes:.3f}" if passes else "")
        table.add_row(program.name, *figures, f"{program.rows_a_second:,.0f}")
    Console(width=120).print(table)
    ratio = ours.rows_a_second / programs[-1].rows_a_second
    goal("trained rows/s on two cores are at least twice TRL's", ratio, "x", ratio >= 2)


def make_model(folder: Path) -> None:
    """The verification run's initial model, in a folder that both programs read."""
    from raggedright.config.load import load_config
    from raggedright.train.load_models import load_actor, load_tokenizer

    config = load_config(ROOT / "configs/compaction.toml")
    tokenizer = load_tokenizer(config.model)
    load_actor(config.model, tokenizer, seed=0).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    tokenizer.save_pretrained(folder)


def goal(what: str, figure: float, unit: str, met: bool) -> None:
    print(f"goal {'met   ' if met else 'missed'}  {what}: {figure:.2f} {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="not how cost grows")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of a program before the next one's turn")
    parser.add_argument("--blocks", type=int, default=4, help="turns of each program")
    parser.add_argument("--only", choices=("round", "trl", "growth", "large"), help="one part alone")
    parser.add_argument("--sessions", type=int, default=20_000, help="per round of --only large, from 40")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-train-"))
    try:
        if args.only in (None, "round"):
            verification_round(policy(), work, blocks=args.blocks, rounds=args.rounds)
        if args.only in (None, "trl"):
            beside_trl(work, blocks=args.blocks, rounds=args.rounds)
        if args.only == "growth" or not (args.quick or args.only):
            from train_growth import growth

            growth(work)
        if args.only == "large":
            from train_growth import large_rounds

            large_rounds(work, sessions=args.sessions, rounds=2)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
