# pyright: reportMissingImports=false
"""verl's config as a layout and a grid for each role: which sizes, which ranks, what a token weighs."""

from collections.abc import Mapping

from omegaconf import DictConfig

from raggedright.integrations.verl.align import Grid
from raggedright.integrations.verl.options import Options, least_row_tokens, rows_multiple
from raggedright.plan.layout import Layout
from raggedright.plan.plan import Role


def grids_of(
    config: DictConfig, options: Options, dp_sizes: Mapping[str, int], *, actor_trains: bool
) -> dict[Role, Grid]:
    """The grid of the actor, and of the critic where there is one."""
    actor, rollout, ref = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
    norm = int(config.data.max_response_length)
    grids: dict[Role, Grid] = {
        "actor": Grid(
            dp_size=dp_sizes["actor"],
            mini_batch_size=actor.ppo_mini_batch_size,
            rows_multiple=rows_multiple(
                actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu,
                ref.get("log_prob_micro_batch_size_per_gpu"), dynamic=actor.use_dynamic_bsz,
            ),
            trains=actor_trains,
            loss_agg=options.loss_agg or actor.loss_agg_mode,
            loss_norm_tokens=actor.loss_scale_factor or norm,
        )
    }  # fmt: skip
    if "critic" in dp_sizes:
        critic = config.critic
        grids["critic"] = Grid(
            dp_size=dp_sizes["critic"],
            mini_batch_size=critic.ppo_mini_batch_size,
            rows_multiple=rows_multiple(
                critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu,
                dynamic=critic.use_dynamic_bsz,
            ),
            loss_agg=options.critic_loss_agg or critic.loss_agg_mode,
            loss_norm_tokens=critic.get("loss_scale_factor") or norm,
        )  # fmt: skip
    return grids


def layout_of(config: DictConfig, options: Options, grids: Mapping[Role, Grid], parameter_sync_step: int) -> Layout:
    """The layout of an update; its micro-batches are verl's own business, so that a slot has no limit here."""
    actor, critic = grids.get("actor"), grids.get("critic")
    ref = config.actor_rollout_ref
    engines = [ref.actor.get("megatron"), ref.ref.get("megatron"), config.get("critic", {}).get("megatron")]
    return Layout(
        dp_size=actor.dp_size if actor else 1,
        batch_size=config.data.train_batch_size // parameter_sync_step,
        mini_batch_size=ref.actor.ppo_mini_batch_size,
        rollout_n=ref.rollout.n,
        critic_mini_batch_size=critic.mini_batch_size if critic else None,
        actor_trains=actor.trains if actor else True,
        align=options.align,
        micro_batch_rows=2**31 - 1,
        min_row_tokens=options.min_row_tokens or least_row_tokens(*engines),
        seed=options.seed,
    )
