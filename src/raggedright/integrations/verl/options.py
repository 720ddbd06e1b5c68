"""The plug-in's options: the mapping at `trainer.v1.raggedright` of verl's config, and what verl's own keys imply.

No option needs to be set. What verl decides already (mini-batch sizes, `loss_agg_mode`, epochs, micro-batches) is read
from verl's keys and has no second name here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, get_args

from raggedright.errors import ConfigError
from raggedright.plan.layout import Align, LossAgg

KEY = "trainer.v1.raggedright"
VerlLossAgg = LossAgg | Literal["token-sum"]
Source = Literal["session", "verl"]
Losses = Literal["weighted", "verl"]
_CHOICES = {"align": Align, "advantages": Source, "losses": Losses}


class Config(Protocol):
    """The part of omegaconf's DictConfig that is used here."""

    def get(self, key: str, default_value: object = None) -> object:
        """The value of a key, or the default."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """What `trainer.v1.raggedright` may hold.

    - `align`: `steps` keeps the configured number of optimizer steps, `lcm` equal row counts of verl's own size.
    - `loss_agg`, `critic_loss_agg`: a mode beside verl's four, such as `session-mean`; default: verl's `loss_agg_mode`.
    - `advantages`: `session` counts a session once; `verl` leaves verl's estimator as it is.
    - `losses`: `weighted` fixes what a token weighs before anything is cut; `verl` leaves verl's losses as they are.
    - `min_row_tokens`: length of a padding row; default: what the engine's parallelism asks for.
    - `padding_token_id`: the token that padding rows are made of; default: the tokenizer's eos.
    - `declared`: kinds of fields that shapes alone cannot tell, by name.
    - `rows_dir`: where each round's rows are written; default: `raggedright_rows` in `trainer.default_local_dir`;
      an empty string writes none.
    - `seed`: of the deal of prompts to steps.
    """

    align: Align = "steps"
    loss_agg: VerlLossAgg | None = None
    critic_loss_agg: VerlLossAgg | None = None
    advantages: Source = "session"
    losses: Losses = "weighted"
    min_row_tokens: int | None = None
    padding_token_id: int | None = None
    declared: Mapping[str, str] = field(default_factory=dict)
    rows_dir: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{KEY}.{name} is {getattr(self, name)!r}; it takes {' or '.join(get_args(choices))}")
        modes = (*get_args(LossAgg), "token-sum")
        for name in ("loss_agg", "critic_loss_agg"):
            if getattr(self, name) not in (None, *modes):
                raise ConfigError(f"{KEY}.{name} is {getattr(self, name)!r}; it takes one of {', '.join(modes)}")

    @classmethod
    def of(cls, given: Mapping[str, object] | None) -> "Options":
        """Options from the mapping in the config, which may be missing."""
        known = [option.name for option in fields(cls)]
        given = dict(given or {})
        for name in given:
            if name not in known:
                raise ConfigError(f"{KEY}.{name} is not an option; there are {', '.join(known)}")
        return cls(**given)  # pyright: ignore[reportArgumentType]


def rows_multiple(*sizes: object, dynamic: object) -> int:
    """What a rank's rows of a mini-batch must be a multiple of: verl's fixed micro-batch sizes, where it has any."""
    return 1 if dynamic else math.lcm(*(size for size in sizes if isinstance(size, int)))


def least_row_tokens(*engines: Config | None) -> int:
    """The shortest row that every engine takes: packed context parallel cuts a row into 2 x tp x cp parts."""
    least = 2
    for engine in engines:
        if engine is None:
            continue
        tensor, context = (_size(engine, f"{name}_parallel_size") for name in ("tensor_model", "context"))
        least = max(least, 2 * tensor * context if context > 1 else tensor)
    return least


def _size(engine: Config, name: str) -> int:
    value = engine.get(name)
    return value if isinstance(value, int) else 1
