"""Evaluation: one greedy session on each of a fixed set of tasks. Its rows train nothing and are not kept."""

from raggedright.arrays import mean_of
from raggedright.sessions import SessionTable
from raggedright.store.memory import MemoryStore
from raggedright.train.setup import Setup


def evaluate(setup: Setup, round: int) -> dict[str, float]:
    """Means over the evaluation's sessions, the same on every rank; a failed session scores zero and is counted."""
    world = setup.world
    tasks = setup.eval_tasks.of_round(1, setup.config.eval.prompts)
    with MemoryStore() as store:
        share = [(task, 0) for task in world.share(tasks)]
        own = setup.runner.run(store, round=round, sessions=share, greedy=True)
    table = SessionTable.join(world.gather(own))
    return {
        "eval/score/mean": mean_of(table.scores("zero").score),
        "eval/failed": float(table.failed.sum()),
        **table.mean_metrics("eval"),
    }
