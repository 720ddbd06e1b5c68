"""Start the ranks of a run: one in this process, several by torch's elastic launcher on this machine, or on Ray.

A rank that fails ends the others; its number and its last words are the error. On Ctrl-C the ranks are asked to stop
and the launcher waits for them; a second one ends all at once. Ranks talk over the loopback interface.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from raggedright.agents.load import load_agent
from raggedright.config.schema import Config
from raggedright.errors import ConfigError
from raggedright.train.prompts import load_prompts
from raggedright.train.rank import LOGS_FOLDER, run_rank
from raggedright.train.stop import STOP_FILE, ask_to_stop
from raggedright.train.world import TrainError, loopback, num_threads


def launch(config: Config) -> None:
    """Run all ranks of the run whose folder holds its config, to their end."""
    load_agent(config.agent.name, config.agent.options)  # what is wrong with them is told before any rank starts
    load_prompts(config)
    stop = config.out / STOP_FILE
    stop.unlink(missing_ok=True)  # asked for before there was a run to stop
    try:
        _launch(config)
    finally:
        stop.unlink(missing_ok=True)


def _launch(config: Config) -> None:
    if config.parallel.launcher == "ray":
        try:
            from raggedright.train.ray_launch import launch_on_ray
        except ImportError as error:
            raise ConfigError(
                f"parallel.launcher is ray and needs {error.name}; pip install 'raggedright[ray]'"
            ) from None
        launch_on_ray(config)
        return
    if config.parallel.dp == 1 and not config.parallel.max_restarts:
        run_rank(config.out)
        return
    logs = config.out / LOGS_FOLDER
    logs.mkdir(exist_ok=True)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.parallel.dp,
        run_id=f"raggedright-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=config.parallel.max_restarts,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGHUP",  # Ctrl-C is the ranks' to handle
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, config.parallel.dp), Std.ALL)),
    )
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # we say who failed
    os.environ["OMP_NUM_THREADS"] = str(num_threads(config))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    before = signal.signal(signal.SIGINT, lambda number, frame: ask_to_stop(config.out))
    try:
        elastic_launch(settings, sys.executable)("-m", "raggedright.train.rank", str(config.out))
    except ChildFailedError as error:
        raise TrainError(_last_words(error, logs)) from None
    except SignalException as error:
        raise TrainError(f"the launcher got {error.sigval.name} and ended the ranks") from None
    finally:
        signal.signal(signal.SIGINT, before)


def _last_words(error: ChildFailedError, logs: Path) -> str:
    """Which rank failed first, and why."""
    rank, failure = error.get_first_failure()
    told = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    words = told.get("message") if isinstance(told, dict) else None
    if not words:
        return f"rank {rank} ended without a word: {failure.message}; its output is in {logs}"
    kind, _, sentence = str(words).partition(": ")
    ours = kind in ("TrainError", "ConfigError", "RowsError", "StoreError", "RaggedRightError", "LedgerError")
    return f"rank {rank}: {sentence}" if ours else f"rank {rank}: {words}; its output is in {logs}"
