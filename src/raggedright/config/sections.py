"""The sections of a run's config: every key with its type, its limits and one line of help.

What one key alone decides is checked here; what several decide together is checked in `schema`. Names are those of
the planner's Layout where they mean the same, so that its messages name keys that are in the file.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from raggedright.advantages import Estimator, KlEstimator, PolicyLoss
from raggedright.plan.layout import Align, Collate, LossAgg, OverLong

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
STORES = ("auto", "sqlite", "memory", "transfer_queue")


def _check_name(name: str, names: Sequence[str]) -> str:
    if ":" not in name and name not in names:
        raise ValueError(f"is {name!r}, which does not exist; it takes {', '.join(names)} or 'module:attribute'")
    return name


class Section(BaseModel):
    """A section of the file; a key that it does not have is refused, and so is a value of another type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class Model(Section):
    """The model: a directory in transformers' format, or one made on the spot from a config."""

    path: str | None = None
    """Directory of a causal or vision-language model in transformers' format, with its tokenizer (or processor)."""
    made: dict[str, object] | None = None
    """Instead of a path: a transformers config (model_type, ...), weights from the seed; vision_config for images."""
    symbols: str | None = None
    """With `made`: the characters of its tokenizer, one token each; an end-of-text and a padding token are added."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """The type of the weights, and of the computation unless compute_dtype is set."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Mixed precision: compute in this type, keep weights and optimizer in `dtype`."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention implementation of transformers."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


def _refuse_dropout(dropout: float) -> float:
    if dropout:
        raise ValueError(
            f"is {dropout:g}, and dropout would give a row other log-probs in training than in the rollout, and others "
            "in every micro-batch; set it to 0"
        )
    return dropout


def _check_names(names: object) -> object:
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not isinstance(names, str) and not is_list:  # one fault, where a union would have one per type
        raise PydanticCustomError("names", "it takes text or a list of text")
    return names


