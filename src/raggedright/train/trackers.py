"""Trackers: where metrics are sent in addition to the events. TensorBoard, Weights & Biases, MLflow, or your own.

A tracker is chosen in `logging.trackers` by a short name or by "module:attribute": a class, or a function that returns
an object with the methods of `Tracker`. It is called with a `TrackedRun` and the options of
`logging.tracker_options.NAME`. Only the first rank has trackers.

Invariant: a tracker cannot end a run. If one raises, there is one warning, and it is not called again.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Protocol, TypeVar, cast

from raggedright.config.schema import Config
from raggedright.errors import ConfigError, install_hint
from raggedright.plugins import find_factory

T = TypeVar("T")
SHIPPED_TRACKERS = {
    "tensorboard": "raggedright.train.trackers:TensorBoard",
    "wandb": "raggedright.train.trackers:Wandb",
    "mlflow": "raggedright.train.trackers:Mlflow",
}
PACKAGES = {"tensorboard": ("tensorboard", "train"), "wandb": ("wandb", "wandb"), "mlflow": ("mlflow", "mlflow")}
MAX_PARAMETERS, MAX_CHARACTERS = 100, 500  # of one MLflow request, and of one parameter's value


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker knows of the run when it starts."""

    id: str  # stays the same when the run is resumed
    name: str
    folder: Path
    config: Mapping[str, object]
    first_round: int  # above 1 when the run is resumed


class Tracker(Protocol):
    """A place for metrics."""

    def log(self, metrics: Mapping[str, float], round: int) -> None:
        """Record metrics of a round. Called after each round, and again after an evaluation."""
        ...

    def close(self) -> None:
        """Flush, and end the connection."""
        ...


class TensorBoard:
    """Event files in the run folder's `tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_round)

    def log(self, metrics: Mapping[str, float], round: int) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, round)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run; options are those of `wandb.init`. A resumed run continues the same wandb run.

    Offline (`WANDB_MODE=offline`) each start writes a separate folder; `wandb sync` joins them by the run's id.
    """

    def __init__(self, run: TrackedRun, project: str = "raggedright", **options: object) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True)
        init: Callable[..., wandb.Run] = wandb.init
        arguments = {"id": run.id, "name": run.name, "dir": str(run.folder), "resume": "allow", "settings": settings}
        self._run = init(project=project, config=dict(run.config), **{**arguments, **options})
        # A resumed run logs the rounds after its last checkpoint again, and wandb's own step can only increase.
        self._run.define_metric("*", step_metric="round")

    def log(self, metrics: Mapping[str, float], round: int) -> None:
        """One row of the run's history, with the round as its x axis."""
        self._run.log({"round": round, **metrics})

    def close(self) -> None:
        """Finish the run; it can be resumed."""
        self._run.finish()


class Mlflow:
    """An MLflow run. A resumed run continues the same MLflow run.

    It is on the server of `tracking_uri` or MLFLOW_TRACKING_URI; without one, in files in the run folder's `mlruns`.
    """

    def __init__(self, run: TrackedRun, experiment: str = "raggedright", tracking_uri: str | None = None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if tracking_uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses files otherwise
            tracking_uri = (run.folder / "mlruns").absolute().as_uri()
        self._client = MlflowClient(tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        earlier = self._client.search_runs([experiment_id], f"tags.raggedright_run = '{run.id}'", max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {"raggedright_run": run.id}
        self._run_id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        parameters = [Param(name, str(value)[:MAX_CHARACTERS]) for name, value in _flat(run.config).items()]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[first : first + MAX_PARAMETERS])

    def log(self, metrics: Mapping[str, float], round: int) -> None:
        """One value per metric, with the round as its step."""
        from mlflow.entities import Metric

        now = int(1000 * time())
        self._client.log_batch(self._run_id, [Metric(_mlflow_name(n), v, now, round) for n, v in metrics.items()])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


class Trackers:
    """All trackers of a run; `warn` gets one sentence about each that fails."""

    def __init__(self, config: Config, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._trackers: dict[str, Tracker] = {}
        for name in config.logging.trackers:
            tracker = self._try(name, partial(_make, config, name, run))
            if tracker is not None:
                self._trackers[name] = tracker

    def log(self, metrics: Mapping[str, float], round: int) -> None:
        """Send metrics of a round to every tracker."""
        for name, tracker in [*self._trackers.items()]:
            self._try(name, partial(tracker.log, metrics, round))

    def close(self) -> None:
        """Close every tracker."""
        for name, tracker in [*self._trackers.items()]:
            self._try(name, tracker.close)
        self._trackers = {}

    def _try(self, name: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:  # a tracker may raise anything: its server is away, its disk is full
            self._trackers.pop(name, None)
            cause = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            self._warn(
                f"the tracker {name} failed ({cause}); the run continues without it, and events.jsonl has every "
                "metric; see logging.trackers"
            )
            return None


def check_trackers(config: Config) -> None:
    """A ConfigError for a tracker that does not exist, or whose package is not installed."""
    for name in config.logging.trackers:
        package, extra = PACKAGES.get(name, ("", ""))
        if package and find_spec(package) is None:
            raise ConfigError(f"logging.trackers has {name!r}, which needs {package}; {install_hint(extra)}")
        _find(config, name)


def _find(config: Config, name: str) -> Callable[..., Tracker]:
    options, options_key = config.logging.tracker_options.get(name, {}), f"logging.tracker_options.{name}"
    factory = find_factory(name, SHIPPED_TRACKERS, options, key="logging.trackers", options_key=options_key)
    return cast(Callable[..., Tracker], factory)


def _make(config: Config, name: str, run: TrackedRun) -> Tracker:
    return _find(config, name)(run, **config.logging.tracker_options.get(name, {}))


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """The config's values by dotted key."""
    flat: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(cast(Mapping[str, object], value), f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _mlflow_name(name: str) -> str:
    """A metric's name in the characters that MLflow accepts."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
