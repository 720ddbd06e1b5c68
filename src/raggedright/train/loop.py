"""The training loop, the same on every rank.

Invariants: a round is trained on once, or again from the checkpoint before it; a round's rows leave the store only when
a checkpoint contains it; however a run ends, its last line of events says how, and the last good checkpoint stays.
"""

import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

from raggedright.config.schema import Config
from raggedright.errors import RaggedRightError
from raggedright.files import disk_fault
from raggedright.store.protocol import prune
from raggedright.train.checkpoint import (
    check_files,
    checkpoints,
    last_checkpoint,
    load_checkpoint,
    remove_unfinished,
    save_checkpoint,
)
from raggedright.train.clock import Clock
from raggedright.train.evaluate import evaluate
from raggedright.train.eyes import save_vision
from raggedright.train.record import RunRecorder
from raggedright.train.round import sample_round, train_round
from raggedright.train.setup import Setup, set_up
from raggedright.train.stop import Stop
from raggedright.train.world import TrainError, World

MODEL_FOLDER = "model"


def train(config: Config, world: World) -> str:
    """Train from the first round to the last; how it ended: finished or interrupted."""
    try:
        return _train(config, world)
    except RaggedRightError:
        raise
    except Exception as error:
        fault = disk_fault(error)
        if fault is None:
            raise
        raise TrainError(_disk_words(config, fault)) from error


def _train(config: Config, world: World) -> str:
    setup = set_up(config, world)
    last, found = resume(setup)
    first = last + 1
    recorder = RunRecorder(setup, first_round=first, found=found)
    stop = Stop(config.out, lambda: setup.runner.cancel(record=False))
    reason = "failed"
    try:
        reason = _rounds(setup, recorder, stop, first)
        if recorder.rounds_done:
            keep(setup, recorder, recorder.rounds_done)
            export(setup)
    finally:
        stop.close()
        with suppress(OSError) if reason == "failed" else nullcontext():  # the first error says more
            recorder.end(reason)
        setup.close()
    return reason


def _disk_words(config: Config, fault: str) -> str:
    last = last_checkpoint(config.out)
    good = f"the last checkpoint, of round {last[0]}, is good" if last else "there is no checkpoint yet"
    free = shutil.disk_usage(config.out).free
    return f"{config.out}: {fault}, {free:,} bytes are free; {good}; make room, and run the same command again"


def resume(setup: Setup) -> tuple[int, dict[int, int]]:
    """Go back to the last checkpoint: its round, 0 without one, and how many sessions of each later round are finished.

    The first rank looks, and no rank runs a session before it has said what it found.
    """
    found = None
    if setup.world.is_first:
        remove_unfinished(setup.config.out)
        round, folder = last_checkpoint(setup.config.out) or (0, Path())
        state = check_files(folder) if round else None
        steps, num_drawn = (state.optimizer_steps, state.prompts_drawn) if state else ({}, 0)
        sessions = {number: count for number, count in setup.store.rounds().items() if number > round}
        found = round, folder, steps, num_drawn, sessions
    round, folder, steps, setup.prompts.num_drawn, sessions = setup.world.from_first(found)
    if round:
        load_checkpoint(setup, folder, steps)
        setup.publish_weights(version=round)
    return round, sessions


def _rounds(setup: Setup, recorder: RunRecorder, stop: Stop, first: int) -> str:
    config = setup.config
    for round in range(first, config.train.rounds + 1):
        clock = Clock()
        with clock("rollout"):
            sampled = sample_round(setup, round, recorder.session_done(round), is_stopped=lambda: stop.requested)
            if sampled is None:
                return "interrupted"
        recorder.round(round, train_round(setup, round, sampled, clock))
        if config.eval.every and (round % config.eval.every == 0 or round == config.train.rounds):
            recorder.evaluation(round, evaluate(setup, round))
        if round % config.checkpoint.every == 0:
            keep(setup, recorder, round)
    return "finished"


def keep(setup: Setup, recorder: RunRecorder, round: int) -> None:
    """Write a checkpoint, and delete the rows that every kept checkpoint contains.

    The events of its rounds are on disk before it is, so that no checkpoint is ahead of the record of its run.
    """
    recorder.sync()
    save_checkpoint(setup, round)
    if setup.world.is_first:
        oldest, _ = checkpoints(setup.config.out)[0]
        prune(setup.store, durable_round=oldest, keep_rounds=setup.config.store.keep_rounds)


def export(setup: Setup) -> None:
    """Leave the trained model in transformers' format, in place of an earlier one."""
    if setup.world.is_first:
        folder, new = setup.config.out / MODEL_FOLDER, setup.config.out / f"{MODEL_FOLDER}.new"
        shutil.rmtree(new, ignore_errors=True)
        setup.whole.save_pretrained(new)  # pyright: ignore[reportCallIssue]
        setup.tokenizer.save_pretrained(new)
        if setup.vision:
            save_vision(setup.vision, setup.config.model.path, new)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
