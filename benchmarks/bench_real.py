"""Peak memory and trained tokens per second on SmolLM2-135M, compared with TRL on the same rows.

    python benchmarks/bench_real.py [--quick] [--rounds N] [--blocks N]

A round has 2 prompts x 8 completions and two optimizer steps; completions are given, so only training takes time. Both
trainers compute old log-probs and one update, in float32, in one process of two threads. Programs take turns. A
trained token is a token of a completion. The peak is that of the process after its first rounds, with weights,
gradients and optimizer. In the last table a session has eight turns, each a trajectory that begins with the turns
before it: what it saves to compute shared prefixes once.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench_train import HERE, ROOT, TRL_PYTHON, Program, goal
from real_rows import LEARNING_RATE, PROMPTS, SESSIONS, SHAPES, TURNS
from train_tasks import write_config

MODEL = ROOT / "runs/models/SmolLM2-135M-Instruct"
WARM = 2


def start(name: str, python: Path | str, *arguments: object) -> Program:
    """Start a program of two threads; it reports when it has warmed up."""
    env = os.environ | {
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": f"{HERE}:{ROOT / 'src'}",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [str(python), *map(str, arguments)]
    log = (Path(tempfile.gettempdir()) / f"bench-real-{name.replace(' ', '-')}.log").open("w")
    pipe = subprocess.PIPE
    return Program(name, [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=env)])


def ours(name: str, folder: Path, shape: str, *, agent: str = "Single", sessions: int = SESSIONS, **train) -> Program:
    """Our trainer, unchanged, with an engine that replays completions."""
    changes = {
        "model": {"activation_checkpointing": train.pop("checkpointing", False)},
        "prompts": {"source": "real_tasks:tasks"},
        "agent": {"name": f"real_tasks:{agent}", "options": {"shape": shape}},
        "rollout": {
            "n": sessions,
            "max_tokens": SHAPES[shape].completion,
            "engine": "real_tasks:Replay",
            "engine_options": {"shape": shape},
        },
        "train": {"batch_size": PROMPTS, "mini_batch_size": 1, **train},
        "algorithm": {"entropy_coef": 0.0},
        "optimizer": {"lr": LEARNING_RATE},
        "parallel": {"dp": 1},
        "checkpoint": {"every": 100_000},
        "logging": {"trackers": []},
    }
    write_config(folder, MODEL, **changes)
    return start(name, sys.executable, HERE / "train_rank.py", folder, WARM)


def trl(name: str, shape: str, *options: object) -> Program:
    """TRL's trainer in its own environment."""
    return start(name, TRL_PYTHON, HERE / "real_trl.py", MODEL, shape, WARM, *options)


def take_turns(programs: list[Program], *, blocks: int, rounds: int) -> None:
    """Some rounds of each program, repeatedly."""
    for program in programs:
        program.receive()  # one after another: a warm-up has the peak of reading the model
    for _ in range(blocks):
        for program in programs:
            program.run(rounds)
    for program in programs:
        program.end()


def peak(program: Program) -> float:
    """The most memory of a program, in MiB."""
    return max(parts["peak_mib"] for parts in program.rounds)


def compare(shape: str, work: Path, *, quick: bool, blocks: int, rounds: int) -> None:
    """TRL and our collations on the same rows."""
    tokens = PROMPTS * SESSIONS * SHAPES[shape].completion
    programs = [
        trl("TRL", shape, SESSIONS),
        ours("raggedright, tree", work / f"{shape} tree", shape, collate="tree", micro_batch_tokens=1024),
        ours("raggedright, padded", work / f"{shape} padded", shape, collate="padded", micro_batch_tokens=1024),
    ]
    if not quick:
        recomputed = "activations recomputed"
        programs += [
            trl("TRL, 2 rows per pass", shape, 2),
            trl(f"TRL, {recomputed}", shape, SESSIONS, "--checkpointing"),
            ours(
                f"raggedright, tree, {recomputed}",
                work / f"{shape} recomputed",
                shape,
                collate="tree",
                micro_batch_tokens=1024,
                checkpointing=True,
            ),
        ]
    take_turns(programs, blocks=blocks, rounds=rounds)
    first = programs[0]
    title = f"{shape}: prompts of {SHAPES[shape].prompt} tokens, completions of {SHAPES[shape].completion}"
    table = Table("", "trained tokens/s", "of TRL's", "peak, MiB", "of TRL's", title=title)
    for program in programs:
        speed, memory = tokens / program.median(), peak(program)
        ratios = f"{first.median() / program.median():.2f} x", f"{memory / peak(first):.2f} x"
        table.add_row(program.name, f"{speed:,.0f}", ratios[0], f"{memory:,.0f}", ratios[1])
    Console(width=100).print(table)
    tree = programs[1]
    ratio, least = first.median() / tree.median(), 1.5 if shape == "shared prompts" else 1.0
    goal(f"{shape}: trained tokens/s at least {least} x TRL's", ratio, "x", ratio >= least)
    ratio = peak(tree) / peak(first)
    goal(f"{shape}: peak memory at most 0.7 x TRL's", ratio, "x", ratio <= 0.7)


def turns(work: Path, *, blocks: int, rounds: int) -> None:
    """A session of eight turns, with and without shared prefixes."""
    tokens = PROMPTS * 2 * TURNS * 32
    programs = [
        ours(how, work / f"turns {how}", "long completions", agent="Turns", sessions=2, collate=how)
        for how in ("padded", "packed", "tree")
    ]
    take_turns(programs, blocks=blocks, rounds=rounds)
    table = Table("collate", "trained tokens/s", "of padded", "peak, MiB", title=f"sessions of {TURNS} turns")
    for program in programs:
        ratio = programs[0].median() / program.median()
        table.add_row(program.name, f"{tokens / program.median():,.0f}", f"{ratio:.2f} x", f"{peak(program):,.0f}")
    Console(width=100).print(table)


def large_vocabulary() -> None:
    """Peak memory of a row of 4,096 tokens with a vocabulary of 152,000, above weights, gradients and optimizer."""
    table = Table("logits", "peak, MiB", title="a row of 4,096 tokens, a vocabulary of 152,000")
    peaks = {}
    for logits in ("chunks", "whole"):
        command = [sys.executable, str(HERE / "real_memory.py"), logits]
        env = os.environ | {"PYTHONPATH": f"{HERE}:{ROOT / 'src'}"}
        peaks[logits] = int(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
        table.add_row(logits, f"{peaks[logits]:,}")
    Console(width=100).print(table)
    figure = peaks["chunks"]
    goal("at most 1.2 GB above weights, gradients and optimizer", figure * 2**20 / 1e9, "GB", figure <= 1.2e9 / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what the goals need")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a program before the next one's turn")
    parser.add_argument("--blocks", type=int, default=3, help="turns of each program")
    parser.add_argument("--only", choices=(*SHAPES, "turns", "memory"), help="one table alone")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-real-"))
    try:
        for shape in SHAPES:
            if args.only in (None, shape):
                compare(shape, work, quick=args.quick, blocks=args.blocks, rounds=args.rounds)
        if args.only in (None, "turns"):
            turns(work, blocks=args.blocks, rounds=args.rounds)
        if args.only in (None, "memory"):
            large_vocabulary()
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
