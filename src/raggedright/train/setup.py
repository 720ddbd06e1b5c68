"""Everything that a rank needs to train, made from the config before the first round, so errors show here.

Invariants: nothing here depends on the rank except its shards and its device, so all ranks start with the same weights;
the engine samples from the actor's weights: the actor's module, or an unsharded copy of it.

Engines and stores are plug-ins. `rollout.engine` is "local" or "module:attribute": a callable that takes an
`EngineContext` and the options of `rollout.engine_options`, and returns an `Engine`. `store.backend` may be
"module:attribute" too: a callable that takes a `StoreContext` and `store.options`, and returns a `Store`.
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from raggedright.agents.load_agent import load_agent
from raggedright.agents.runner import RolloutSettings, Runner
from raggedright.agents.task_sources import Tasks
from raggedright.agents.vision import Vision
from raggedright.config.schema import Config
from raggedright.errors import ConfigError
from raggedright.files import check_kind, write_file
from raggedright.plan.layout import Layout
from raggedright.plugins import check_protocol, find_factory
from raggedright.rollout.engine import Engine, EngineContext, Sampling
from raggedright.store.memory import MemoryStore
from raggedright.store.session_store import Store
from raggedright.store.sqlite import SqliteStore
from raggedright.tensors.collate import Collator, tensor_of
from raggedright.tensors.forward import vocabulary_size
from raggedright.tensors.images import image_filler
from raggedright.tensors.padding import padding_token_id
from raggedright.tensors.parallel import shard
from raggedright.tensors.routing import find_routers
from raggedright.tensors.row_independence import check_packs
from raggedright.tensors.tree import even_tokens_of
from raggedright.train.load_models import load_actor, load_critic, load_tokenizer, stop_ids
from raggedright.train.lora import add_adapter
from raggedright.train.round_prompts import PromptSequence, load_prompts
from raggedright.train.update import ActorExperts, Learner, actor_experts, mixed_precision
from raggedright.train.vision_models import load_vision
from raggedright.train.world import TrainError, World

if TYPE_CHECKING:
    from raggedright.store.transfer_queue import TransferQueueStore

ROWS_FILE, RUN_ID_FILE = "rows.db", "run_id"
SHIPPED_ENGINES = {"local": "raggedright.rollout.local_engine:LocalEngine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreContext:
    """What a user-defined store is made with, on every rank."""

    folder: Path  # the run folder, which all ranks share
    run: str  # an id that stays the same when the run is resumed
    dp_rank: int
    dp_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A rank's models, agents and store."""

    config: Config
    world: World
    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # what agents need for images, with a vision-language model
    prompts: PromptSequence
    eval_tasks: Tasks
    actor: Learner
    reference: nn.Module | None  # with an adapter the actor's model, to be run with it off
    critic: Learner | None
    full_model: nn.Module  # the unsharded actor: itself, or the engine's copy
    experts: ActorExperts | None
    engine: Engine
    runner: Runner
    store: Store
    collator: Collator

    def layout(self, round: int) -> Layout:
        """The planner's settings in a round, with room for the image that is added to a micro-batch without one."""
        layout = self.config.layout(round)
        if layout.micro_batch_tokens is None:
            return replace(layout, min_row_tokens=self.collator.min_row_tokens)
        tokens = layout.micro_batch_tokens - self.collator.filler_tokens(layout.micro_batch_tokens)
        return replace(layout, micro_batch_tokens=tokens, min_row_tokens=self.collator.min_row_tokens)

    def close(self) -> None:
        """Release engine and store."""
        with closing(self.store):
            self.engine.close()

    def publish_weights(self, version: int) -> None:
        """Give the engine the actor's weights."""
        weights = full_weights(self.actor.model, only_trained=self.config.has_adapter)
        self.engine.update_weights(weights, version=version)


def set_up(config: Config, world: World) -> Setup:
    """Make everything; every rank makes the same, except for its shard of a sharded model."""
    with ExitStack() as on_error:
        setup = _set_up(config, world, on_error)
        on_error.pop_all()
    return setup


