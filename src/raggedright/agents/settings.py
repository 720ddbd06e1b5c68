"""How a round's sessions run: plain numbers, made from the config's section `rollout`."""

from dataclasses import dataclass

from raggedright.errors import ConfigError
from raggedright.rollout.engine import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Limits of a session and of a round.

    `sampling.max_tokens` is what a generation may have if the agent does not say; `timeout` is in seconds a session;
    `attempts` is how often a session that fails is run, in all.
    """

    sampling: Sampling
    max_row_tokens: int
    max_trajectories: int = 1024
    concurrency: int = 1024
    timeout: float = 300.0
    attempts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"max_row_tokens": 2, "max_trajectories": 1, "concurrency": 1, "attempts": 1}
        for name, at_least in least.items():
            if (value := getattr(self, name)) < at_least:
                raise ConfigError(f"rollout.{name} is {value}; it is a whole number from {at_least}")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"rollout.timeout is {self.timeout}; it is a positive number of seconds")
