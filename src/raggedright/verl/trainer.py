# pyright: reportMissingImports=false
"""verl's trainers with exact batches: `raggedright_sync`, `raggedright_colocate_async`, `raggedright_separate_async`.

Each class is a subclass of one of verl's trainers and overrides steps of its loop. Where verl's own step is right, it
runs unchanged on the rows that it should see: forward passes on the role's view of the batch, advantages and their
metrics on real rows only. `_balance_batch` (the plan) and the two updates (mini-batches and weights) are replaced.

Note: verl compares `trainer_mode` with its own names in many places, so the config's value is set back to verl's name
once the class is chosen.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.distillation import is_distillation_enabled
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from raggedright.advantages import Scores
from raggedright.errors import ConfigError
from raggedright.plan.plan import Role, make_plan
from raggedright.rows import Rows
from raggedright.tensors.padding import padding_token_id
from raggedright.verl import session_estimator, weighted_losses
from raggedright.verl.options import KEY, Options, make_layout, padding_row_tokens, weighs_every_token_one
from raggedright.verl.queue import PaddingRows, count_loss_tokens, is_padding, put_numbers, rows_of, sum_scores
from raggedright.verl.verl_round import VerlRound, failed_sessions, ledger_metrics, session_metrics, write_rows

_Trainer = PPOTrainer if TYPE_CHECKING else object


class ExactBatches(_Trainer):
    """What the three trainers share; a base class that comes before verl's trainer."""

    verl_mode: str

    def __init__(self, config: DictConfig) -> None:
        self.options = Options.of(OmegaConf.select(config, KEY))
        check_config(config, self.options)
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode
        super().__init__(config)
        self._padding: PaddingRows | None = None
        self._has_warned_of_plan = False
        self._scored: list[tuple[Scores, Rows]] = []  # one per update since metrics were last computed

    def _setup(self) -> None:
        super()._setup()
        if self.options.losses == "verl":
            return
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(weighted_losses.weighted_policy_loss, config=actor))
        if self.use_critic:
            critic = omega_conf_to_dataclass(self.config.critic)
            self.critic_wg.set_loss_fn(partial(weighted_losses.weighted_value_loss, config=critic))

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: object, **kwargs: object) -> KVBatchMeta:
        """Plan the batch, store its padding rows, and write its rows to disk."""
        start = time.perf_counter()
        rows = rows_of(batch.keys, batch.tags, count_loss_tokens(batch))
        self._round = self._plan(rows, batch)
        plan, whole = self._round.plan, self._round.whole
        metrics["raggedright/plan_seconds"] = time.perf_counter() - start
        lengths = [tag["seq_len"] for tag in whole.tags]
        prefix = str(kwargs.get("logging_prefix", "global_seqlen"))
        metrics.update(log_seqlen_unbalance(lengths, self._round.partitions("forward"), prefix))
        directory = self.options.rows_dir
        if directory is None:
            directory = str(Path(self.config.trainer.default_local_dir) / "raggedright_rows")
        if directory:
            write_rows(plan.rows, Path(directory), f"{self.global_steps}_{self.local_trigger_step}")
        return whole

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        super()._compute_old_log_prob(self._round.view("forward"), metrics)
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        super()._compute_ref_log_prob(self._round.view("forward"), metrics)
        return batch

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        super()._compute_values(self._round.view("critic"), metrics)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl's step on real rows only, so padding is in no mean, no whitening and no KL controller."""
        real, rows = self._round.real, self._round.rows
        scores = sum_scores(real)
        with self._estimator(rows, scores):
            super()._compute_advantage(real, metrics)
        sessions = session_estimator.SessionRows.of(rows, "")
        self._scored.append(
            (
                Scores.from_columns(
                    prompt=sessions.prompt.tolist(), session=rows.session[sessions.last], score=scores[sessions.last]
                ),
                rows,
            )
        )
        if self._rejects():  # the loss mask has changed, and with it the weights
            counted = replace(rows, loss_tokens=count_loss_tokens(real))
            self._round = self._plan(counted, batch)
        num_prompts = self.config.data.train_batch_size // self.parameter_sync_step
        failed = failed_sessions(rows, self.config.actor_rollout_ref.rollout.n, num_prompts)
        metrics.update(ledger_metrics(self._round.plan, failed))
        self._padding_rows().complete(self._round.whole)
        for role in self._round.plan.trained_roles:
            name = weighted_losses.ACTOR_WEIGHT if role == "actor" else weighted_losses.CRITIC_WEIGHT
            weights = self._round.weights(role)
            if weighs_every_token_one(self.config, self.options, role):
                weights = (weights > 0).astype(np.float64)
            put_numbers(self._round.whole, name, weights)
        return self._round.whole

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._round.trains("critic"):
            extra_info = self._update_info("critic", self.config.critic)
            output = self.critic_wg.train_mini_batch(self._round.view("critic", extra_info)).get()
            metrics.update(_reduce(output["metrics"], "critic"))
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._round.trains("actor"):
            actor = self.config.actor_rollout_ref.actor
            extra_info = self._update_info("actor", actor)
            extra_info |= {
                "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
                **self._distillation_info(),
            }
            output = self.actor_rollout_wg.update_actor(self._round.view("actor", extra_info))
            metrics.update(_reduce(output["metrics"], "actor"))
        return batch

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: object, **kwargs: object) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        metrics.update(session_metrics(self._scored))
        self._scored = []

    def _log_rollout_data(self, batch: KVBatchMeta, *args: object, **kwargs: object) -> None:
        real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not is_padding(tag)]
        super()._log_rollout_data(batch.select_keys(real), *args, **kwargs)

    def _plan(self, rows: Rows, batch: KVBatchMeta) -> VerlRound:
        """The plan of real rows, which come first in the batch, and the batch with the padding rows it needs."""
        trains = self.config.trainer.critic_warmup <= self.global_steps
        sizes = {"actor": _dp_size(self.actor_rollout_wg, "actor")}
        if self.use_critic:
            sizes["critic"] = _dp_size(self.critic_wg, "train")
        layout = make_layout(
            self.config, self.options, sizes, actor_trains=trains, num_updates=self.parameter_sync_step
        )
        plan = make_plan(rows, layout)
        if plan.warnings and not self._has_warned_of_plan:
            self._has_warned_of_plan = True
            warnings.warn("\n".join(plan.warnings), stacklevel=2)
        missing = plan.num_padding_rows - (len(batch.keys) - len(rows))
        return VerlRound(plan, self._padding_rows().append(batch, rows, missing))

    def _padding_rows(self) -> PaddingRows:
        if self._padding is None:
            token_id = padding_token_id(self.tokenizer, self.options.padding_token_id)
            num_tokens = padding_row_tokens(self.config, self.options)
            self._padding = PaddingRows(token_id, num_tokens, dict(self.options.declared))
        return self._padding

    @contextmanager
    def _estimator(self, rows: Rows, scores: np.ndarray) -> Iterator[None]:
        """Let verl use the estimator over sessions, unless the configured one is per token or left to verl."""
        algorithm = self.config.algorithm
        name = str(getattr(algorithm.adv_estimator, "value", algorithm.adv_estimator))
        if name in session_estimator.BY_TOKEN or self.options.advantages == "verl":
            yield
            return
        sessions = session_estimator.SessionRows.of(rows, name, scores if algorithm.use_kl_in_reward else None)
        try:
            algorithm.adv_estimator = session_estimator.NAME
            with session_estimator.over_sessions(sessions):
                yield
        finally:
            algorithm.adv_estimator = name

    def _rejects(self) -> bool:
        """Whether verl's rollout correction takes tokens out of response masks."""
        correction = self.config.algorithm.get("rollout_correction", None)
        return bool(correction and correction.get("rollout_rs", None) and not correction.get("bypass_mode", False))

    def _update_info(self, role: Role, config: DictConfig) -> dict[str, object]:
        """What verl's worker reads from a batch: the number of mini-batches, and the divisors of its metrics."""
        num_mini_batch = len(self._round.plan.steps(role))
        token_scale, row_scale = self._round.scales(role)
        num_rows = int((self._round.rows.loss_tokens > 0).sum())
        return {
            "num_mini_batch": num_mini_batch,
            "global_batch_size": max(1, round(num_rows / num_mini_batch)),  # only verl's own losses read it
            weighted_losses.TOKEN_SCALE: token_scale,
            weighted_losses.ROW_SCALE: row_scale,
            "epochs": config.ppo_epochs,
            "seed": config.data_loader_seed,
            "dataloader_kwargs": {"shuffle": False},  # the plan has assigned the rows
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
        }

    def _distillation_info(self) -> dict[str, object]:
        if not is_distillation_enabled(self.config.get("distillation")):
            return {"distillation_use_topk": False, "distillation_only": False}
        loss = self.distillation_config.distillation_loss
        use_topk = loss.loss_settings.use_topk
        only = use_topk and not loss.use_task_rewards and not loss.use_policy_gradient
        return {"distillation_use_topk": use_topk, "distillation_only": only}


