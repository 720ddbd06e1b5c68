"""One rank of a run: `python -m raggedright.train.rank RUN_FOLDER`, started by the launcher."""

import ctypes
import gc
import signal
import sys
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from transformers.utils.logging import disable_progress_bar

from raggedright.config.load import load_config
from raggedright.errors import RaggedRightError
from raggedright.train.loop import train
from raggedright.train.world import join_world

CONFIG_FILE = "config.toml"
LOGS_FOLDER = "logs"
PR_SET_PDEATHSIG = 1


def run_rank(folder: Path, cuda: torch.device | None = None) -> str:
    """Train as this process's rank of the run whose config is in the folder; how it ended."""
    disable_progress_bar()  # of transformers; the run's own is enough
    config = load_config(folder / CONFIG_FILE, {"out": folder})  # as this process sees it
    world = join_world(config, cuda)
    gc.collect()
    gc.freeze()  # what the imports made lives as long as the process: not worth looking at again
    try:
        return train(config, world)
    finally:
        world.leave()


def main() -> int:
    """What goes wrong is left for the launcher in the file that it named; a fault of ours is a traceback, too."""
    _end_with_launcher()
    handler = get_error_handler()
    handler.initialize()
    try:
        run_rank(Path(sys.argv[1]))
    except RaggedRightError as error:
        handler.record_exception(error)
        return 1
    except Exception as error:
        handler.record_exception(error)
        raise
    return 0


def _end_with_launcher() -> None:
    """Have Linux end this process when the launcher dies, however it does: no rank is to train on unseen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
