"""Faults of Ray, tried with `--ray` because each takes minutes: a part of a Ray on this machine dies during a run.

Even cases have a restart left, and the command goes on by itself. Odd ones have none: the command ends with a sentence
that says what died, and the same command, by the local launcher, resumes.
"""

from contextlib import suppress
from functools import partial

import psutil

from fault_kinds import kind
from fault_runs import Case, Command, LostError, UnclearError, check_finished, check_refused, num_rounds

RAY_SECONDS = 900.0  # longer is a hang
PARTS = {
    "a rank": ("ray::RayTrainWorker", "rank "),
    "Ray's Train controller": ("ray::TrainController", "TrainController died"),
    "the raylet": ("/raylet", "raylet or GCS died"),
    "the GCS": ("/gcs_server", "raylet or GCS died"),
}


def _kill_part(case: Case, process: str, words: str) -> None:
    restarts = 1 - case.number % 2
    options = ("--launcher", "ray", "--parallel.dp", "2", "--store.backend", "sqlite", "--max-restarts", str(restarts))
    command = case.start(*options, environment={"PACE": "0.5", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"})
    if not command.wait_for(lambda: num_rounds(case.run) > 0, RAY_SECONDS):
        raise UnclearError(f"the run ended before a part of Ray was killed: {command.end().last}")
    _find(command, process).kill()
    ended = command.end(RAY_SECONDS)
    if ended.code == 0:  # restarted, or the last round was trained before the death was noticed
        check_finished(case.run, case.shared.undisturbed)
    elif restarts:
        raise LostError(f"the run did not go on: {ended.last}")
    else:
        check_refused(ended, words)
        if "run the same command" not in ended.last:
            raise UnclearError(f"no remedy in {ended.last!r}")
        case.finish("--parallel.dp", "2", "--store.backend", "sqlite")


def _find(command: Command, name: str) -> psutil.Process:
    """The last process below a command that has this in its program's path, or in its title in Ray."""
    found = []
    for each in psutil.Process(command.pid).children(recursive=True):
        with suppress(psutil.Error, IndexError):
            if name in each.cmdline()[0]:
                found.append(each)
    if not found:
        raise UnclearError(f"there is no process {name} below the command")
    return found[-1]


for part, (process, words) in PARTS.items():
    kind("ray", f"kill -9 of {part}", 2)(partial(_kill_part, process=process, words=words))
