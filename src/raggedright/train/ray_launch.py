"""Start the ranks of a run on Ray: Ray Train starts them, watches them, and starts them again when one dies.

The driver is the process of the command. It starts TransferQueue and keeps it, shows the run from its events, and
passes Ctrl-C on by the run folder's `stop` file, as the local launcher does. What dies is found in seconds: Ray Train
ends all ranks and starts them again from the last checkpoint, `parallel.max_restarts` times.

The surprise: Ray Train's `fit` runs in a thread of its own, so that Ctrl-C is ours and not Ray's, which would abort.
"""

import os
import sys
import threading
from math import ceil

import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

from raggedright.config.load import with_absolute_paths
from raggedright.config.schema import Config
from raggedright.store.protocol import StoreError
from raggedright.store.ray_node import join_ray
from raggedright.train.follow import Follower, Lines
from raggedright.train.rank import LOGS_FOLDER
from raggedright.train.ray_failures import FAILURES_FILE, FailureLog, failed_run
from raggedright.train.ray_group import GroupConfig
from raggedright.train.ray_rank import run_on_ray
from raggedright.train.ray_store import Keeper
from raggedright.train.stop import passing_on_signals
from raggedright.train.world import TrainError, group_timeout, loopback

RAY_FOLDER = "ray"
LOOK_SECONDS = 0.2
PASSED_ON = ("GLOO_", "NCCL_", "TQ_")  # what of the driver's environment the ranks get


def launch_on_ray(config: Config) -> None:
    """Run all ranks of the run whose folder holds its config, to their end."""
    config = with_absolute_paths(config)
    (config.out / LOGS_FOLDER).mkdir(exist_ok=True)
    was_joined = ray.is_initialized()
    keeper = None
    try:
        join_ray(config.parallel.address, _num_cpus(config))
        keeper = Keeper(config) if config.store_backend == "transfer_queue" else None
        _run(config, keeper)
    except StoreError as error:
        raise TrainError(f"parallel.launcher is ray: {error}") from None
    finally:
        if keeper is not None:
            keeper.close()
        if not was_joined:
            ray.shutdown()  # and with it whatever of the run is left on the cluster


def _num_cpus(config: Config) -> int:
    """What the run takes, as Ray counts it."""
    store = config.store.storage_units + 1 if config.store_backend == "transfer_queue" else 0
    return ceil(config.parallel.dp * config.parallel.cpus_per_rank) + store


def _run(config: Config, keeper: Keeper | None) -> None:
    """Have Ray Train run the ranks, and look after the store and the progress meanwhile."""
    failed: list[Exception] = []

    def fit() -> None:
        try:
            _trainer(config).fit()
        except Exception as error:
            failed.append(error)

    follower, failures = Follower(config), Lines(config.out / LOGS_FOLDER / FAILURES_FILE)
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    try:
        with passing_on_signals(config.out):
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
                follower.look()
                for line in failures.new():
                    follower.say(line)
                if keeper is not None and (words := keeper.mend()):
                    follower.say(words)
    finally:
        follower.close()
    for error in failed:
        raise failed_run(config, error) if isinstance(error, TrainingFailedError) else error


def _trainer(config: Config) -> TorchTrainer:
    parallel = config.parallel
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(parallel.start_timeout)
    resources = {"CPU": parallel.cpus_per_rank} | ({"GPU": parallel.gpus_per_rank} if parallel.gpus_per_rank else {})
    given = {
        "folder": str(config.out),
        "working_folder": os.getcwd(),
        "path": os.pathsep.join(sys.path),
        "store": config.store_backend,
    }
    return TorchTrainer(
        run_on_ray,
        train_loop_config=given,
        torch_config=GroupConfig(
            backend="nccl" if parallel.gpus_per_rank else "gloo", timeout_s=int(group_timeout(config).total_seconds())
        ),
        scaling_config=ScalingConfig(
            num_workers=parallel.dp,
            use_gpu=parallel.gpus_per_rank > 0,
            resources_per_worker=resources,
            placement_strategy=parallel.placement.upper(),
        ),
        run_config=RunConfig(
            name=RAY_FOLDER,
            storage_path=str(config.out),
            failure_config=FailureConfig(
                max_failures=parallel.max_restarts, controller_failure_limit=parallel.max_restarts
            ),
            worker_runtime_env={"env_vars": _environment()},
            logging_config=LoggingConfig(log_level="ERROR"),
            callbacks=[FailureLog(config.out / LOGS_FOLDER / FAILURES_FILE)],
        ),
    )


def _environment() -> dict[str, str]:
    """What ranks find in their environment; on a cluster of one machine they talk over loopback."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    if ray.util.get_node_ip_address().startswith("127."):
        passed.setdefault("GLOO_SOCKET_IFNAME", loopback())
    return passed
