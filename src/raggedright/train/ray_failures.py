"""What went wrong on ranks of Ray Train, in a sentence: the rank that failed first in our words, not in Ray's.

When a rank dies, the others fail too, since they wait for it; what they say is left out where there is a better cause.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from ray.exceptions import ActorUnavailableError, RayActorError
from ray.train import ControllerError, TrainingFailedError, UserCallback, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError

from raggedright.config.schema import Config
from raggedright.errors import RaggedRightError
from raggedright.train.world import TrainError

FAILURES_FILE = "failures.log"


class FailureLog(UserCallback):
    """Writes each failure of the ranks to a file, in Ray Train's controller; the driver shows it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_exception(self, run_context: object, worker_exceptions: dict[int, Exception]) -> None:
        """Some ranks failed; Ray Train starts all of them again, or gives up."""
        with self.path.open("a") as file:
            file.write(f"{rank_words(worker_exceptions)}\n")


def rank_words(failures: Mapping[int, BaseException]) -> str:
    """Which rank failed first, as far as that can be told, and why."""
    rank, error = min(failures.items(), key=lambda item: (_rank_of(item[1]), item[0]))
    if isinstance(error, RaggedRightError):
        return f"rank {rank}: {error}"
    if isinstance(error, WorkerHealthCheckFailedError):
        return f"rank {rank} died: {_death(error.health_check_failure)}"
    return f"rank {rank}: {_line(error)}; its output is in Ray's logs on its machine"


def failed_run(config: Config, error: TrainingFailedError) -> TrainError:
    """The error of a run that Ray Train gave up."""
    if isinstance(error, WorkerGroupError):
        return TrainError(rank_words(error.worker_failures))
    cause = error.controller_failure if isinstance(error, ControllerError) else error
    if isinstance(cause, WorkerGroupStartupTimeoutError):
        parallel = config.parallel
        each = f"{parallel.cpus_per_rank:g} CPUs and {parallel.gpus_per_rank:g} GPUs each"
        return TrainError(
            f"Ray had no room for {parallel.dp} ranks of {each} in {parallel.start_timeout:g} s; add nodes, lower "
            "parallel.dp, or raise parallel.start_timeout"
        )
    return TrainError(f"Ray Train could not run the ranks: {_line(cause)}")


def _rank_of(error: BaseException) -> int:
    """How near an error is to the cause: our own words, a death, anything else."""
    if isinstance(error, RaggedRightError):
        return 0
    return 1 if isinstance(error, WorkerHealthCheckFailedError | RayActorError) else 2


def _death(error: BaseException) -> str:
    """What Ray knows of a process's death, without its advice."""
    if isinstance(error, ActorUnavailableError):
        return "its process or its node cannot be reached any more"
    words = " ".join(str(error).split())
    node, cause = re.search(r"\bip: (\S+)", words), re.search(r"because (its [^.]*)", words)
    if not cause:
        return _line(error)
    return cause[1] + (f", on {node[1]}" if node else "")


def _line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}"
