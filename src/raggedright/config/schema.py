"""The whole config of a run, and the rules that several keys make together.

Invariants: a config that exists can be planned with (`layout`); all errors are reported together; no key comes from
anywhere but the file and the command line.
"""

from dataclasses import fields
from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from raggedright.config.sections import (
    Agent,
    Algorithm,
    Checkpoint,
    Critic,
    Evaluation,
    Experts,
    Logging,
    Model,
    Optimizer,
    Parallel,
    Prompts,
    Reference,
    Rollout,
    StoreSection,
    Train,
)
from raggedright.config.unused import without_effect
from raggedright.errors import ConfigError
from raggedright.plan.layout import DEFAULT_TOKENS, Layout


class Config(BaseSettings):
    """A training run. Sections are tables of the TOML file; `load_config` reads one."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    out: Path = Path("runs/latest")
    """The run folder."""
    seed: int = Field(default=0, ge=0, lt=2**63, strict=True)
    """Seed of the weights, the data order and sampling."""
    model: Model
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

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What `load_config` read and nothing else: no key comes from the environment."""
        return (init_settings,)

    @field_validator("model")
    @classmethod
    def _one_model(cls, model: Model) -> Model:
        if (model.path is None) == (model.made is None):
            given = "both are given" if model.path else "neither is given"
            other = "; an option takes the other away: --model.path null, or --model.made null" if model.path else ""
            raise ValueError(f"takes either path, a model directory, or made, a transformers config; {given}{other}")
        if model.made is not None and "model_type" not in model.made:
            raise ValueError("made has no model_type; it takes a transformers config such as {model_type = 'qwen3'}")
        if model.made is not None and not model.symbols:
            raise ValueError("a model that is made has no tokenizer; give its symbols")
        return model

    @model_validator(mode="after")
    def _together(self) -> "Config":
        wrong = [*self._critic_faults(), *self._learning_faults(), *self._other_faults()]
        try:
            self.layout(round=1)
        except ConfigError as error:
            wrong.append(f"train: {error}")
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def _critic_faults(self) -> list[str]:
        wrong = []
        if self.algorithm.advantages == "gae" and not self.has_critic:
            wrong.append("algorithm.advantages is gae and there is no critic; set critic.mini_batch_size")
        if self.has_critic and self.algorithm.advantages != "gae":
            wrong.append(
                f"critic.mini_batch_size is {self.critic.mini_batch_size} and algorithm.advantages "
                f"{self.algorithm.advantages}, which has no use for values; set algorithm.advantages to gae"
            )
        if self.critic.warmup_rounds and not self.has_critic:
            wrong.append(
                f"critic.warmup_rounds is {self.critic.warmup_rounds} and there is no critic; "
                "set critic.mini_batch_size"
            )
        if self.critic.warmup_rounds >= self.train.rounds:
            wrong.append(
                f"critic.warmup_rounds is {self.critic.warmup_rounds} of {self.train.rounds} rounds, so that the actor "
                "never trains; lower it"
            )
        return wrong

    def _learning_faults(self) -> list[str]:
        """Settings under which every advantage is zero, whatever the scores are."""
        estimator, n, batch_size = self.algorithm.advantages, self.rollout.n, self.train.batch_size
        if n == 1 and self.has_group_advantages:
            return [
                f"rollout.n is 1 and algorithm.advantages {estimator}, which compares the sessions of a prompt: every "
                "advantage would be zero; set rollout.n to 2 or more, or algorithm.advantages to reinforce++ or gae"
            ]
        if estimator == "reinforce++" and n * batch_size == 1:
            return [
                "rollout.n and train.batch_size are 1 and algorithm.advantages reinforce++, which compares the "
                "sessions of a round: every advantage would be zero; raise one of the two sizes"
            ]
        if self.rollout.dynamic_sampling and not self.has_group_advantages:
            return [
                f"rollout.dynamic_sampling is true and algorithm.advantages {estimator}, which also learns from "
                "prompts whose sessions score the same; set the first to false, or the second to grpo, rloo or "
                "reinforce++-baseline"
            ]
        return []

    def _other_faults(self) -> list[str]:
        wrong = self._launcher_faults()
        if self.store.backend == "memory" and self.parallel.dp > 1:
            wrong.append(
                f"store.backend is memory and parallel.dp {self.parallel.dp}: processes cannot share it; use sqlite"
            )
        if self.parallel.shard == "fsdp2" and self.parallel.dp == 1:
            wrong.append("parallel.shard is fsdp2 and parallel.dp 1: there is nothing to shard over; raise dp")
        if self.rollout.max_row_tokens is not None and self.rollout.max_tokens >= self.rollout.max_row_tokens:
            wrong.append(
                f"rollout.max_tokens is {self.rollout.max_tokens} and rollout.max_row_tokens "
                f"{self.rollout.max_row_tokens}: no room for a prompt; lower the first or raise the second"
            )
        longest = self.rollout.max_row_tokens
        if longest is not None and self.row_budget is not None and longest > self.row_budget:
            wrong.append(
                f"rollout.max_row_tokens is {longest:,} and train.micro_batch_tokens {self.row_budget:,}, so a row "
                "may fit no micro-batch; lower the first, raise the second, or set train.over_long to alone or drop"
            )
        return wrong

    def _launcher_faults(self) -> list[str]:
        parallel, wrong = self.parallel, []
        if parallel.launcher == "local":
            if self.store.backend == "transfer_queue":
                wrong.append("store.backend is transfer_queue and parallel.launcher local; set the launcher to ray")
            if parallel.address is not None:
                wrong.append(
                    f"parallel.address is {parallel.address} and parallel.launcher local; set the launcher to ray"
                )
        elif parallel.device == "cuda" and not parallel.gpus_per_rank:
            wrong.append("parallel.device is cuda and Ray gives a rank no GPU; set parallel.gpus_per_rank to 1")
        elif parallel.device == "cpu" and parallel.gpus_per_rank:
            gpus = f"parallel.gpus_per_rank {parallel.gpus_per_rank:g}"
            wrong.append(f"parallel.device is cpu and {gpus}; set the first to auto, or the second to 0")
        return wrong

    def warnings(self) -> list[str]:
        """What is allowed and may still not be what was meant."""
        rollout, found = self.rollout, []
        if rollout.top_p < 1 or rollout.top_k:
            found.append(
                f"rollout.top_p is {rollout.top_p:g} and rollout.top_k {rollout.top_k}: sessions sample from fewer "
                "tokens than training computes log-probs over, so that the policy trains off its own distribution"
            )
        num_steps = -(-self.train.batch_size // self.train.mini_batch_size)
        if self.train.batch_size % self.train.mini_batch_size:
            found.append(
                f"train.batch_size is {self.train.batch_size} and train.mini_batch_size {self.train.mini_batch_size}: "
                f"prompts are spread evenly, about {self.train.batch_size / num_steps:.3g} in each of {num_steps} steps"
            )
        return [*found, *(sentence for _, sentence in without_effect(self, explicit=True))]

    @property
    def store_backend(self) -> str:
        """Where rows are kept: what the config names, or what its launcher asks for."""
        if self.store.backend != "auto":
            return self.store.backend
        return "transfer_queue" if self.parallel.launcher == "ray" else "sqlite"

    @property
    def has_critic(self) -> bool:
        """Whether a critic trains."""
        return self.critic.mini_batch_size is not None

    @property
    def has_group_advantages(self) -> bool:
        """Whether a session is compared with the other sessions of its prompt alone."""
        return self.algorithm.advantages in ("grpo", "rloo", "reinforce++-baseline")

    def actor_trains(self, round: int) -> bool:
        """Whether the actor trains in a round, counted from 1: not while the critic warms up."""
        return round > self.critic.warmup_rounds

    @property
    def row_budget(self) -> int | None:
        """The most tokens that a row may have to fit a micro-batch, where one that does not is an error."""
        train = self.train
        if train.micro_batch_rows is not None or train.over_long != "error":
            return None
        return train.micro_batch_tokens or DEFAULT_TOKENS

    def most_tokens(self, row_tokens: int) -> int:
        """The most tokens of several rows in a micro-batch, where a row has at most `row_tokens`."""
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
