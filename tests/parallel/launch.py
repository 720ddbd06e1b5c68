"""Run a function in real gloo processes on loopback, bounded in time.

`launch("module:function", dp, payload)` starts `python -m parallel.launch` once a rank and returns what the function
returned on each; payload and answers are JSON. A rank that fails, or is not done in time, ends the launch: all that
was started is killed by pid, and the error holds each rank's last words. A rank out of time says where it stands.

A rank that dies of a native crash (SIGABRT, SIGSEGV: "malloc(): unaligned tcache chunk detected" was seen once in some
hundred launches of FSDP2 on gloo) says nothing about the claim under test. Such a launch runs a second time, and the
first one's last words are printed, with the Python stack at which it crashed; a second crash fails the test.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).parents[1]
LAST_LINES = 60
START_SECONDS = 120.0  # to import torch and the target and to meet the other ranks; the time-out counts from there
NATIVE_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
GRACE_SECONDS = 5.0  # for the other ranks to fail by themselves, once one has


class RanksFailedError(Exception):
    """Not every rank came to its end."""


class NativeCrashError(RanksFailedError):
    """A rank was killed by a signal that native code raises."""


def launch(target: str, dp: int, payload: object = None, *, timeout: float = 300.0) -> list:
    """What `target` returned on each of `dp` ranks; a launch with a native crash is repeated once."""
    try:
        return _launch(target, dp, payload, timeout=timeout)
    except NativeCrashError as crash:
        print(f"{target} is launched a second time after a native crash:\n{crash}", file=sys.stderr)
        return _launch(target, dp, payload, timeout=timeout)


def _launch(target: str, dp: int, payload: object, *, timeout: float) -> list:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"target": target, "dp": dp, "timeout": timeout, "data": payload}))
        ranks = [_start(folder, dp_rank) for dp_rank in range(dp)]
        try:
            _wait(ranks, time.monotonic() + START_SECONDS + timeout + GRACE_SECONDS)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
        if any(-rank.returncode in NATIVE_CRASHES for rank in ranks):
            raise NativeCrashError(_last_words(folder, ranks))
        if any(rank.returncode for rank in ranks):
            raise RanksFailedError(_last_words(folder, ranks))
        return [json.loads((folder / f"{dp_rank}.json").read_text()) for dp_rank in range(dp)]


def _start(folder: Path, dp_rank: int) -> subprocess.Popen:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    with (folder / f"{dp_rank}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "parallel.launch", str(folder), str(dp_rank)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": loopback,
                "PYTHONFAULTHANDLER": "1",
            },
        )


def _wait(ranks: list[subprocess.Popen], deadline: float) -> None:
    """Until all are done, or the deadline, or a little after the first failure."""
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)


def _last_words(folder: Path, ranks: list[subprocess.Popen]) -> str:
    words = []
    for dp_rank, rank in enumerate(ranks):
        lines = (folder / f"{dp_rank}.log").read_text(errors="replace").splitlines()
        words.append(f"rank {dp_rank} ended with {rank.returncode}; its last words:")
        words += [f"  {line}" for line in lines[-LAST_LINES:]]
    return "\n".join(words)


def limit(seconds: float) -> None:
    """Give this rank so long from now on; then it says where it stands and ends."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def main() -> None:
    """One rank: join the group, run the target, leave its answer in the folder."""
    folder, dp_rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((folder / "job.json").read_text())
    limit(START_SECONDS)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=dp_rank,
        world_size=job["dp"],
        timeout=timedelta(seconds=START_SECONDS + job["timeout"]),
    )
    module, function = job["target"].split(":")
    target = getattr(import_module(module), function)
    dist.barrier()
    limit(job["timeout"])
    answer = target(job["data"])
    (folder / f"{dp_rank}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
