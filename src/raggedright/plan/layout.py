"""The settings that a plan depends on, checked before any row is seen.

Invariants: a `Layout` that exists is valid, and equal layouts with equal rows give equal plans: a plan has no other
input.
"""

from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from raggedright.errors import ConfigError

Align = Literal["steps", "lcm"]
Cut = Literal["micro-batches", "equal-rows"]
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

DEFAULT_TOKENS = 8192
"""The budget of a micro-batch if neither micro_batch_tokens nor micro_batch_rows is set."""

_MINIMUM = {"cost_linear": 0, "cost_quadratic": 0, "seed": 0, "min_row_tokens": 2}  # 1 for all other integers
_EQUAL_ROWS_ONLY = {
    "rows_multiple": 1,
    "critic_dp_size": None,
    "critic_rows_multiple": None,
    "critic_loss_agg": None,
    "critic_loss_norm_tokens": None,
}
_MICRO_BATCHES_ONLY = {"micro_batch_tokens": None, "micro_batch_rows": None, "micro_batch_multiple": 1}


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """The settings of one role, actor or critic, with the defaults filled in."""

    dp_size: int
    mini_batch_size: int
    rows_multiple: int
    loss_agg: LossAgg
    loss_norm_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a batch is cut: sizes in prompts, the data-parallel size (not the world size), and the rules.

    - `critic_mini_batch_size`: set it when a critic trains. `actor_trains=False` while the critic warms up.
    - `micro_batch_tokens` or `micro_batch_rows`: the most that a micro-batch may hold, counted as it is collated
      (packed: the sum of its rows' tokens; padded: rows x longest row; tree: as packed, because a plan does not know
      how many tokens rows share). The default is 8,192 tokens.
    - `micro_batch_multiple`: the number of micro-batches on a rank is a multiple of it (pipeline parallel).
    - `min_row_tokens`: the minimum length of a collated row, and the length of a padding row (context parallel).
    - `cost_linear * tokens + cost_quadratic * tokens**2` is the cost of a row. With the default, both terms are equal
      at 47,000 tokens, which is about right for a 7B model.
    - `loss_norm_tokens`: the constant L of seq-mean-token-sum-norm.
    - `cut = "equal-rows"` is for engines that form micro-batches themselves (verl): every rank gets the same number of
      rows in every step, a multiple of `rows_multiple`. Only here the critic may have a data-parallel size, a rows
      multiple and a loss weighting that differ from the actor's (the `critic_` settings; default: the actor's).
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
    cut: Cut = "micro-batches"
    rows_multiple: int = 1
    critic_dp_size: int | None = None
    critic_rows_multiple: int | None = None
    critic_loss_agg: LossAgg | None = None
    critic_loss_norm_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.cut == "micro-batches" and self.micro_batch_tokens is None and self.micro_batch_rows is None:
            object.__setattr__(self, "micro_batch_tokens", DEFAULT_TOKENS)
        for field in fields(self):
            self._check(field.name, field.type, getattr(self, field.name))
        self._check_together()
        self._check_cut()

    def _check(self, name: str, type_: object, value: object) -> None:
        """Check one setting by its annotation: a choice, a boolean, or an integer."""
        types = get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)
        if value is None and NoneType in types:
            return
        if get_origin(types[0]) is Literal:
            if value not in get_args(types[0]):
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(get_args(types[0]))}")
        elif types[0] is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; it must be True or False")
        else:
            minimum = _MINIMUM.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {minimum}")

    def _check_together(self) -> None:
        if self.micro_batch_tokens is not None and self.micro_batch_rows is not None:
            raise ConfigError(
                f"micro_batch_tokens is {self.micro_batch_tokens:,} and micro_batch_rows is "
                f"{self.micro_batch_rows:,}; set only one of them"
            )
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < self.min_row_tokens:
            raise ConfigError(
                f"micro_batch_tokens is {self.micro_batch_tokens:,} and min_row_tokens {self.min_row_tokens:,}, "
                "so no row fits a micro-batch; raise micro_batch_tokens"
            )
        if self.cost_linear == 0 and self.cost_quadratic == 0:
            raise ConfigError("cost_linear and cost_quadratic are both 0, so no row has a cost; raise one of them")
        if self.loss_agg == "seq-mean-token-sum-norm" and self.loss_norm_tokens is None:
            raise ConfigError("loss_agg seq-mean-token-sum-norm divides by a constant; set loss_norm_tokens")
        if not self.actor_trains and self.critic_mini_batch_size is None:
            raise ConfigError("actor_trains is False and critic_mini_batch_size is not set, so nothing trains; set it")

    def _check_cut(self) -> None:
        """Settings that only the other cut uses must have their defaults."""
        unused = _EQUAL_ROWS_ONLY if self.cut == "micro-batches" else _MICRO_BATCHES_ONLY
        for name, default in unused.items():
            if getattr(self, name) != default:
                other = "equal-rows" if self.cut == "micro-batches" else "micro-batches"
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, but cut is '{self.cut}', which does not use it; "
                    f"set cut = '{other}', or remove {name}"
                )
        critic = self.critic
        if critic and critic.loss_agg == "seq-mean-token-sum-norm" and critic.loss_norm_tokens is None:
            raise ConfigError("critic_loss_agg seq-mean-token-sum-norm needs a constant; set critic_loss_norm_tokens")

    @property
    def capacity(self) -> int:
        """The most that a micro-batch holds, in tokens or in rows, depending on which of the two is set."""
        capacity = self.micro_batch_rows if self.micro_batch_tokens is None else self.micro_batch_tokens
        return min(capacity or 2**62, 2**62)  # at most what an int64 array can hold without overflow in sums

    @property
    def actor(self) -> RoleLayout:
        """The settings of the actor."""
        return RoleLayout(self.dp_size, self.mini_batch_size, self.rows_multiple, self.loss_agg, self.loss_norm_tokens)

    @property
    def critic(self) -> RoleLayout | None:
        """The settings of the critic, if there is one."""
        if self.critic_mini_batch_size is None:
            return None
        return RoleLayout(
            self.critic_dp_size or self.dp_size,
            self.critic_mini_batch_size,
            self.critic_rows_multiple or self.rows_multiple,
            self.critic_loss_agg or self.loss_agg,
            self.critic_loss_norm_tokens or self.loss_norm_tokens,
        )
