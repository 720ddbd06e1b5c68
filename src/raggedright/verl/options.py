# pyright: reportMissingImports=false
"""The plug-in's options (`trainer.v1.raggedright` in verl's config), and verl's config as a `Layout`.

No option needs to be set. Settings that verl has (mini-batch sizes, `loss_agg_mode`, epochs, micro-batches) are read
from verl's keys and are not repeated here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from omegaconf import DictConfig

from raggedright.errors import ConfigError
from raggedright.plan.layout import Align, Layout, LossAgg
from raggedright.plan.planner import Role

KEY = "trainer.v1.raggedright"
VerlLossAgg = LossAgg | Literal["token-sum"]
Source = Literal["session", "verl"]
Losses = Literal["weighted", "verl"]
_CHOICES = {"align": Align, "advantages": Source, "losses": Losses}


@dataclass(frozen=True, slots=True)
class Options:
    """The keys of `trainer.v1.raggedright`.

    - `align`: `steps` keeps the configured number of optimizer steps; `lcm` uses verl's own row count per step.
    - `loss_agg`, `critic_loss_agg`: a mode such as `session-mean`, which verl does not have; default:
      verl's `loss_agg_mode`.
    - `advantages`: `session` counts a session once; `verl` leaves verl's estimator unchanged.
    - `losses`: `weighted` fixes the weight of each token before anything is cut; `verl` leaves verl's losses
      unchanged.
    - `min_row_tokens`: length of a padding row; default: the minimum that the engine's parallelism requires.
    - `padding_token_id`: the token of padding rows; default: the tokenizer's eos token.
    - `declared`: the kinds of fields that cannot be inferred from shapes, by name.
    - `rows_dir`: where each round's rows are written; default: `raggedright_rows` in `trainer.default_local_dir`;
      an empty string disables it.
    - `seed`: for the shuffle of prompts over steps.
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
                raise ConfigError(f"{KEY}.{name} is {getattr(self, name)!r}; set {' or '.join(get_args(choices))}")
        modes = (*get_args(LossAgg), "token-sum")
        for name in ("loss_agg", "critic_loss_agg"):
            if getattr(self, name) not in (None, *modes):
                raise ConfigError(f"{KEY}.{name} is {getattr(self, name)!r}; it must be one of {', '.join(modes)}")

    @classmethod
    def of(cls, section: Mapping[str, object] | None) -> "Options":
        """Options from the mapping in the config, which may be missing."""
        known = [option.name for option in fields(cls)]
        for name in section or {}:
            if name not in known:
                raise ConfigError(f"{KEY}.{name} is not an option; the options are {', '.join(known)}")
        return cls(**dict(section or {}))  # pyright: ignore[reportArgumentType]


def make_layout(
    config: DictConfig, options: Options, dp_sizes: Mapping[str, int], *, actor_trains: bool, num_updates: int
) -> Layout:
    """The layout of one of the `num_updates` updates of a batch; `dp_sizes` has the ranks of actor and critic."""
    actor, rollout, ref = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
    return Layout(
        cut="equal-rows",
        align=options.align,
        dp_size=dp_sizes["actor"],
        batch_size=config.data.train_batch_size // num_updates,
        mini_batch_size=actor.ppo_mini_batch_size,
        rollout_n=rollout.n,
        actor_trains=actor_trains,
        rows_multiple=_rows_multiple(
            actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu,
            ref.get("log_prob_micro_batch_size_per_gpu"), dynamic=actor.use_dynamic_bsz,
        ),
        loss_agg=_weighting(options.loss_agg or actor.loss_agg_mode),
        loss_norm_tokens=actor.loss_scale_factor or int(config.data.max_response_length),
        min_row_tokens=padding_row_tokens(config, options),
        seed=options.seed,
        **(_critic_settings(config, options, dp_sizes["critic"]) if "critic" in dp_sizes else {}),
    )  # fmt: skip


def _critic_settings(config: DictConfig, options: Options, dp_size: int) -> dict[str, Any]:
    critic = config.critic
    return {
        "critic_dp_size": dp_size,
        "critic_mini_batch_size": critic.ppo_mini_batch_size,
        "critic_rows_multiple": _rows_multiple(
            critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu,
            dynamic=critic.use_dynamic_bsz,
        ),
        "critic_loss_agg": _weighting(options.critic_loss_agg or critic.loss_agg_mode),
        "critic_loss_norm_tokens": critic.get("loss_scale_factor") or int(config.data.max_response_length),
    }  # fmt: skip


def padding_row_tokens(config: DictConfig, options: Options) -> int:
    """The length of a padding row: the shortest row that every engine accepts."""
    if options.min_row_tokens:
        return options.min_row_tokens
    minimum = 2
    for section in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.get("critic", {})):
        megatron = section.get("megatron") or {}
        tensor, context = (megatron.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "context"))
        # packed context parallel cuts a row into 2 x tp x cp parts
        minimum = max(minimum, 2 * tensor * context if context > 1 else tensor)
    return minimum


def weighs_every_token_one(config: DictConfig, options: Options, role: Role) -> bool:
    """Whether the role's loss is a plain sum over tokens: `token-sum`, which only verl has."""
    if role == "critic":
        return (options.critic_loss_agg or config.critic.loss_agg_mode) == "token-sum"
    return (options.loss_agg or config.actor_rollout_ref.actor.loss_agg_mode) == "token-sum"


def _weighting(mode: VerlLossAgg) -> LossAgg:
    return "token-mean" if mode == "token-sum" else mode


def _rows_multiple(*sizes: object, dynamic: object) -> int:
    """The rows of a rank in a mini-batch must be a multiple of this: of verl's fixed micro-batch sizes, if any."""
    return 1 if dynamic else math.lcm(*(size for size in sizes if isinstance(size, int)))
