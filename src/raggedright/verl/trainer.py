# pyright: reportMissingImports=false
"""verl's trainers with exact batches: `raggedright_sync`, `raggedright_colocate_async`, `raggedright_separate_async`.

Each class is a subclass of one of verl's trainers and overrides steps of its loop. Where verl's own step is right, it
runs unchanged on the rows that it should see: forward passes on the role's view of the batch, advantages and their
metrics on real rows only. `_balance_batch` (the plan) and the two updates (mini-batches and weights) are replaced.

The whole batch (real rows, then padding rows) is what verl's loop holds, clears and measures. Each role trains on a
view of it, in the plan's order and with only as many padding rows as that role needs.

Note: verl compares `trainer_mode` with its own names in many places, so the config's value is set back to verl's name
once the class is chosen. Metrics with `total` in their names are summed by verl over the updates of a round; others
are averaged.
"""

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

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
from raggedright.arrays import Floats, Ints
from raggedright.errors import ConfigError
from raggedright.ledger import State, close_ledger
from raggedright.metrics import score_metrics
from raggedright.plan.planner import Plan, Role, make_plan
from raggedright.rows import Rows
from raggedright.tensors.padding import padding_token_id
from raggedright.verl import weighted_losses
from raggedright.verl.options import KEY, Options, make_layout, padding_row_tokens, weighs_every_token_one
from raggedright.verl.queue import PaddingRows, count_loss_tokens, is_padding, make_rows, put_numbers, sum_scores
from raggedright.verl.session_estimator import SessionRows, check_estimator, estimator_name, over_sessions

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
        """Plan the batch, store its padding rows, and write its rows to disk as input of `raggedright plan`."""
        start = time.perf_counter()
        self._round = self._plan(make_rows(batch), batch)
        metrics["raggedright/plan_seconds"] = time.perf_counter() - start
        lengths = [tag["seq_len"] for tag in self._round.whole.tags]
        prefix = str(kwargs.get("logging_prefix", "global_seqlen"))
        metrics.update(log_seqlen_unbalance(lengths, self._round.partitions("forward"), prefix))
        directory = self.options.rows_dir
        if directory is None:
            directory = Path(self.config.trainer.default_local_dir) / "raggedright_rows"
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._round.rows.to_jsonl(Path(directory) / f"{self.global_steps}_{self.local_trigger_step}.jsonl")
        return self._round.whole

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
        scores, sessions = sum_scores(real), SessionRows.of(rows)
        per_session = self.options.advantages == "session"
        with over_sessions(self.config.algorithm, sessions, scores) if per_session else nullcontext():
            super()._compute_advantage(real, metrics)
        last = sessions.last
        session_scores = Scores.from_columns(
            prompt=sessions.prompt.tolist(), session=rows.session[last], score=scores[last]
        )
        self._scored.append((session_scores, rows))
        if self._rejects():  # the loss mask has changed, and with it the weights
            self._round = self._plan(replace(rows, loss_tokens=count_loss_tokens(real)), batch)
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
            extra_info = self._update_info("actor", actor) | self._distillation_info()
            extra_info["calculate_entropy"] = actor.calculate_entropy or actor.entropy_coeff != 0.0
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

    def _plan(self, rows: Rows, batch: KVBatchMeta) -> "VerlRound":
        """The plan of real rows, which come first in the batch, and the batch with the padding rows it needs."""
        dp_sizes = {"actor": _dp_size(self.actor_rollout_wg, "actor")}
        if self.use_critic:
            dp_sizes["critic"] = _dp_size(self.critic_wg, "train")
        layout = make_layout(
            self.config,
            self.options,
            dp_sizes,
            actor_trains=self.config.trainer.critic_warmup <= self.global_steps,
            num_updates=self.parameter_sync_step,
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

    def _rejects(self) -> bool:
        """Whether verl's rollout correction removes tokens from response masks."""
        correction = self.config.algorithm.get("rollout_correction", None)
        return bool(correction and correction.get("rollout_rs", None) and not correction.get("bypass_mode", False))

    def _update_info(self, role: Role, config: DictConfig) -> dict[str, object]:
        """What verl's worker reads from a batch: the number of mini-batches, and the divisors of its metrics."""
        num_steps = len(self._round.plan.steps(role))
        loss_tokens = self._round.rows.loss_tokens
        num_rows = int((loss_tokens > 0).sum())
        return {
            "num_mini_batch": num_steps,
            "global_batch_size": max(1, round(num_rows / num_steps)),  # only verl's own losses read it
            weighted_losses.TOKEN_SCALE: num_steps / max(1, int(loss_tokens.sum())),
            weighted_losses.ROW_SCALE: num_steps / max(1, num_rows),
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
    if options.advantages == "session":
        check_estimator(estimator_name(config.algorithm), config.algorithm.gamma)
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


@dataclass(frozen=True, slots=True, eq=False)
class VerlRound:
    """The plan of an update and its batch; positions in the plan are positions in `whole`."""

    plan: Plan
    whole: KVBatchMeta

    @property
    def rows(self) -> Rows:
        """The real rows, which come first in the batch."""
        return self.plan.rows

    @property
    def real(self) -> KVBatchMeta:
        """The batch without padding rows."""
        return self.whole.select_keys(self.whole.keys[: len(self.rows)])

    def view(self, role: Role, extra_info: dict[str, object] | None = None) -> KVBatchMeta:
        """The batch of a role in verl's order: equal parts by rank, and each part in equal mini-batches."""
        batch = self.whole.select_keys([self.whole.keys[i] for i in self._dispatch_order(role)])
        if extra_info is not None:
            batch.extra_info = dict(extra_info)
        return batch

    def weights(self, role: Role) -> Floats:
        """The weight of each row of the whole batch in a role's steps; padding rows have zero."""
        weights = np.zeros(len(self.whole.keys))
        for step in self.plan.steps(role):
            weights[step.row] = step.weight
        return weights

    def trains(self, role: Role) -> bool:
        """Whether the role has a row with loss tokens."""
        return role in self.plan.roles and bool((self.rows.loss_tokens > 0).any())

    def partitions(self, role: Role) -> list[list[int]]:
        """Positions on each rank, for all steps together."""
        return self._dispatch_order(role).reshape(self.plan.steps(role)[0].dp_size, -1).tolist()

    def _dispatch_order(self, role: Role) -> Ints:
        """All positions of a role, rank by rank, and step by step within a rank."""
        steps = self.plan.steps(role)
        return np.concatenate([step.micro_batch(rank, 0) for rank in range(steps[0].dp_size) for step in steps])


def failed_sessions(rows: Rows, rollout_n: int, num_prompts: int) -> dict[tuple[str, int], str]:
    """Sessions without rows; a prompt without any row has a made-up name, because verl's batch does not name it."""
    sessions_with_rows = {*zip(rows.prompt.tolist(), rows.session.tolist(), strict=True)}
    prompts = dict.fromkeys(rows.prompt.tolist())
    prompts |= dict.fromkeys(f"<prompt without rows>{i}" for i in range(num_prompts - len(prompts)))
    every_session = [(prompt, session) for prompt in prompts for session in range(rollout_n)]
    return {session: "no rows" for session in every_session if session not in sessions_with_rows}


def ledger_metrics(plan: Plan, failed: Mapping[tuple[str, int], str]) -> dict[str, float]:
    """The outcome of every session and row, as numbers for verl's logger."""
    ledger = close_ledger(plan, failed)
    metrics = {"ledger/total/padding_rows": float(ledger.num_padding_rows)}
    metrics["ledger/total/padding_tokens"] = float(ledger.num_padding_rows * plan.layout.min_row_tokens)
    for items, outcomes in (("rows", ledger.rows), ("sessions", ledger.sessions)):
        counts = Counter(outcome.state for outcome in outcomes.values())
        for state in get_args(State):
            if (items, state) != ("rows", "failed"):  # a failed session has no rows
                metrics[f"ledger/total/{items}_{state}"] = float(counts[state])
    for role in plan.trained_roles:
        metrics[f"ledger/total/{role}_steps"] = float(len(plan.steps(role)))
    return metrics


def session_metrics(rounds: Sequence[tuple[Scores, Rows]]) -> dict[str, float]:
    """Scores, and rows per session, over the updates of a round, each session counted once."""
    if not rounds:
        return {}
    columns = {
        name: np.concatenate([getattr(scores, name) for scores, _ in rounds]) for name in ("prompt", "session", "score")
    }
    scores = Scores.from_columns(**columns)
    num_rows = sum(len(rows) for _, rows in rounds)
    return {**score_metrics(scores), "rows_per_session/mean": num_rows / max(len(scores), 1)}