@register_trainer("raggedright_sync")
class RaggedRightSync(ExactBatches, PPOTrainerSync):
    """verl's synchronous trainer."""

    verl_mode = "sync"


@register_trainer("raggedright_colocate_async")
class RaggedRightColocateAsync(ExactBatches, PPOTrainerColocateAsync):
    """verl's asynchronous trainer on the rollout's devices."""

    verl_mode = "colocate_async"


@register_trainer("raggedright_separate_async")
class RaggedRightSeparateAsync(ExactBatches, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer with separate devices for the rollout."""

    verl_mode = "separate_async"


def check_config(config: DictConfig, options: Options) -> None:
    """Raise for settings of verl with which batches cannot be exact."""
    algorithm = config.algorithm
    if options.advantages == "session":
        session_estimator.check_estimator(
            str(getattr(algorithm.adv_estimator, "value", algorithm.adv_estimator)), algorithm.gamma
        )
    if options.losses == "weighted":
        weighted_losses.check_policy_loss(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
        if is_distillation_enabled(config.get("distillation")):
            raise ConfigError(
                f"distillation is enabled and its loss takes no weights; set {KEY}.losses='verl' to use verl's own"
            )


def _dp_size(worker_group: object, mesh: str) -> int:
    """The number of data-parallel ranks of a worker group, queried as verl's dispatch does."""
    known = worker_group._dispatch_info  # pyright: ignore[reportAttributeAccessIssue]
    if mesh not in known:
        known[mesh] = worker_group._query_dispatch_info(mesh)  # pyright: ignore[reportAttributeAccessIssue]
    return max(known[mesh]) + 1


def _reduce(metrics: dict, role: str) -> dict[str, float]:
    """The workers' metrics with the role as prefix, reduced to one number each."""
    named = rename_dict(metrics, f"{role}/")
    if f"{role}/mfu" in named:
        named[f"perf/mfu/{role}"] = named.pop(f"{role}/mfu")
    return reduce_metrics(named)
