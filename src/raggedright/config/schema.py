"""The whole config of a run, and the rules that involve several keys.

Invariants: a config that exists can be planned with (`layout`); all errors are reported together; no key comes from
anywhere but the file and the command line.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from raggedright.config.key_rules import without_effect
from raggedright.config.sections import (
    Agent,
    Algorithm,
    Checkpoint,
    Critic,
    Evaluation,
    Experts,
    Logging,
    Lora,
    Model,
    Optimizer,
    Parallel,
    Prompts,
    Reference,
    Rollout,
    StoreSection,
    Train,
)
from raggedright.errors import ConfigError
from raggedright.plan.layout import DEFAULT_TOKENS, Layout


class Config(BaseModel):
    """A training run. Sections are tables of the TOML file; `load_config` reads one."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    out: Path = Path("runs/latest")
    """The run folder."""
    seed: int = Field(default=0, ge=0, lt=2**63, strict=True)
    """Seed of the weights, the data order and sampling."""
    model: Model
    lora: Lora = Lora()
    prompts: Prompts
    agent: Agent
    rollout: Rollout = Rollout()
    train: Train
    algorithm: Algorithm = Algorithm()
    experts: Experts = Experts()
    reference: Reference = Reference()
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    parallel: Parallel = Parallel()
    eval: Evaluation = Evaluation()
    store: StoreSection = StoreSection()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: Model) -> Model:
        if model.path is not None and model.made is not None:
            raise ValueError(
                "both path and made are set; remove one of them, with --model.path null or --model.made null"
            )
        if model.path is None and model.made is None:
            raise ValueError(
                "neither path, a model directory, nor made, a transformers config, is set; set one of them"
            )
        if model.made is not None and "model_type" not in model.made:
            raise ValueError("made has no model_type; it takes a transformers config such as {model_type = 'qwen3'}")
        if model.made is not None and not model.symbols:
            raise ValueError("a model that is made has no tokenizer; set its symbols")
        return model

    @model_validator(mode="after")
    def _check_keys_together(self) -> "Config":
        faults = [*self._critic_faults(), *self._advantage_faults(), *self._launcher_faults(), *self._size_faults()]
        faults += self._tracker_faults()
        try:
            self.layout(round=1)
        except ConfigError as error:
            faults.append(f"train: {error}")
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _critic_faults(self) -> Iterator[str]:
        critic, estimator = self.critic, self.algorithm.advantages
        if estimator == "gae" and not self.has_critic:
            yield "algorithm.advantages is gae and there is no critic; set critic.mini_batch_size"
        if self.has_critic and estimator != "gae":
            yield (
                f"critic.mini_batch_size is {critic.mini_batch_size} and algorithm.advantages {estimator}, which does "
                "not use values; set algorithm.advantages to gae"
            )
        if critic.warmup_rounds and not self.has_critic:
            yield f"critic.warmup_rounds is {critic.warmup_rounds} and there is no critic; set critic.mini_batch_size"
        if critic.warmup_rounds >= self.train.rounds:
            yield (
                f"critic.warmup_rounds is {critic.warmup_rounds} and train.rounds {self.train.rounds}, so the actor "
                "never trains; lower critic.warmup_rounds"
            )

    def _advantage_faults(self) -> Iterator[str]:
        """Settings with which every advantage is zero, whatever the scores are."""
        estimator, n = self.algorithm.advantages, self.rollout.n
        if n == 1 and self.has_group_advantages:
            yield (
                f"rollout.n is 1 and algorithm.advantages {estimator}, which compares the sessions of a prompt: every "
                "advantage would be zero; set rollout.n to 2 or more, or algorithm.advantages to reinforce++ or gae"
            )
        if n * self.train.batch_size == 1 and estimator == "reinforce++":
            yield (
                "rollout.n and train.batch_size are 1 and algorithm.advantages reinforce++, which compares the "
                "sessions of a round: every advantage would be zero; raise one of the two sizes"
            )
        if self.rollout.dynamic_sampling and not self.has_group_advantages:
            yield (
                f"rollout.dynamic_sampling is true and algorithm.advantages {estimator}, which also learns from "
                "prompts whose sessions score the same; set the first to false, or the second to grpo, rloo or "
                "reinforce++-baseline"
            )

    def _launcher_faults(self) -> Iterator[str]:
        parallel, backend = self.parallel, self.store.backend
        is_local = parallel.launcher == "local"
        if is_local and backend == "transfer_queue":
            yield "store.backend is transfer_queue and parallel.launcher local; set parallel.launcher to ray"
        if is_local and parallel.address is not None:
            yield f"parallel.address is {parallel.address} and parallel.launcher local; set parallel.launcher to ray"
        if not is_local and parallel.device == "cuda" and not parallel.gpus_per_rank:
            yield "parallel.device is cuda and Ray gives a rank no GPU; set parallel.gpus_per_rank to 1"
        if not is_local and parallel.device == "cpu" and parallel.gpus_per_rank:
            gpus = f"parallel.gpus_per_rank {parallel.gpus_per_rank:g}"
            yield f"parallel.device is cpu and {gpus}; set the first to auto, or the second to 0"
        if backend == "memory" and parallel.dp > 1:
            yield f"store.backend is memory and parallel.dp {parallel.dp}: processes cannot share it; use sqlite"
        if parallel.shard == "fsdp2" and parallel.dp == 1:
            yield "parallel.shard is fsdp2 and parallel.dp 1: there is nothing to shard over; raise parallel.dp"

    def _size_faults(self) -> Iterator[str]:
        row_tokens, generated = self.rollout.max_row_tokens, self.rollout.max_tokens
        if row_tokens is not None and generated >= row_tokens:
            yield (
                f"rollout.max_tokens is {generated} and rollout.max_row_tokens {row_tokens}: no room for a prompt; "
                "lower the first or raise the second"
            )
        if row_tokens is not None and self.row_budget is not None and row_tokens > self.row_budget:
            yield (
                f"rollout.max_row_tokens is {row_tokens:,} and train.micro_batch_tokens {self.row_budget:,}, so a row "
                "may fit no micro-batch; lower the first, raise the second, or set train.over_long to alone or drop"
            )

    def _tracker_faults(self) -> Iterator[str]:
        trackers = self.logging.trackers
        for name in self.logging.tracker_options:
            if name not in trackers:
                yield (
                    f"logging.tracker_options.{name} is set and logging.trackers is {trackers}; add {name!r} to it, or "
                    "remove the options"
                )

    def warnings(self) -> list[str]:
        """Settings that are allowed but may not be intended."""
        rollout, train, warnings = self.rollout, self.train, []
        if rollout.top_p < 1 or rollout.top_k:
            warnings.append(
                f"rollout.top_p is {rollout.top_p:g} and rollout.top_k {rollout.top_k}: sessions sample from fewer "
                "tokens than training computes log-probs over, so the policy is trained off its own distribution"
            )
        num_steps = -(-train.batch_size // train.mini_batch_size)
        if train.batch_size % train.mini_batch_size:
            warnings.append(
                f"train.batch_size is {train.batch_size} and train.mini_batch_size {train.mini_batch_size}: "
                f"prompts are spread evenly, about {train.batch_size / num_steps:.3g} in each of {num_steps} steps"
            )
        if self.reference.kl != "none" and not self.reference.coef:
            warnings.append(
                f"reference.kl is {self.reference.kl} and reference.coef 0: the reference model costs time and memory, "
                "and its KL trains nothing; set reference.coef above 0, or reference.kl to none"
            )
        return [*warnings, *(sentence for _, sentence in without_effect(self, explicit=True))]

    @property
    def store_backend(self) -> str:
        """The store to use: the one that the config names, or the default of its launcher."""
        if self.store.backend != "auto":
            return self.store.backend
        return "transfer_queue" if self.parallel.launcher == "ray" else "sqlite"

    @property
    def has_adapter(self) -> bool:
        """Whether the actor trains a LoRA adapter, and not its own weights."""
        return self.lora.rank is not None

    @property
    def has_critic(self) -> bool:
        """Whether a critic trains."""
        return self.critic.mini_batch_size is not None

    @property
    def has_group_advantages(self) -> bool:
        """Whether a session is compared only with the other sessions of its prompt."""
        return self.algorithm.advantages in ("grpo", "rloo", "reinforce++-baseline")

    def actor_trains(self, round: int) -> bool:
        """Whether the actor trains in a round, counted from 1: not while the critic warms up."""
        return round > self.critic.warmup_rounds

    @property
    def row_budget(self) -> int | None:
        """The maximum tokens of a row, if a row that does not fit a micro-batch is an error."""
        train = self.train
        if train.micro_batch_rows is not None or train.over_long != "error":
            return None
        return train.micro_batch_tokens or DEFAULT_TOKENS

    def max_micro_batch_tokens(self, row_tokens: int) -> int:
        """The maximum tokens of a micro-batch of several rows, if a row has at most `row_tokens`."""
        if self.train.micro_batch_rows is not None:
            return self.train.micro_batch_rows * row_tokens
        return self.train.micro_batch_tokens or DEFAULT_TOKENS

    def layout(self, round: int) -> Layout:
        """The planner's settings in a round; those of `train` have the same names there."""
        shared = {field.name for field in fields(Layout)} & Train.model_fields.keys()
        return Layout(
            **{name: getattr(self.train, name) for name in shared},
            dp_size=self.parallel.dp,
            rollout_n=self.rollout.n,
            critic_mini_batch_size=self.critic.mini_batch_size,
            actor_trains=self.actor_trains(round),
            seed=self.seed + round,
        )
