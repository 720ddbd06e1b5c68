"""The sections of a run's config: every key with its type, its limits and one line of help.

What one key alone decides is checked here; what several decide together is checked in `schema`. Names are those of
the planner's Layout where they mean the same, so that its messages name keys that are in the file.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from raggedright.advantages import Estimator
from raggedright.loss_names import KlEstimator, PolicyLoss
from raggedright.plan.layout import Align, Collate, LossAgg, OverLong

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A section of the file; a key that it does not have is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class Model(Section):
    """The model: a directory in transformers' format, or one made on the spot from a config."""

    path: str | None = None
    """Directory of a causal or vision-language model in transformers' format, with its tokenizer (or processor)."""
    made: dict[str, object] | None = None
    """Instead of a path: a transformers config (model_type, ...), weights from the seed; vision_config for images."""
    symbols: str | None = None
    """With `made`: the characters of its tokenizer, one token each; an end-of-text and a padding token are added."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the weights, and of the computation unless compute_dtype says otherwise."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Mixed precision: compute in this type, keep weights and optimizer in `dtype`."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention implementation of transformers."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


class Prompts(Section):
    """Where tasks come from."""

    source: str
    """A .jsonl or .parquet file, or `module:function` that makes task i from (index, seed)."""
    eval_source: str | None = None
    """The same, for evaluation; `source` if not given."""


class Agent(Section):
    """What runs on a prompt."""

    name: str
    """A shipped agent (compaction, delegation, tiles, chat) or `module:attribute`."""
    options: dict[str, object] = {}
    """Arguments for an agent that is a class."""


class Rollout(Section):
    """How sessions run."""

    n: Count = 8
    """Sessions a prompt."""
    temperature: Positive = 1.0
    """Of sampling; log-probs are recomputed at the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens of this total probability; below 1, training sees other log-probs."""
    top_k: Whole = 0
    """Sample from this many of the most likely tokens; 0 is all of them."""
    max_tokens: Count = 512
    """Most tokens of one generation, unless the agent asks for fewer."""
    max_row_tokens: Count | None = None
    """Most tokens of a row; if not given, the model's context, or what a micro-batch takes where that is less."""
    max_trajectories: Count = 1024
    """Most trajectories of a session."""
    concurrency: Count = 1024
    """Sessions that run at once on a rank."""
    timeout: Positive = 300.0
    """Seconds that a session may take."""
    on_failure: Literal["exclude", "zero", "retry"] = "exclude"
    """A failed session: leave it out of its group, score it zero, or run it again (and then leave it out)."""
    retries: Whole = 2
    """How often to run a failed session again, with on_failure = "retry"."""
    max_batch_rows: Count = 512
    """Most generations that run in one batch of the engine."""

    @property
    def attempts(self) -> int:
        """How often a session that fails is run, in all."""
        return 1 + (self.retries if self.on_failure == "retry" else 0)


class Train(Section):
    """What a round trains on, and how it is cut."""

    rounds: Count
    """Rounds of the run."""
    batch_size: Count
    """Prompts a round."""
    mini_batch_size: Count
    """Prompts an optimizer step of the actor."""
    epochs: Count = 1
    """Passes over a round's rows."""
    align: Align = "steps"
    """steps: as many optimizer steps as the config says; lcm: equal row counts, the steps follow the rows."""
    loss_agg: LossAgg = "token-mean"
    """What a token weighs."""
    loss_norm_tokens: Count | None = None
    """The constant of seq-mean-token-sum-norm."""
    micro_batch_tokens: Count | None = None
    """Most tokens of a micro-batch; 8,192 if neither this nor micro_batch_rows is given."""
    micro_batch_rows: Count | None = None
    """Most rows of a micro-batch."""
    collate: Collate = "packed"
    """One sequence of all rows, a rectangle, or trees in which what rows begin with alike is computed once."""
    micro_batch_multiple: Count = 1
    """Micro-batches of a rank come in multiples of it."""
    min_row_tokens: Annotated[int, Field(ge=2)] = 2
    """Least tokens of a row, and the length of a padding row."""
    over_long: OverLong = "error"
    """A row over micro_batch_tokens: an error, a micro-batch alone, or dropped."""
    cost_linear: Whole = 47_000
    """Cost of a token, in the planner's units."""
    cost_quadratic: Whole = 1
    """Cost of a pair of tokens, in the same units."""


