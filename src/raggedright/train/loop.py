"""The training loop, the same on every rank."""

from raggedright.config.schema import Config
from raggedright.store.rows import prune
from raggedright.train.clock import Clock
from raggedright.train.evaluate import evaluate
from raggedright.train.record import Recorder
from raggedright.train.round import run_sessions, train_round
from raggedright.train.setup import Setup, set_up
from raggedright.train.stop import Stop
from raggedright.train.world import World

MODEL_FOLDER = "model"


def train(config: Config, world: World) -> str:
    """Train from the first round to the last; how it ended: finished or interrupted."""
    setup = set_up(config, world)
    recorder = Recorder(setup)
    stop = Stop(config.out, setup.runner.cancel)
    reason = "failed"
    try:
        reason = _rounds(setup, recorder, stop)
        _save(setup, recorder.rounds_done)
    finally:
        stop.close()
        recorder.end(reason)
        setup.close()
    return reason


def _rounds(setup: Setup, recorder: Recorder, stop: Stop) -> str:
    config, world = setup.config, setup.world
    for round in range(1, config.train.rounds + 1):
        clock = Clock()
        with clock("rollout"):
            sessions = [] if stop.requested else run_sessions(setup, round)
            if world.any(stop.requested):  # all ranks are done with their sessions after this
                return "interrupted"
        recorder.round(round, train_round(setup, round, sessions, clock))
        if config.eval.every and (round % config.eval.every == 0 or round == config.train.rounds):
            recorder.evaluation(round, evaluate(setup, round))
    return "finished"


def _save(setup: Setup, rounds_done: int) -> None:
    """Leave the trained model in transformers' format, and then only the last rounds' rows."""
    if setup.world.is_first and rounds_done:
        folder = setup.config.out / MODEL_FOLDER
        setup.whole.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
        setup.tokenizer.save_pretrained(folder)
        prune(setup.store, durable_round=rounds_done, keep_rounds=setup.config.store.keep_rounds)
