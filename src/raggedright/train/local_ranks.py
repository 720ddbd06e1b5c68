"""The ranks of a run on this machine: one process per rank, started, watched and ended together.

Invariants: a rank that fails ends the others, and all of them are started again up to `parallel.max_restarts` times;
when the launcher dies, its ranks die. No rank can be reached from another machine, and no port accepts keys or pickles:
ranks find each other through a file in a folder that only this user can open, and talk over the loopback interface.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from raggedright.config.schema import Config
from raggedright.train.rank import ERROR_VARIABLE, LAUNCHER_VARIABLE, LOGS_FOLDER, log_file
from raggedright.train.stop import passing_on_signals
from raggedright.train.world import RENDEZVOUS_VARIABLE, TrainError, loopback, num_threads

LOOK_SECONDS = 0.1
GRACE_SECONDS = 2.0  # for the other ranks to end by themselves, once one has failed


def run_ranks(config: Config) -> None:
    """Run all ranks of the run whose folder holds its config, to their end."""
    (config.out / LOGS_FOLDER).mkdir(exist_ok=True)
    restarts = config.parallel.max_restarts
    with passing_on_signals(config.out):
        failure = _run_once(config)
        for restart in range(1, restarts + 1):
            if failure is None:
                return
            print(f"{failure}; starting all ranks again ({restart} of {restarts} restarts)", flush=True)
            failure = _run_once(config)
    if failure is not None:
        raise TrainError(failure)


def _run_once(config: Config) -> str | None:
    """Start all ranks and wait for them; which rank failed first and why, or None."""
    with TemporaryDirectory(prefix="raggedright-") as name, ExitStack() as stack:  # only this user can open it
        folder, ranks = Path(name), list[subprocess.Popen[bytes]]()
        for dp_rank in range(config.parallel.dp):
            ranks.append(_start(config, folder, dp_rank))
            stack.callback(_kill, ranks[-1])
        _wait(ranks)
        codes = {dp_rank: rank.returncode for dp_rank, rank in enumerate(ranks) if rank.returncode}
        failures = [_failure(folder, config.out, dp_rank, code) for dp_rank, code in codes.items()]
        return min(failures)[-1] if failures else None


def _start(config: Config, folder: Path, dp_rank: int) -> subprocess.Popen[bytes]:
    """One rank, in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone."""
    numbers = {"RANK": dp_rank, "LOCAL_RANK": dp_rank, "WORLD_SIZE": config.parallel.dp}
    environment = {
        **os.environ,
        **{name: str(number) for name, number in numbers.items()},
        "OMP_NUM_THREADS": str(num_threads(config)),
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": loopback(),
        RENDEZVOUS_VARIABLE: str(folder / "rendezvous"),
        ERROR_VARIABLE: str(_error_file(folder, dp_rank)),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    command = [sys.executable, "-m", "raggedright.train.rank", str(config.out)]
    if dp_rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with log_file(config.out, dp_rank).open("ab") as log:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=subprocess.STDOUT)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Return when all ranks have ended, or a little after the first failure."""
    deadline = math.inf
    while time.monotonic() < deadline and None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(LOOK_SECONDS)


def _kill(rank: subprocess.Popen[bytes]) -> None:
    """End a rank unless it ended well, and what it started, which outlives it, unless that has a session of its own."""
    if rank.poll() != 0:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def _failure(folder: Path, run_folder: Path, dp_rank: int, code: int) -> tuple[int, float, str]:
    """What a rank failed of, after two numbers by which the cause comes before its consequences on other ranks.

    First our own errors, then deaths, then the exceptions that a rank gets when another one has gone.
    """
    output = f"; its output is in {log_file(run_folder, dp_rank)}"
    resume = "; run the same command again to resume"
    file = _error_file(folder, dp_rank)
    if not file.exists():
        ended = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        return 1, 0.0, f"rank {dp_rank} {ended} and reported no error{output if dp_rank else ''}{resume}"
    error = json.loads(file.read_text())
    if error["ours"]:
        return 0, error["time"], f"rank {dp_rank}: {error['message']}"
    return 2, error["time"], f"rank {dp_rank}: {error['message']}{output}{resume}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def _error_file(folder: Path, dp_rank: int) -> Path:
    return folder / f"error-{dp_rank}.json"
