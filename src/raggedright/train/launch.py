"""Starts the ranks of a run: one in this process, several processes on this machine, or on Ray.

Invariants of ranks on this machine: a rank that fails ends the others, and all of them are started again up to
`parallel.max_restarts` times; when the launcher dies, its ranks die. No rank can be reached from another machine: ranks
find each other through a file in a folder that only this user can open, and talk over the loopback interface. While
they connect, other users of this machine can connect to them, too; a rank that has such a connection ends before it
unpickles anything (train/peer_check.py), so those users can prevent a start but run no code.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from raggedright.agents.load_agent import load_agent
from raggedright.config.schema import Config
from raggedright.errors import ConfigError, install_hint
from raggedright.files import check_kind, open_to_append
from raggedright.train.rank import ERROR_VARIABLE, LAUNCHER_VARIABLE, LOGS_FOLDER, log_file, restarting, run_rank
from raggedright.train.round_prompts import load_prompts
from raggedright.train.setup import find_engine, find_store
from raggedright.train.stop import STOP_FILE, passing_on_signals
from raggedright.train.trackers import check_trackers
from raggedright.train.world import RENDEZVOUS_VARIABLE, TrainError, loopback, num_threads

POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0  # for the other ranks to end by themselves after one has failed


def launch(config: Config, *, apart: bool = False) -> None:
    """Run all ranks of the run whose folder holds its config, to their end.

    With `apart`, the driver of a run on Ray is a separate process, so this one survives the end of Ray.
    """
    check_plugins(config)
    stop = config.out / STOP_FILE
    check_kind(stop)
    stop.unlink(missing_ok=True)  # left over from an earlier run
    try:
        if config.parallel.launcher == "ray":
            _ray_launcher(apart=apart)(config)
        elif config.parallel.dp == 1 and not config.parallel.max_restarts:
            run_rank(config.out)
        else:
            _run_ranks(config)
    finally:
        with suppress(OSError):  # how the run ended says more
            stop.unlink()


def check_plugins(config: Config) -> None:
    """A ConfigError for anything that the config names wrongly, before any rank starts."""
    load_agent(config.agent.name, config.agent.options)
    load_prompts(config)
    find_engine(config)
    find_store(config)
    check_trackers(config)


def _ray_launcher(*, apart: bool) -> Callable[[Config], None]:
    try:
        from raggedright.train.ray_driver import launch_on_ray, run_driver
    except ImportError as error:
        raise ConfigError(f"parallel.launcher is ray and needs {error.name}; {install_hint('train,ray')}") from None
    return run_driver if apart else launch_on_ray


def _run_ranks(config: Config) -> None:
    """Run all ranks on this machine, to their end."""
    (config.out / LOGS_FOLDER).mkdir(exist_ok=True)
    for dp_rank in range(config.parallel.dp):
        check_kind(log_file(config.out, dp_rank))
    with passing_on_signals(config.out):
        failure = restarting(config, "all ranks", _run_once)
    if failure is not None:
        raise TrainError(failure)


def _run_once(config: Config) -> str | None:
    """Start all ranks and wait for them; the rank that failed first and why, or None."""
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
    """Start one rank, in a new session, so Ctrl-C in the terminal reaches the launcher only."""
    environment = {
        **os.environ,
        "RANK": str(dp_rank),
        "LOCAL_RANK": str(dp_rank),
        "WORLD_SIZE": str(config.parallel.dp),
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
    with open_to_append(log_file(config.out, dp_rank)) as log:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=subprocess.STDOUT)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Return when all ranks have ended, or shortly after the first failure."""
    deadline = math.inf
    while time.monotonic() < deadline and None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)


def _kill(rank: subprocess.Popen[bytes]) -> None:
    """Kill a rank that did not end well, with its process group: child processes could outlive it."""
    if rank.poll() != 0:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def _failure(folder: Path, run_folder: Path, dp_rank: int, code: int) -> tuple[int, float, str]:
    """Why a rank failed, after two numbers that sort the cause before its consequences on other ranks.

    Our own errors come first, then deaths, then the exceptions of ranks that waited for another one.
    """
    output = f"; its output is in {log_file(run_folder, dp_rank)}"
    resume = "; run the same command again to resume"
    file = _error_file(folder, dp_rank)
    if not file.exists():
        ended = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        return 1, 0.0, f"rank {dp_rank} {ended} and reported no error{output if dp_rank else ''}{resume}"
    error = json.loads(file.read_text())
    if error["is_ours"]:
        return 0, error["time"], f"rank {dp_rank}: {error['message']}"
    return 2, error["time"], f"rank {dp_rank}: {error['message']}{output}{resume}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def _error_file(folder: Path, dp_rank: int) -> Path:
    return folder / f"error-{dp_rank}.json"
