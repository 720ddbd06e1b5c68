"""Checkpoints: everything that a run needs to continue after a round, in `checkpoints/round-000120`.

Every rank writes its part (torch's distributed checkpoint) into a new folder, which is synced and then renamed, so a
folder of that name is complete and never changes; what a crash left incomplete is removed at the next start. A model
can be loaded on a different number of ranks, sharded or not. `state.json` has the round, the id of the run, the step
counts of the optimizers, the number of prompts drawn so far, the config, the SHA-256 of every other file and that of
its own contents; a folder that does not match it, or that another run wrote, is refused before anything is loaded.

Note: the rest are models and optimizers; with LoRA, of the actor only the adapter and its optimizer. Data order,
sampling and the schedule are functions of the seed, the round and, with dynamic sampling, the number of prompts drawn;
the rows of later rounds are in the store. Loading unpickles: resume only runs that you trust.
"""

import hashlib
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    OptimizerStateType,
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raggedright.config.load import dump_config
from raggedright.files import disk_fault, file_digest, sync, write_file
from raggedright.train.setup import RUN_ID_FILE, Setup, run_id
from raggedright.train.update import Learner
from raggedright.train.world import TrainError

CHECKPOINTS_FOLDER, STATE_FILE, NEW = "checkpoints", "state.json", ".new"
_NAME = re.compile(r"round-(\d{6,})")


class CheckpointState(BaseModel):
    """The contents of `state.json`."""

    model_config = ConfigDict(extra="forbid")

    round: int
    run: str  # its id
    optimizer_steps: dict[str, int]  # by learner
    prompts_drawn: int = 0  # by all rounds so far
    config: str  # as TOML
    sha256: dict[str, str]  # of every other file, by name
    state_sha256: str = ""  # of everything above

    def digest(self) -> str:
        """What `state_sha256` should be."""
        return hashlib.sha256(self.model_dump_json(exclude={"state_sha256"}).encode()).hexdigest()


def checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run and their rounds, oldest first."""
    folder = run_folder / CHECKPOINTS_FOLDER
    return sorted((int(match[1]), path) for path in folder.glob("round-*") if (match := _NAME.fullmatch(path.name)))


def last_checkpoint(run_folder: Path) -> tuple[int, Path] | None:
    """The newest complete checkpoint of a run, and its round."""
    return next(reversed(checkpoints(run_folder)), None)


def read_state(folder: Path) -> CheckpointState:
    """The state of a checkpoint; a TrainError if it is not as it was written, or not that of the folder's round."""
    if not (folder / STATE_FILE).is_file():
        raise _refusal(folder, f"it has no {STATE_FILE}")
    try:
        state = CheckpointState.model_validate_json((folder / STATE_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise _refusal(folder, _state_cause(error)) from None
    if state.state_sha256 != state.digest():
        raise _refusal(folder, f"{STATE_FILE} was altered after it was written")
    if folder.name != _name(state.round):
        raise _refusal(folder, f"{STATE_FILE} is that of {_name(state.round)}, the folder was copied or renamed")
    return state


def check_files(folder: Path) -> CheckpointState:
    """Compare a checkpoint with what was written and with the run; a TrainError names the file that differs."""
    state, run_folder = read_state(folder), folder.parent.parent
    if (run_folder / RUN_ID_FILE).exists() and (run := run_id(run_folder)) != state.run:
        both = f"{STATE_FILE} is of the run {state.run:.12} and {RUN_ID_FILE} has {run:.12}"
        raise _refusal(folder, f"{both} (if that file is wrong, remove it)")
    try:
        damaged = [name for name, digest in state.sha256.items() if file_digest(folder / Path(name).name) != digest]
    except OSError as error:
        raise _refusal(folder, _state_cause(error)) from None
    if damaged:
        raise _refusal(folder, f"{damaged[0]} was altered after it was written")
    return state


def restore_run_id(run_folder: Path) -> None:
    """Write the id of a run again if its file is missing and a checkpoint has it."""
    last = last_checkpoint(run_folder)
    if last and not (run_folder / RUN_ID_FILE).exists():
        write_file(run_folder / RUN_ID_FILE, f"{read_state(last[1]).run}\n".encode())


def _name(round: int) -> str:
    return f"round-{round:06}"


def _refusal(folder: Path, cause: str) -> TrainError:
    return TrainError(f"{folder} cannot be loaded: {cause}; {_older(folder)}")


def _state_cause(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename).name}: {error.strerror}"
    first = error.errors()[0]
    return ": ".join((STATE_FILE, *map(str, first["loc"]), first["msg"]))


def _older(folder: Path) -> str:
    """What to do about a checkpoint that cannot be loaded."""
    before = [path for _, path in checkpoints(folder.parent.parent) if path.name < folder.name]
    if before:
        return f"remove that folder, and the same command resumes from {before[-1].name}"
    return "it is the only checkpoint; start again with --fresh"


def save_checkpoint(setup: Setup, round: int) -> None:
    """Write the checkpoint of a trained round, on every rank; then remove those that are too old."""
    config, world = setup.config, setup.world
    folder = config.out / CHECKPOINTS_FOLDER
    new, done = folder / NEW, folder / _name(round)
    if done.exists():
        return
    problem = ""
    if world.is_first:
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
        except OSError as error:
            problem = _cause(error)
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
        for _, path in checkpoints(config.out)[: -config.checkpoint.keep]:
            shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(setup: Setup, folder: Path, optimizer_steps: Mapping[str, int]) -> None:
    """Load a checkpoint into this rank's models and optimizers."""
    if missing := [learner.name for learner in _learners(setup) if learner.name not in optimizer_steps]:
        raise _refusal(folder, f"{STATE_FILE} has no optimizer_steps of the {missing[0]}")
    states = _states(setup)
    try:
        with _quiet():
            load(states, checkpoint_id=folder, no_dist=setup.world.dp_size == 1)
    except (OSError, CheckpointException, ValueError, RuntimeError) as error:
        raise _refusal(folder, _cause(error)) from error
    for learner in _learners(setup):
        model, optimizer = (states[f"{learner.name} {part}"] for part in ("model", "optimizer"))
        for group in optimizer["param_groups"]:
            group |= learner.kernel  # the run that wrote it may have been sharded differently
        set_state_dict(
            learner.model,
            learner.optimizer,
            model_state_dict=model,
            optim_state_dict=cast(OptimizerStateType, optimizer),
            options=StateDictOptions(strict=not setup.config.has_adapter),
        )
        learner.num_steps = optimizer_steps[learner.name]


def remove_unfinished(run_folder: Path) -> None:
    """Remove what a crash left incomplete."""
    shutil.rmtree(run_folder / CHECKPOINTS_FOLDER / NEW, ignore_errors=True)


def _learners(setup: Setup) -> list[Learner]:
    return [setup.actor, *([setup.critic] if setup.critic else [])]


def _states(setup: Setup) -> dict[str, Any]:
    states = {}
    for learner in _learners(setup):
        model, optimizer = get_state_dict(learner.model, learner.optimizer)
        if setup.config.has_adapter:  # under every name: torch's ignore_frozen_params keeps tied weights
            parameters = learner.model.named_parameters(remove_duplicate=False)
            frozen = {name for name, parameter in parameters if not parameter.requires_grad}
            model = {name: weight for name, weight in model.items() if name not in frozen}
        states |= {f"{learner.name} model": model, f"{learner.name} optimizer": optimizer}
    return states


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning that a single process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _finish(setup: Setup, new: Path, done: Path, round: int) -> None:
    """Make a written folder durable, and give it its final name."""
    steps = {learner.name: learner.num_steps for learner in _learners(setup)}
    digests = {path.name: file_digest(path) for path in sorted(new.iterdir())}
    for name in digests:
        sync(new / name)
    state = CheckpointState(
        round=round,
        run=run_id(setup.config.out),
        optimizer_steps=steps,
        prompts_drawn=setup.prompts.num_drawn,
        config=dump_config(setup.config),
        sha256=digests,
    )
    state.state_sha256 = state.digest()
    write_file(new / STATE_FILE, state.model_dump_json().encode())
    new.rename(done)
    sync(done.parent)


def _cause(error: BaseException) -> str:
    """The first error in one line; torch wraps the failure of any rank."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(inner)}"
    return disk_fault(error) or f"{type(error).__name__}: {error}".splitlines()[0]
