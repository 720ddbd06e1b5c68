"""The driver of a run on Ray: Ray Train starts the ranks, watches them, and starts them again when one dies.

The driver starts TransferQueue and keeps it, shows the run from its events, and passes Ctrl-C on through the run
folder's `stop` file, as the local launcher does. When a rank dies, Ray Train ends all ranks within seconds and starts
them again from the last checkpoint, up to `parallel.max_restarts` times. The process that starts TransferQueue takes it
down when it dies, so that is the driver and never a rank: a rank that is started again finds the rows of the others.

The command runs the driver in a separate process (`run_driver`), because Ray ends the process of its driver when Ray
itself dies. If Ray failed and not the run (its Train controller, a raylet or the GCS died), a new driver resumes from
the last checkpoint, with the same limit; what the old one had on the cluster ends with it.

Note: Ray Train's `fit` runs in a thread, so Ctrl-C reaches us and not Ray, which would abort.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import ray
from ray.exceptions import RayError
from ray.train import (
    ControllerError,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from raggedright.config.load import load_config, with_absolute_paths
from raggedright.config.schema import Config
from raggedright.errors import RaggedRightError
from raggedright.files import open_to_append
from raggedright.store.ray_queue import join_ray
from raggedright.store.session_store import StoreError
from raggedright.store.transfer_queue import TransferQueueStore
from raggedright.train.progress import Follower, NewLines
from raggedright.train.rank import CONFIG_FILE, LOGS_FOLDER, end_with_launcher, log_file, restarting
from raggedright.train.ray_rank import FailureLog, GroupConfig, error_line, rank_failure_text, run_on_ray
from raggedright.train.setup import open_queue
from raggedright.train.stop import passing_on_signals
from raggedright.train.world import TrainError, group_timeout, loopback

RAY_FOLDER, FAILURES_FILE = "ray", "failures.log"
POLL_SECONDS = 0.2
RESTART_SECONDS = 60.0  # to start a new store, before another place is tried
PASSED_ON = ("GLOO_", "NCCL_", "TQ_")  # environment variables of the driver that the ranks get
DRIVER_PROGRAM = "import sys; from raggedright.train.ray_driver import driver_main; sys.exit(driver_main())"


def run_driver(config: Config) -> None:
    """Run the driver in a separate process, and start it again if Ray died, to the end of the run."""
    with passing_on_signals(config.out):
        failure = restarting(config, "the driver", _run_driver_once)
    if failure is not None:
        raise TrainError(f"{failure}; start Ray again if it was started apart, and run the same command to resume")


def _run_driver_once(config: Config) -> str | None:
    """Run one driver to its end; how Ray ended it, or None. An error of the run itself is raised."""
    with TemporaryDirectory(prefix="raggedright-") as name:  # only this user can open it
        file = Path(name) / "error.json"
        # Not `-m`: classes of __main__ would be pickled by value.
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER_PROGRAM, str(config.out), str(file)], start_new_session=True
        )
        try:
            code = driver.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)  # what is left of a Ray that it started
        if code == 0:
            return None
        if not file.exists():
            return f"Ray ended the driver (exit code {code}): its raylet or GCS died, see Ray's logs"
        error = json.loads(file.read_text())
    if error["by_ray"]:
        return str(error["message"])
    raise TrainError(error["message"])


def driver_main() -> int:
    """The program of the driver's process; an error goes to the file that the command named."""
    end_with_launcher()
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours what its raylet says, in a pipe, too
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        launch_on_ray(load_config(folder / CONFIG_FILE, {"out": folder}))
    except Exception as error:
        by_ray = isinstance(error, RayError)
        message = str(error)
        if by_ray:
            part = re.search(r"class_name: (\w+)", message)
            message = f"Ray's {part[1]} died" if part else f"Ray failed: {' '.join(message.split()):.200}"
        elif not isinstance(error, RaggedRightError):
            with open_to_append(log_file(folder, 0)) as log:
                log.write(traceback.format_exc().encode())
            message = f"{type(error).__name__}: {message}; its traceback is in {log_file(folder, 0)}"
        file.write_text(json.dumps({"by_ray": by_ray, "message": message}))
        return 1
    return 0


def launch_on_ray(config: Config) -> None:
    """Run all ranks of the run whose folder holds its config, to their end."""
    config = with_absolute_paths(config)
    (config.out / LOGS_FOLDER).mkdir(exist_ok=True)
    was_joined = ray.is_initialized()
    parallel, has_queue = config.parallel, config.store_backend == "transfer_queue"
    queue = None
    try:
        num_cpus = ceil(parallel.dp * parallel.cpus_per_rank) + (config.store.storage_units + 1 if has_queue else 0)
        join_ray(parallel.address, num_cpus)
        queue = QueueKeeper(config) if has_queue else None
        _run(config, queue)
    except StoreError as error:
        raise TrainError(f"parallel.launcher is ray: {error}") from None
    finally:
        if queue is not None:
            queue.close()
        if not was_joined:
            ray.shutdown()  # ends what is left of the run on the cluster