class Lora(Section):
    """Low-rank adapters of PEFT (the extra `lora`), trained instead of the actor's weights if rank is set."""

    rank: Count | None = None
    """Rank of the adapters; if not set, all weights of the actor are trained."""
    alpha: Positive = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    dropout: Annotated[float, AfterValidator(_refuse_dropout)] = 0.0
    """Always 0: dropout would make the log-probs of a row depend on its micro-batch."""
    target_modules: Annotated[str | list[str], BeforeValidator(_check_names)] = "all-linear"
    """Adapted modules: all-linear (all but the output head), a list of names or their ends, or a regular expression."""
    exclude_modules: list[str] | None = None
    """Names of modules, or their ends, that are not adapted."""
    target_parameters: list[str] | None = None
    """Adapted parameters that are not in a linear layer, such as `mlp.experts.down_proj` of a mixture of experts."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rank-stabilised LoRA)."""
    init_lora_weights: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial values of A, from the seed (kaiming is PEFT's default); B is 0, so the first policy is the base model."""


class Prompts(Section):
    """Where tasks come from."""

    source: str
    """A .jsonl or .parquet file, a dataset's folder, reasoning_gym, or `module:function` of (index, seed)."""
    options: dict[str, object] = {}
    """Of a folder: split, name; of reasoning_gym: dataset and its options; of a function: further arguments."""
    eval_source: str | None = None
    """The same, for evaluation; `source` if not set."""
    eval_options: dict[str, object] | None = None
    """Options for evaluation; if not set, those of `source`, or none with an `eval_source`."""


class Agent(Section):
    """What runs on a prompt."""

    name: str
    """A shipped agent (compaction, delegation, tiles, chat, compacting_chat) or `module:attribute`."""
    options: dict[str, object] = {}
    """Arguments for an agent that is a class."""


class Rollout(Section):
    """How sessions run."""

    n: Count = 8
    """Sessions per prompt."""
    temperature: Annotated[float, Field(ge=1e-4, allow_inf_nan=False)] = 1.0
    """Sampling temperature, unless a generation sets its own; log-probs are recomputed at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens with this total probability; below 1, training sees different log-probs."""
    top_k: Whole = 0
    """Sample from this many of the most likely tokens; 0 means all of them."""
    max_tokens: Count = 512
    """Maximum tokens of one generation; the agent may ask for fewer."""
    max_row_tokens: Count | None = None
    """Maximum tokens of a row; if not set, the model's context or the micro-batch budget, whichever is smaller."""
    max_trajectories: Count = 1024
    """Maximum trajectories of a session."""
    concurrency: Count = 1024
    """Sessions that run concurrently on a rank."""
    timeout: Positive = 300.0
    """Time limit of a session in seconds."""
    on_failure: Literal["exclude", "zero", "retry"] = "exclude"
    """A failed session: leave it out of its group, score it zero, or run it again (and then leave it out)."""
    retries: Whole = 2
    """Maximum number of retries of a failed session, with on_failure = "retry"."""
    dynamic_sampling: bool = False
    """Sample further prompts until train.batch_size of them have scores that differ between their sessions (DAPO)."""
    max_sampled_batches: Annotated[int, Field(ge=2)] = 4
    """With dynamic_sampling: the maximum number of prompts that a round samples, in multiples of train.batch_size."""
    max_batch_rows: Count = 512
    """Maximum generations in one batch of the engine."""
    kept_mib: Whole = 1024
    """Maximum MiB per rank for the keys and values that trajectories keep between generations; 0 keeps none."""
    engine: Annotated[str, AfterValidator(partial(_check_name, names=("local",)))] = "local"
    """What generates tokens: local (transformers, in the rank's process) or `module:attribute`."""
    engine_options: dict[str, object] = {}
    """Options of an engine that is `module:attribute`."""

    @property
    def attempts(self) -> int:
        """The maximum number of times that a session runs."""
        return 1 + (self.retries if self.on_failure == "retry" else 0)


class Train(Section):
    """What a round trains on, and how its rows are divided."""

    rounds: Count
    """Rounds of the run."""
    batch_size: Count
    """Prompts per round."""
    mini_batch_size: Count
    """Prompts per optimizer step of the actor."""
    epochs: Count = 1
    """Passes over a round's rows."""
    align: Align = "steps"
    """steps: as many optimizer steps as the config says; lcm: equal row counts, the steps follow the rows."""
    loss_agg: LossAgg = "token-mean"
    """How loss tokens are weighted."""
    loss_norm_tokens: Count | None = None
    """The constant of seq-mean-token-sum-norm."""
    micro_batch_tokens: Count | None = None
    """Maximum tokens of a micro-batch; 8,192 if neither this nor micro_batch_rows is set."""
    micro_batch_rows: Count | None = None
    """Maximum rows of a micro-batch."""
    collate: Collate = "packed"
    """packed: one sequence of all rows; padded: a rectangle; tree: a shared prefix of rows is computed once."""
    micro_batch_multiple: Count = 1
    """The number of micro-batches of a rank is a multiple of this."""
    min_row_tokens: Annotated[int, Field(ge=2)] = 2
    """Minimum tokens of a row, and the length of a padding row."""
    over_long: OverLong = "error"
    """A row over micro_batch_tokens: an error, alone in a micro-batch, or dropped."""
    cost_linear: Whole = 47_000
    """Cost of a token, in the planner's units."""
    cost_quadratic: Whole = 1
    """Cost of a pair of tokens, in the same units."""


class Experts(Section):
    """Mixture of experts; no effect on other models."""

    replay: bool = True
    """Train the actor on the experts that the rollout chose, with the current router's weights for them."""
    balance_coef: NotNegative = 0.0
    """Weight of the balance loss, which is 1 where all experts of a layer have the same load."""


class Algorithm(Section):
    """Advantages and the policy's loss."""

    advantages: Literal[Estimator, "gae"] = "grpo"
    """How scores become advantages; gae needs a critic."""
    std: bool = True
    """Divide grpo's advantages by the group's standard deviation."""
    policy_loss: PolicyLoss = "ppo"
    """The policy's objective."""
    clip_low: Fraction = 0.2
    """Ratios are clipped from below at 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """Ratios are clipped from above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss of a token with negative advantage."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus; it decays as the learning rate does."""
    gamma: Fraction = 1.0
    """Discount of gae."""
    lam: Fraction = 1.0
    """Lambda of gae."""
    whiten: bool = True
    """Give gae's advantages mean 0 and variance 1 over the batch."""


class Reference(Section):
    """The initial weights, which the policy stays close to: a frozen copy, or with LoRA the base without adapter."""

    kl: Literal["none", "loss", "reward"] = "none"
    """Where KL(policy || reference) is applied."""
    coef: NotNegative = 0.001
    """Its weight."""
    estimator: KlEstimator = "k3"
    """Its estimate, per token."""


class Optimizer(Section):
    """AdamW and the schedule, over the true number of optimizer steps."""

    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)  # a list in TOML
    """Decay of the two running means."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    grad_clip: Annotated[Positive | None, BeforeValidator(lambda norm: None if norm == inf else norm)] = 1.0
    """Maximum norm of the gradient; inf disables clipping."""
    warmup: Fraction = 0.0
    """Fraction of the run in which the learning rate rises from zero."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls after the warm-up."""
    final: Fraction = 0.1
    """The final learning rate, as a fraction of lr."""