class Experts(Section):
    """A mixture of experts; without effect on a model that has none."""

    replay: bool = True
    """Train the actor on the experts that the rollout chose, with the current router's weights for them."""
    balance_coef: NotNegative = 0.0
    """Weight of the balance loss, which is 1 where all experts of a layer have the same load."""


class Algorithm(Section):
    """Advantages and the policy's loss."""

    advantages: Estimator | Literal["gae"] = "grpo"
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
    """Bound of the loss of a token of negative advantage."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus; it decays as the learning rate does."""
    gamma: Fraction = 1.0
    """Discount of gae."""
    lam: Fraction = 1.0
    """Lambda of gae."""
    whiten: bool = True
    """Give gae's advantages mean 0 and variance 1 over the batch."""


class Reference(Section):
    """A frozen copy of the first weights that the policy stays near."""

    kl: Literal["none", "loss", "reward"] = "none"
    """Where KL(policy || reference) counts."""
    coef: NotNegative = 0.001
    """Its weight."""
    estimator: KlEstimator = "k3"
    """Its estimate, per token."""


class Optimizer(Section):
    """AdamW and the schedule, over the true number of optimizer steps."""

    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of the two running means."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    grad_clip: Positive | None = 1.0
    """Norm that the gradient is scaled down to."""
    warmup: Fraction = 0.0
    """Share of the run in which the learning rate rises from zero."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How it falls after that."""
    final: Fraction = 0.1
    """Where it falls to, as a share of lr."""


class Critic(Optimizer):
    """A value model with an optimizer of its own, trained when mini_batch_size is given."""

    mini_batch_size: Count | None = None
    """Prompts an optimizer step of the critic."""
    path: str | None = None
    """Directory of its model; the actor's if not given."""
    warmup_rounds: Whole = 0
    """Rounds in which the critic trains and the actor waits."""
    value_clip: Positive = 0.5
    """How far values may move from the old ones before they are clipped."""


class Parallel(Section):
    """Processes."""

    dp: Count = 1
    """Data-parallel ranks, one process each."""
    launcher: Literal["local", "ray"] = "local"
    """Who starts the ranks: this machine alone, or Ray Train on a cluster."""
    address: str | None = None
    """With ray: the cluster's (host:port, or auto); without one RAY_ADDRESS, or a Ray started here for the run."""
    cpus_per_rank: Positive = 1.0
    """With ray: CPUs that a rank takes, as Ray counts them."""
    gpus_per_rank: NotNegative = 0.0
    """With ray: GPUs that a rank takes; 1 where there are any."""
    placement: Literal["pack", "spread"] = "pack"
    """With ray: ranks on as few nodes as hold them, or on as many as there are."""
    start_timeout: Positive = 300.0
    """With ray: seconds to wait until the cluster has room for all ranks, and for a store that starts."""
    shard: Literal["none", "fsdp2"] = "none"
    """Whole replicas, or weights sharded over the ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    max_restarts: Whole = 0
    """How often to start all ranks again, from the last checkpoint, when one of them has died."""
    threads: Count | None = None
    """CPU threads of a rank; if not given the cores over the ranks, with ray the rank's CPUs."""


class Evaluation(Section):
    """Greedy sessions beside training."""

    every: Whole = 0
    """Evaluate every so many rounds, and at the end; 0 is never."""
    prompts: Count = 64
    """Tasks of an evaluation, one session each."""


class StoreSection(Section):
    """Where the rows of a round are kept."""

    backend: Literal["auto", "sqlite", "memory", "transfer_queue"] = "auto"
    """sqlite: a file in the run folder; memory: one rank only; transfer_queue: with ray; auto: as the launcher asks."""
    keep_rounds: Whole = 1
    """Rounds whose rows stay in the store for inspection."""
    storage_units: Count = 2
    """With transfer_queue: its processes that hold rows, spread over the nodes; each takes a CPU as Ray counts them."""
    timeout: Positive = 60.0
    """With transfer_queue: seconds that one call may take; what is dead is found in a few, whatever this says."""


class Checkpoint(Section):
    """What a run goes on from after a crash, or after Ctrl-C."""

    every: Count = 10
    """Rounds between checkpoints; there is one at the end, too."""
    keep: Count = 2
    """How many to keep."""


class Logging(Section):
    """What is written down beside the metrics."""

    sample_every: Whole = 0
    """Write a few whole trajectories every so many rounds (and in the first and last); 0 is a tenth of the run."""
    sample_sessions: Whole = 3
    """Sessions of such a round that are written."""
    tensorboard: bool = True
    """Write TensorBoard files."""