def _set_up(config: Config, world: World, on_error: ExitStack) -> Setup:
    tokenizer = load_tokenizer(config.model)
    agent = load_agent(config.agent.name, config.agent.options)
    prompts, eval_tasks = load_prompts(config)
    actor = load_actor(config.model, tokenizer, seed=config.seed)
    vision = load_vision(config.model, tokenizer, actor)
    if config.has_adapter:
        add_adapter(actor, config.lora, seed=config.seed, base=config.model.path)
    reference = None
    if config.reference.kl != "none":
        reference = actor if config.has_adapter else _place(_frozen_copy(actor), config, world)
    token_id = padding_token_id(tokenizer)
    sharded = config.parallel.shard == "fsdp2"
    full_model = actor.to(world.device)
    if sharded:  # the trainable weights of an adapted copy are those that an update loads
        full_model = copy.deepcopy(actor) if config.has_adapter else _frozen_copy(actor)
    experts = actor_experts(actor, config.experts)
    engine = make_engine(
        config,
        EngineContext(
            model=full_model,
            tokenizer=tokenizer,
            pad_token_id=token_id,
            max_batch_rows=config.rollout.max_batch_rows,
            shared=not sharded,
            kept_bytes=config.rollout.kept_mib << 20,
            routers=find_routers(full_model) if experts else None,
        ),
    )
    on_error.callback(engine.close)
    filler = image_filler(actor.config) if vision else None
    collator = Collator(
        how=config.train.collate,
        token_id=token_id,
        min_row_tokens=max(config.train.min_row_tokens, len(tensor_of(filler, "input_ids")) if filler else 0),
        mrope=vision is not None,
        even_tokens=even_tokens_of(actor),
        image_filler=filler,
    )
    if collator.how == "tree" and (vision or experts):
        parts, remedy = ("images", "") if vision else ("experts", ", or experts.replay to false and balance_coef to 0")
        raise ConfigError(f"train.collate is tree and the model has {parts}; set it to packed or padded{remedy}")
    settings = rollout_settings(config, stop_ids(tokenizer, actor), engine.context_tokens, collator)
    check_rows = partial(
        check_packs,
        collator=collator,
        row_tokens=settings.max_row_tokens,
        micro_batch_tokens=config.max_micro_batch_tokens(settings.max_row_tokens),
        micro_batch_rows=config.train.micro_batch_rows,
    )
    with mixed_precision(config.model, world):
        check_rows(full_model)
    critic = None
    if config.has_critic:
        model = load_critic(config.model, config.critic.path, tokenizer, seed=config.seed).to(world.device)
        _check_vocabulary(config, model, actor, len(tokenizer))
        with mixed_precision(config.model, world):
            check_rows(model, key="critic")
        critic = Learner("critic", _place(model, config, world), config.critic, world)
    return Setup(
        config=config,
        world=world,
        tokenizer=tokenizer,
        vision=vision,
        prompts=prompts,
        eval_tasks=eval_tasks,
        actor=Learner("actor", _place(actor, config, world), config.optimizer, world),
        reference=reference,
        critic=critic,
        full_model=full_model,
        experts=experts,
        engine=engine,
        runner=Runner(agent=agent, engine=engine, tokenizer=tokenizer, settings=settings, vision=vision),
        store=open_store(config, world),
        collator=collator,
    )


def _check_vocabulary(config: Config, critic: nn.Module, actor: nn.Module, num_tokens: int) -> None:
    """Refuse a critic that has no embedding for tokens that the actor knows."""
    critic_size, actor_size = vocabulary_size(critic), vocabulary_size(actor)
    if critic_size is not None and critic_size < min(actor_size or num_tokens, num_tokens):
        raise ConfigError(
            f"critic.path is {config.critic.path}: its vocabulary has {critic_size:,} ids and the actor's tokenizer "
            f"{num_tokens:,}; use a critic of the same tokenizer"
        )


def rollout_settings(config: Config, stops: frozenset[int], context_tokens: int, collator: Collator) -> RolloutSettings:
    """The runner's settings."""
    rollout = config.rollout
    longest, budget = rollout.max_row_tokens, config.row_budget
    if budget is not None and collator.image_filler is not None:
        filler_tokens = collator.filler_tokens(budget)
        if budget - filler_tokens < max(longest or 0, collator.min_row_tokens):
            raise ConfigError(
                f"train.micro_batch_tokens is {budget:,}, of which {filler_tokens:,} are for the image that is added "
                f"to a micro-batch without one, and a row may have {longest or collator.min_row_tokens:,}; "
                "raise the first"
            )
        budget -= filler_tokens
    if longest is None:
        longest = min(context_tokens, budget or context_tokens)
    if longest > context_tokens:
        raise ConfigError(
            f"rollout.max_row_tokens is {longest:,} and the model's context {context_tokens:,}; lower the first"
        )
    return RolloutSettings(
        sampling=Sampling(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_ids=stops,
        ),
        max_row_tokens=longest,
        max_trajectories=rollout.max_trajectories,
        concurrency=rollout.concurrency,
        timeout=rollout.timeout,
        attempts=rollout.attempts,
        seed=config.seed,
    )


