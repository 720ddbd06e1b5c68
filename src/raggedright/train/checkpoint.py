"""Checkpoints: all that a run needs to go on after a round, in `checkpoints/round-000120`.

Every rank writes its part (torch's distributed checkpoint) into a new folder, which is synced and then renamed, so
that a folder of that name is whole and never changes; what a crash left half-way is removed at the next start. A model
may be loaded on another number of ranks, sharded or not.

The surprise: only models and optimizers are in it. Data order, sampling and the schedule are functions of the seed and
the round, and the rows of later rounds are in the store. Loading unpickles: resume only runs that you trust.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import OptimizerStateType, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raggedright.train.optimizer import Learner
from raggedright.train.setup import Setup
from raggedright.train.world import TrainError

CHECKPOINTS_FOLDER, STATE_FILE, NEW = "checkpoints", "state.json", ".new"
_NAME = re.compile(r"round-(\d{6,})")


def last_checkpoint(run_folder: Path) -> tuple[int, Path] | None:
    """The newest whole checkpoint of a run, and its round."""
    folder = run_folder / CHECKPOINTS_FOLDER
    found = [(int(match[1]), path) for path in folder.glob("round-*") if (match := _NAME.fullmatch(path.name))]
    return max(found, default=None)


def save_checkpoint(setup: Setup, round: int) -> None:
    """Write the checkpoint of a round that has trained, on every rank; then remove those that are too old."""
    config, world = setup.config, setup.world
    folder = config.out / CHECKPOINTS_FOLDER
    new, done = folder / NEW, folder / f"round-{round:06}"
    if done.exists():
        return
    problem = ""
    if world.is_first:
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
        except OSError as error:
            problem = str(error)
    try:
        if not world.any(bool(problem)):
            with _quiet():
                save(_states(setup), checkpoint_id=new, no_dist=world.dp_size == 1)
            if world.is_first:
                _finish(setup, new, done, round)
    except (OSError, CheckpointException) as error:
        problem = _cause(error)
    if world.any(bool(problem)):
        last = last_checkpoint(config.out)
        good = f"the last good one is {last[1]}" if last else "there is none before it"
        raise TrainError(
            f"the checkpoint of round {round} cannot be written to {folder}: {problem or 'another rank failed'}; "
            f"{good}; make room, and run the same command again"
        )
    if world.is_first:
        _prune(folder, keep=config.checkpoint.keep)


def load_checkpoint(setup: Setup, folder: Path) -> None:
    """Give this rank's models and optimizers what the checkpoint has."""
    states = _states(setup)
    try:
        with _quiet():
            load(states, checkpoint_id=folder, no_dist=setup.world.dp_size == 1)
    except (OSError, CheckpointException, ValueError, RuntimeError) as error:
        words = f"{folder} cannot be loaded: {_cause(error)}; remove it to go back to the one before"
        raise TrainError(words) from error
    counts = json.loads((folder / STATE_FILE).read_text())["optimizer_steps"]
    for learner in _learners(setup):
        model, optimizer = (states[f"{learner.name} {part}"] for part in ("model", "optimizer"))
        for group in optimizer["param_groups"]:
            group |= learner.kernel  # the run that wrote it may have been sharded otherwise
        set_state_dict(
            learner.model,
            learner.optimizer,
            model_state_dict=model,
            optim_state_dict=cast(OptimizerStateType, optimizer),
        )
        learner.num_steps = counts[learner.name]


def remove_unfinished(run_folder: Path) -> None:
    """Remove what a crash left half-way."""
    shutil.rmtree(run_folder / CHECKPOINTS_FOLDER / NEW, ignore_errors=True)


def _learners(setup: Setup) -> list[Learner]:
    return [setup.actor, *([setup.critic] if setup.critic else [])]


def _states(setup: Setup) -> dict[str, Any]:
    states = {}
    for learner in _learners(setup):
        model, optimizer = get_state_dict(learner.model, learner.optimizer)
        states |= {f"{learner.name} model": model, f"{learner.name} optimizer": optimizer}
    return states


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _finish(setup: Setup, new: Path, done: Path, round: int) -> None:
    """Make a written folder durable, and give it its name."""
    steps = {learner.name: learner.num_steps for learner in _learners(setup)}
    (new / STATE_FILE).write_text(json.dumps({"round": round, "optimizer_steps": steps}))
    for path in (*new.iterdir(), new):
        _sync(path)
    new.rename(done)
    _sync(done.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(folder: Path, *, keep: int) -> None:
    """Keep the newest ones."""
    names = sorted((path for path in folder.glob("round-*") if _NAME.fullmatch(path.name)), key=lambda path: path.name)
    for path in names[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def _cause(error: BaseException) -> str:
    """What went wrong first, in a line; a failure of any rank is wrapped by torch."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(inner)}"
    return f"{type(error).__name__}: {error}".splitlines()[0]