class Critic(Optimizer):
    """A value model with its own optimizer, trained if mini_batch_size is set."""

    mini_batch_size: Count | None = None
    """Prompts per optimizer step of the critic."""
    path: str | None = None
    """Directory of its model; the actor's if not set."""
    warmup_rounds: Whole = 0
    """Initial rounds in which only the critic trains."""
    value_clip: Positive = 0.5
    """How far values may move from the old ones before they are clipped."""


class Parallel(Section):
    """Processes."""

    dp: Count = 1
    """Data-parallel ranks, one process each."""
    launcher: Literal["local", "ray"] = "local"
    """What starts the ranks: local processes, or Ray Train on a cluster."""
    address: str | None = None
    """With ray: the cluster's (host:port, or auto); without one RAY_ADDRESS, or a Ray started here for the run."""
    cpus_per_rank: Positive = 1.0
    """With ray: CPUs that a rank takes, as Ray counts them."""
    gpus_per_rank: NotNegative = 0.0
    """With ray: GPUs that a rank takes; 1 where there are any."""
    placement: Literal["pack", "spread"] = "pack"
    """With ray: ranks on as few nodes as possible, or on as many as possible."""
    start_timeout: Positive = 300.0
    """With ray: seconds to wait until the cluster has room for all ranks, and for a store that starts."""
    shard: Literal["none", "fsdp2"] = "none"
    """Whole replicas, or weights sharded over the ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if available."""
    max_restarts: Whole = 0
    """How many times to restart all ranks from the last checkpoint after one of them has died."""
    threads: Count | None = None
    """CPU threads of a rank; if not set, the cores divided by the ranks, with ray the rank's CPUs."""


class Evaluation(Section):
    """Evaluation with greedy sessions during training."""

    every: Whole = 0
    """Rounds between evaluations, with one at the end; 0 disables evaluation."""
    prompts: Count = 64
    """Tasks of an evaluation, one session each."""


class StoreSection(Section):
    """Where the rows of a round are kept."""

    backend: Annotated[str, AfterValidator(partial(_check_name, names=STORES))] = "auto"
    """sqlite (a file), memory (one rank only), transfer_queue (with ray), auto (by launcher) or `module:attribute`."""
    options: dict[str, object] = {}
    """Options of a store that is `module:attribute`."""
    keep_rounds: Whole = 1
    """Rounds whose rows stay in the store for inspection, besides those that a resume from a kept checkpoint needs."""
    storage_units: Count = 2
    """With transfer_queue: its processes that hold rows, spread over the nodes; each takes a CPU as Ray counts them."""
    timeout: Positive = 60.0
    """With transfer_queue: seconds that one call may take; dead processes are detected within a few seconds."""


class Checkpoint(Section):
    """Checkpoints, from which a run resumes after a crash or Ctrl-C."""

    every: Count = 10
    """Rounds between checkpoints; the end of the run has one too."""
    keep: Count = 2
    """Number of checkpoints to keep."""


class Logging(Section):
    """What is recorded in addition to the metrics."""

    sample_every: Whole = 0
    """Rounds between records of whole trajectories, with the first and last round; 0 is a tenth of the run."""
    sample_sessions: Whole = 3
    """Sessions that are recorded in such a round."""
    no_gradient_rounds: Count = 10
    """Warn after this many consecutive rounds without a gradient; a new policy may score nothing at first."""
    trackers: list[str] = ["tensorboard"]
    """Where metrics are sent besides the events: tensorboard, wandb, mlflow or `module:attribute`."""
    tracker_options: dict[str, dict[str, object]] = {}
    """Options by tracker, such as `[logging.tracker_options.wandb]` with `project = "digits"`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_key(cls, values: object) -> object:
        if isinstance(values, Mapping) and "tensorboard" in values:
            raise ValueError(
                "tensorboard was replaced by trackers: write trackers = [] for tensorboard = false, and "
                'trackers = ["tensorboard"], the default, for true'
            )
        return values
