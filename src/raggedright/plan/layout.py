"""The settings a plan depends on, checked on their own before any row is seen.

Invariants: a layout that exists is valid, and equal layouts with equal rows give equal plans: there is no other input.
"""

from dataclasses import dataclass, fields
from types import NoneType
from typing import Literal, get_args, get_origin

from raggedright.errors import ConfigError

Align = Literal["steps", "lcm"]
Collate = Literal["packed", "padded", "tree"]
OverLong = Literal["error", "alone", "drop"]
LossAgg = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "session-mean",
    "prompt-mean",
]

DEFAULT_TOKENS = 8192  # of a micro-batch, where neither tokens nor rows are given

_LEAST = {"cost_linear": 0, "cost_quadratic": 0, "seed": 0, "min_row_tokens": 2}  # the others take 1 or more


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a batch is cut: sizes in prompts, the data-parallel size (never the world size), and the rules.

    - `critic_mini_batch_size`: given when a critic trains; `actor_trains=False` while the critic warms up.
    - `micro_batch_tokens` or `micro_batch_rows`: the most a micro-batch may hold, counted as it is collated
      (packed: the sum of its rows' tokens; padded: rows x longest row; tree: as packed, since what rows share is not
      known to a plan). 8,192 tokens if neither is given.
    - `micro_batch_multiple`: the number of micro-batches on a rank is a multiple of it (pipeline parallel).
    - `min_row_tokens`: the least a row is collated to, and the length of a padding row (context parallel).
    - `cost_linear * tokens + cost_quadratic * tokens**2` is the cost of a row; the default makes both
      parts equal at 47,000 tokens, about a 7B model.
    - `loss_norm_tokens`: the constant L of seq-mean-token-sum-norm.
    """

    dp_size: int
    batch_size: int
    mini_batch_size: int
    rollout_n: int = 1
    critic_mini_batch_size: int | None = None
    actor_trains: bool = True
    epochs: int = 1
    align: Align = "steps"
    loss_agg: LossAgg = "token-mean"
    loss_norm_tokens: int | None = None
    micro_batch_tokens: int | None = None
    micro_batch_rows: int | None = None
    collate: Collate = "packed"
    micro_batch_multiple: int = 1
    min_row_tokens: int = 2
    over_long: OverLong = "error"
    cost_linear: int = 47_000
    cost_quadratic: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.micro_batch_tokens is None and self.micro_batch_rows is None:
            object.__setattr__(self, "micro_batch_tokens", DEFAULT_TOKENS)
        for field in fields(self):
            self._check(field.name, field.type, getattr(self, field.name))
        self._check_together()

    def _check(self, name: str, type_: object, value: object) -> None:
        """One setting on its own, by its annotation: a choice, a truth value, or a whole number."""
        if get_origin(type_) is Literal:
            if value not in get_args(type_):
                raise ConfigError(f"{name} is {value!r}; it takes one of {', '.join(get_args(type_))}")
        elif type_ is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; it takes True or False")
        elif not (value is None and NoneType in get_args(type_)):
            least = _LEAST.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r}; it takes a whole number of at least {least}")

    def _check_together(self) -> None:
        if self.micro_batch_tokens is not None and self.micro_batch_rows is not None:
            raise ConfigError(
                f"micro_batch_tokens is {self.micro_batch_tokens:,} and micro_batch_rows is "
                f"{self.micro_batch_rows:,}; give one of them"
            )
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < self.min_row_tokens:
            raise ConfigError(
                f"micro_batch_tokens is {self.micro_batch_tokens:,} and min_row_tokens {self.min_row_tokens:,}, "
                "so no row fits a micro-batch; raise micro_batch_tokens"
            )
        if self.cost_linear == 0 and self.cost_quadratic == 0:
            raise ConfigError("cost_linear and cost_quadratic are both 0, so that no row costs anything; raise one")
        if self.loss_agg == "seq-mean-token-sum-norm" and self.loss_norm_tokens is None:
            raise ConfigError("loss_agg seq-mean-token-sum-norm divides by a constant; set loss_norm_tokens")
        if not self.actor_trains and self.critic_mini_batch_size is None:
            raise ConfigError("actor_trains is False and there is no critic_mini_batch_size, so that nothing trains")

    @property
    def capacity(self) -> int:
        """The most that a micro-batch holds, in tokens or rows, whichever the rule counts."""
        capacity = self.micro_batch_rows if self.micro_batch_tokens is None else self.micro_batch_tokens
        assert capacity is not None
        return min(capacity, 2**62)  # no more than an array holds, and no limit all the same