def find_engine(config: Config) -> Callable[..., object]:
    """The callable that makes the config's engine; a ConfigError for a wrong name or option."""
    name, options = config.rollout.engine, config.rollout.engine_options
    return find_factory(name, SHIPPED_ENGINES, options, key="rollout.engine", options_key="rollout.engine_options")


def make_engine(config: Config, context: EngineContext) -> Engine:
    """The engine that the config names."""
    engine = find_engine(config)(context, **config.rollout.engine_options)
    return check_protocol(engine, Engine, name=config.rollout.engine, key="rollout.engine")


def find_store(config: Config) -> Callable[..., object] | None:
    """The callable that opens a user-defined store, if the config names one; a ConfigError for a wrong option."""
    store = config.store
    if ":" not in store.backend:
        if store.options:
            raise ConfigError(
                f"store.options.{next(iter(store.options))} is set and store.backend is {store.backend}, which takes "
                "none; remove it, or set store.backend to 'module:attribute'"
            )
        return None
    return find_factory(store.backend, {}, store.options, key="store.backend", options_key="store.options")


def open_store(config: Config, world: World) -> Store:
    """The run's store; with TransferQueue a rank attaches to the one that the driver has started."""
    backend = config.store_backend
    if backend == "memory":
        return MemoryStore()
    if backend == "transfer_queue":
        return _attach_queue(config, world)
    run = world.from_first(run_id(config.out) if world.is_first else None)
    factory = find_store(config)
    if factory is None:
        return SqliteStore(config.out / ROWS_FILE, run=run)
    context = StoreContext(folder=config.out, run=run, dp_rank=world.dp_rank, dp_size=world.dp_size)
    store = factory(context, **config.store.options)
    return check_protocol(store, Store, name=backend, key="store.backend")


def _attach_queue(config: Config, world: World) -> "TransferQueueStore":
    """A rank's store on Ray. The first rank gives up what ranks of an earlier start were writing when they died."""
    import ray

    job = ray.get_runtime_context().get_job_id()  # of the driver, so rows of another start are never taken for ours
    store = open_queue(config, run=f"{config.out} {job}", attach=True, timeout=config.parallel.start_timeout)
    if world.is_first:
        store.give_up_writes()
    return store


def open_queue(config: Config, *, run: str, attach: bool, timeout: float) -> "TransferQueueStore":
    """TransferQueue as the config describes it: attached to, or started."""
    from raggedright.store.transfer_queue import TransferQueueStore  # needs Ray

    return TransferQueueStore(
        run=run,
        storage_units=config.store.storage_units,
        timeout=config.store.timeout,
        start_timeout=timeout,
        attach=attach,
    )


def run_id(folder: Path) -> str:
    """The id of the run in a folder, made at the first call: rows of another run are refused by it."""
    file = folder / RUN_ID_FILE
    check_kind(file)  # reading a named pipe would block forever
    if not file.exists():
        write_file(file, f"{uuid4().hex}\n".encode())
    text = file.read_text(errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise TrainError(
            f"{file}: {text!r:.40} is not the id of a run, the file was altered; remove it and {ROWS_FILE}, and the "
            "same command runs the sessions since the last checkpoint again"
        )
    return text


def full_weights(model: nn.Module, *, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, gathered if it is sharded; then every rank must iterate over all of them.

    With `only_trained`, frozen weights are left out.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if only_trained and not parameter.requires_grad}
    for name, weight in model.state_dict().items():
        if name not in frozen:
            yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def _frozen_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


def _place(model: nn.Module, config: Config, world: World) -> nn.Module:
    model = model.to(world.device)
    return shard(model) if config.parallel.shard == "fsdp2" else model
