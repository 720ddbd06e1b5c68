"""One rank of a run: `python -m raggedright.train.rank RUN_FOLDER`, started by the launcher.

Also what the launchers of local ranks and of Ray's driver share: the log files, and restarts after a failure.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from raggedright.config.load import load_config, with_absolute_paths
from raggedright.config.schema import Config
from raggedright.errors import RaggedRightError
from raggedright.files import open_to_append
from raggedright.train.loop import train
from raggedright.train.world import join_world

CONFIG_FILE = "config.toml"
LOGS_FOLDER = "logs"
ERROR_VARIABLE = "RAGGEDRIGHT_ERROR_FILE"  # where the launcher reads the error from
LAUNCHER_VARIABLE = "RAGGEDRIGHT_LAUNCHER"  # its process id
PR_SET_PDEATHSIG = 1


def run_rank(folder: Path, cuda: torch.device | None = None) -> str:
    """Train as this process's rank of the run whose config is in the folder; returns how the run ended."""
    disable_progress_bar()  # of transformers; the run shows its own
    config = with_absolute_paths(load_config(folder / CONFIG_FILE, {"out": folder}))  # as this process sees it
    world = join_world(config, cuda)
    try:
        return train(config, world)
    finally:
        world.leave()


def main() -> int:
    """Run this rank; its error goes to the file that the launcher named, an unexpected traceback to its log.

    The first rank shares the launcher's terminal: what it raises because another rank died would hide the cause.
    """
    end_with_launcher()
    folder = Path(sys.argv[1])
    try:
        run_rank(folder)
    except RaggedRightError as error:
        _report(error)
        return 1
    except Exception as error:
        _report(error)
        if ERROR_VARIABLE not in os.environ or os.environ["RANK"] != "0":
            raise
        with open_to_append(log_file(folder, 0)) as log:
            log.write(traceback.format_exc().encode())
        return 1
    return 0


def log_file(folder: Path, dp_rank: int) -> Path:
    """Where a rank's output goes; only tracebacks for the first rank, which writes to the terminal."""
    return folder / LOGS_FOLDER / f"rank-{dp_rank}.log"


def _report(error: Exception) -> None:
    is_ours = isinstance(error, RaggedRightError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    if file := os.environ.get(ERROR_VARIABLE):
        Path(file).write_text(json.dumps({"is_ours": is_ours, "message": message, "time": time.time()}))
    elif is_ours:  # started by torchrun
        print(f"raggedright: {message}", file=sys.stderr)


def restarting(config: Config, what: str, run_once: Callable[[Config], str | None]) -> str | None:
    """Run until there is no failure, at most `parallel.max_restarts` times more; the last failure, or None."""
    restarts = config.parallel.max_restarts
    failure = run_once(config)
    for restart in range(1, restarts + 1):
        if failure is None:
            break
        print(f"{failure}; starting {what} again ({restart} of {restarts} restarts)", flush=True)
        failure = run_once(config)
    return failure


def end_with_launcher() -> None:
    """Have Linux end this process when the launcher dies, in whatever way: no rank may train unattended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher and os.getppid() != int(launcher):
        sys.exit("the launcher has died")


if __name__ == "__main__":
    sys.exit(main())
