"""The training loop, the same on every rank.

Invariants: a round is trained once, or again from the checkpoint before it; the rows of a round leave the store only
when a checkpoint contains the round; a run that is not killed ends with an event that says how it ended; the last good
checkpoint stays; engine and store are closed, also after an error while the run starts.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

from raggedright.arrays import mean_of
from raggedright.config.schema import Config
from raggedright.errors import RaggedRightError
from raggedright.files import disk_fault
from raggedright.sessions import SessionTable
from raggedright.store.memory import MemoryStore
from raggedright.store.session_store import prune
from raggedright.train.checkpoint import (
    check_files,
    checkpoints,
    last_checkpoint,
    load_checkpoint,
    remove_unfinished,
    restore_run_id,
    save_checkpoint,
)
from raggedright.train.lora import merged_copy, save_adapter
from raggedright.train.record import RunRecorder
from raggedright.train.setup import Setup, set_up
from raggedright.train.stop import StopRequest
from raggedright.train.train_round import Clock, sample_round, train_round
from raggedright.train.vision_models import save_vision
from raggedright.train.world import TrainError, World

MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"


def train(config: Config, world: World) -> str:
    """Train from the first round to the last; returns how the run ended: finished or interrupted."""
    try:
        return _train(config, world)
    except RaggedRightError:
        raise
    except Exception as error:
        fault = disk_fault(error)
        if fault is None:
            raise
        last = last_checkpoint(config.out)
        good = f"the last checkpoint, of round {last[0]}, is good" if last else "there is no checkpoint yet"
        free = shutil.disk_usage(config.out).free
        raise TrainError(
            f"{config.out}: {fault}, {free:,} bytes are free; {good}; make room, and run the same command again"
        ) from error


def _train(config: Config, world: World) -> str:
    if world.is_first:
        restore_run_id(config.out)
    with closing(set_up(config, world)) as setup:
        last_round, sessions_found = resume(setup)
        recorder = RunRecorder(setup, first_round=last_round + 1, sessions_found=sessions_found)
        return _run(setup, recorder, last_round + 1)


def _run(setup: Setup, recorder: RunRecorder, first_round: int) -> str:
    """Train the rounds, then save; the last event says how that ended."""
    stop = StopRequest(setup.config.out, lambda: setup.runner.cancel(record=False))
    reason = "failed"
    try:
        trained = _train_rounds(setup, recorder, stop, first_round)
        if recorder.rounds_done:
            save(setup, recorder, recorder.rounds_done)
            export(setup)
        reason = trained  # not before the last checkpoint and the model are written
    finally:
        stop.close()
        with suppress(OSError) if reason == "failed" else nullcontext():  # the first error says more
            recorder.end(reason)
    return reason


def _train_rounds(setup: Setup, recorder: RunRecorder, stop: StopRequest, first_round: int) -> str:
    config = setup.config
    for round in range(first_round, config.train.rounds + 1):
        clock = Clock()
        with clock("rollout"):
            sampled = sample_round(setup, round, recorder.session_done(round), is_stopped=lambda: stop.requested)
            if sampled is None:
                return "interrupted"
        recorder.round(round, train_round(setup, round, sampled, clock))
        if config.eval.every and (round % config.eval.every == 0 or round == config.train.rounds):
            recorder.evaluation(round, evaluate(setup, round))
        if round % config.checkpoint.every == 0:
            save(setup, recorder, round)
    return "finished"


def resume(setup: Setup) -> tuple[int, dict[int, int]]:
    """Load the last checkpoint: its round (0 without one), and the number of finished sessions of each later round.

    The first rank finds the checkpoint and broadcasts it before any rank starts a session.
    """
    state = None
    if setup.world.is_first:
        remove_unfinished(setup.config.out)
        round, folder = last_checkpoint(setup.config.out) or (0, Path())
        saved = check_files(folder) if round else None
        steps, num_drawn = (saved.optimizer_steps, saved.prompts_drawn) if saved else ({}, 0)
        sessions = {number: count for number, count in setup.store.rounds().items() if number > round}
        state = round, folder, steps, num_drawn, sessions
    round, folder, steps, setup.prompts.num_drawn, sessions = setup.world.from_first(state)
    if round:
        load_checkpoint(setup, folder, steps)
        setup.publish_weights(version=round)
    return round, sessions


def evaluate(setup: Setup, round: int) -> dict[str, float]:
    """One greedy session on each of a fixed set of tasks; its rows train nothing and are not kept.

    Returns means over the sessions, the same on every rank; a failed session scores zero and is counted.
    """
    world = setup.world
    tasks = setup.eval_tasks.of_round(1, setup.config.eval.prompts)
    with MemoryStore() as store:
        share = [(task, 0) for task in world.share(tasks)]
        rank_sessions = setup.runner.run(store, round=round, sessions=share, greedy=True)
    table = SessionTable.join(world.gather(rank_sessions))
    return {
        "eval/score/mean": mean_of(table.scores("zero").score),
        "eval/failed": float(table.failed.sum()),
        **table.mean_metrics("eval"),
    }


def save(setup: Setup, recorder: RunRecorder, round: int) -> None:
    """Write a checkpoint, and delete the rows that every kept checkpoint contains.

    The events of its rounds are on disk before it is, so no checkpoint is ahead of the record of its run.
    """
    recorder.sync()
    save_checkpoint(setup, round)
    if setup.world.is_first:
        oldest, _ = checkpoints(setup.config.out)[0]
        prune(setup.store, durable_round=oldest, keep_rounds=setup.config.store.keep_rounds)


def export(setup: Setup) -> None:
    """Write the trained model in transformers' format, replacing an earlier one; with LoRA, merged, and the adapter."""
    if not setup.world.is_first:
        return
    model = setup.full_model
    if setup.config.has_adapter:
        with _replacing(setup.config.out / ADAPTER_FOLDER) as folder:
            save_adapter(model, folder)
        model = merged_copy(model)
    with _replacing(setup.config.out / MODEL_FOLDER) as folder:
        model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
        setup.tokenizer.save_pretrained(folder)
        if setup.vision:
            save_vision(setup.vision, setup.config.model.path, folder)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yields the name of a new folder, which replaces the old one when it has been written."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    yield new
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