def _run(config: Config, queue: "QueueKeeper | None") -> None:
    """Have Ray Train run the ranks; meanwhile show the progress and watch the store."""
    errors: list[Exception] = []

    def fit() -> None:
        try:
            _trainer(config).fit()
        except Exception as error:
            errors.append(error)

    follower, failures = Follower(config), NewLines(config.out / LOGS_FOLDER / FAILURES_FILE)
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    try:
        with passing_on_signals(config.out):
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                follower.poll()
                for line in failures.read():
                    follower.say(line)
                if queue is not None and (text := queue.restart_if_dead()):
                    follower.say(text)
    finally:
        follower.close()
    for error in errors:
        raise _run_error(config, error) if isinstance(error, TrainingFailedError) else error


def _trainer(config: Config) -> TorchTrainer:
    parallel = config.parallel
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(parallel.start_timeout)
    resources = {"CPU": parallel.cpus_per_rank} | ({"GPU": parallel.gpus_per_rank} if parallel.gpus_per_rank else {})
    return TorchTrainer(
        run_on_ray,
        train_loop_config={
            "folder": str(config.out),
            "working_folder": os.getcwd(),
            "path": os.pathsep.join(sys.path),
            "store": config.store_backend,
        },
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
            worker_runtime_env={"env_vars": _rank_environment()},
            logging_config=LoggingConfig(log_level="ERROR"),
            callbacks=[FailureLog(config.out / LOGS_FOLDER / FAILURES_FILE)],
        ),
    )


def _rank_environment() -> dict[str, str]:
    """Environment variables of the ranks; on a cluster of one machine they talk over loopback."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    if ray.util.get_node_ip_address().startswith("127."):
        variables.setdefault("GLOO_SOCKET_IFNAME", loopback())
    return variables


def _run_error(config: Config, error: TrainingFailedError) -> TrainError:
    """The error of a run that Ray Train gave up."""
    if isinstance(error, WorkerGroupError):
        is_ours = any(isinstance(each, RaggedRightError) for each in error.worker_failures.values())
        resume = "" if is_ours else "; run the same command again to resume"  # our own errors have their remedy
        return TrainError(f"{rank_failure_text(error.worker_failures)}{resume}")
    cause = error.controller_failure if isinstance(error, ControllerError) else error
    if isinstance(cause, WorkerGroupStartupTimeoutError):
        parallel = config.parallel
        resources = f"{parallel.cpus_per_rank:g} CPUs and {parallel.gpus_per_rank:g} GPUs each"
        return TrainError(
            f"Ray had no room for {parallel.dp} ranks of {resources} in {parallel.start_timeout:g} s; add nodes, lower "
            "parallel.dp, or raise parallel.start_timeout"
        )
    return TrainError(f"Ray Train could not run the ranks: {error_line(cause)}")


class QueueKeeper:
    """Keeps TransferQueue alive for the ranks.

    If one of its actors dies, a new and empty one is started; ranks wait for it, resume from the last checkpoint and
    run the sessions again.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = self._start(config.parallel.start_timeout)

    def restart_if_dead(self) -> str:
        """Start a new store if a part of it is dead; returns what to report, or an empty string."""
        dead = self._store.dead()
        if not dead:
            return ""
        with suppress(StoreError):
            self._store.close()
        deadline = time.monotonic() + self._config.parallel.start_timeout
        parts = " and ".join(dead)
        while True:
            try:
                self._store = self._start(RESTART_SECONDS)
            except StoreError as error:  # Ray may not know yet that a node is gone, or not have a new one yet
                if time.monotonic() >= deadline:
                    raise TrainError(f"the store's {parts} died, and a new store cannot start: {error}") from None
            else:
                return f"the store's {parts} died, and with it the rows of the store; started a new one"

    def close(self) -> None:
        """End TransferQueue."""
        with suppress(StoreError):
            self._store.close()

    def _start(self, timeout: float) -> TransferQueueStore:
        store = open_queue(self._config, run="driver", attach=False, timeout=timeout)
        if not store.owns_queue:
            raise TrainError(
                "another program's TransferQueue is on this Ray, which can have one; wait for its end, or set "
                "parallel.address to another Ray"
            )
        return store
