"""Evaluation: one greedy session on each of a fixed set of tasks. Its rows train nothing and are not kept."""

from raggedright.store.memory import MemoryStore
from raggedright.train.sealed import mean_reports, reports
from raggedright.train.setup import Setup


def evaluate(setup: Setup, round: int) -> dict[str, float]:
    """Means over the evaluation's sessions, the same on every rank; a failed session scores zero and is counted."""
    world = setup.world
    tasks = setup.eval_tasks.of_round(1, setup.config.eval.prompts)
    with MemoryStore() as store:
        share = [(task, 0) for task in world.share(tasks)]
        listing = setup.runner.run(store, round=round, sessions=share, greedy=True)
    ended = [
        (entry.score or 0.0, entry.state == "failed", reports(entry.rows[0].tags if entry.rows else {}))
        for entry in listing
    ]
    sessions = [session for of_rank in world.gather(ended) for session in of_rank]
    return {
        "eval/score/mean": sum(score for score, _, _ in sessions) / max(1, len(sessions)),
        "eval/failed": float(sum(failed for _, failed, _ in sessions)),
        **mean_reports([(report, 1) for _, _, report in sessions], prefix="eval"),
    }
