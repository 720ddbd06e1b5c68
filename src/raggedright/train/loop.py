"""The training loop, the same on every rank.

Invariants: a round is trained on once, or again from the checkpoint before it; a round's rows leave the store only when
a checkpoint contains it; however a run ends, its last line of events says how, and the last good checkpoint stays.
"""

import errno
import gc
import shutil
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

from raggedright.config.schema import Config
from raggedright.store.rows import prune
from raggedright.train.checkpoint import last_checkpoint, load_checkpoint, remove_unfinished, save_checkpoint
from raggedright.train.clock import Clock
from raggedright.train.evaluate import evaluate
from raggedright.train.eyes import save_vision
from raggedright.train.record import RunRecorder
from raggedright.train.round import run_sessions, train_round
from raggedright.train.setup import Setup, set_up
from raggedright.train.stop import Stop
from raggedright.train.world import TrainError, World

MODEL_FOLDER = "model"
YOUNG_OBJECTS = 50_000  # that live before the garbage collector looks at them
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def train(config: Config, world: World) -> str:
    """Train from the first round to the last; how it ended: finished or interrupted."""
    setup = set_up(config, world)
    last, found = resume(setup)
    first = last + 1
    recorder = RunRecorder(setup, first_round=first, found=found)
    settle()
    stop = Stop(config.out, lambda: setup.runner.cancel(record=False))
    reason = "failed"
    try:
        reason = _rounds(setup, recorder, stop, first)
        if recorder.rounds_done:
            keep(setup, recorder.rounds_done)
            export(setup)
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        raise TrainError(_disk_words(config, error)) from error
    finally:
        stop.close()
        with suppress(OSError) if reason == "failed" else nullcontext():  # the first error says more
            recorder.end(reason)
        setup.close()
    return reason


def settle() -> None:
    """Have the garbage collector leave alone what stays and what goes anyway."""
    gc.collect()
    gc.freeze()  # what is there now stays; a full collection in mid-run would take as long as a round to walk it
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)  # with fewer it looks at a round's sessions, which go anyway


def _disk_words(config: Config, error: OSError) -> str:
    last = last_checkpoint(config.out)
    good = f"the last checkpoint, of round {last[0]}, is good" if last else "there is no checkpoint yet"
    return f"{config.out}: {error.strerror}; {good}; mend it, and run the same command again"


def resume(setup: Setup) -> tuple[int, dict[int, int]]:
    """Go back to the last checkpoint: its round, 0 without one, and how many sessions of each later round are finished.

    The first rank looks, and no rank runs a session before it has said what it found.
    """
    found = None
    if setup.world.is_first:
        remove_unfinished(setup.config.out)
        round, folder = last_checkpoint(setup.config.out) or (0, Path())
        rounds = [session.key.round for session in setup.store.list(state="finished")]
        found = round, folder, dict(Counter(number for number in rounds if number > round))
    round, folder, sessions = setup.world.from_first(found)
    if round:
        load_checkpoint(setup, folder)
        setup.publish_weights(version=round)
    return round, sessions


def _rounds(setup: Setup, recorder: RunRecorder, stop: Stop, first: int) -> str:
    config, world = setup.config, setup.world
    for round in range(first, config.train.rounds + 1):
        clock = Clock()
        with clock("rollout"):
            own = None if stop.requested else run_sessions(setup, round, recorder.session_done(round))
            if world.any(stop.requested) or own is None:  # all ranks are done with their sessions after this
                return "interrupted"
        recorder.round(round, train_round(setup, round, own, clock))
        if config.eval.every and (round % config.eval.every == 0 or round == config.train.rounds):
            recorder.evaluation(round, evaluate(setup, round))
        if round % config.checkpoint.every == 0:
            keep(setup, round)
    return "finished"


def keep(setup: Setup, round: int) -> None:
    """Write a checkpoint; what it contains is then final, and older rows are needed no more."""
    save_checkpoint(setup, round)
    if setup.world.is_first:
        prune(setup.store, durable_round=round, keep_rounds=setup.config.store.keep_rounds)


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
