"""A tracker of your own: the mean score of every round in a text file.

    [logging]
    trackers = ["tensorboard", "examples.plug_in.tracker:ScoreFile"]
    tracker_options = {"examples.plug_in.tracker:ScoreFile" = {name = "scores.txt"}}

A tracker is any callable that takes a TrackedRun and options, and returns an object with the methods of `Tracker`.
"""

from collections.abc import Mapping

from raggedright.train.trackers import TrackedRun


class ScoreFile:
    """Appends one line per round."""

    def __init__(self, run: TrackedRun, name: str = "scores.txt") -> None:
        self._path = run.folder / name

    def log(self, metrics: Mapping[str, float], round: int) -> None:
        """Record a round; evaluations come here too, with other metrics."""
        if "critic/score/mean" in metrics:
            with self._path.open("a") as file:
                file.write(f"{round} {metrics['critic/score/mean']}\n")

    def close(self) -> None:
        """Nothing is left open."""
