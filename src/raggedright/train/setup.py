"""All that a rank needs to train, made from the config before the first round: whatever is wrong shows here.

Invariants: nothing here depends on the rank but for its shards and its device, so that all ranks begin with the same
weights; the engine samples from the actor's weights, its own module or a whole copy of a sharded one.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from raggedright.agents.load import load_agent
from raggedright.agents.prompts import Tasks
from raggedright.agents.runner import RolloutSettings, Runner
from raggedright.agents.vision import Vision
from raggedright.config.schema import Config
from raggedright.errors import ConfigError
from raggedright.rollout.local import LocalEngine
from raggedright.rollout.protocol import Engine, Sampling
from raggedright.store.memory import MemoryStore
from raggedright.store.protocol import Store
from raggedright.store.sqlite import SqliteStore
from raggedright.tensors.collate import Collator
from raggedright.tensors.media import image_filler
from raggedright.tensors.packs import check_packs
from raggedright.tensors.padding import padding_token_id
from raggedright.tensors.parallel import shard
from raggedright.tensors.routing import find_routers
from raggedright.tensors.tree import even_tokens_of
from raggedright.train.experts import ActorExperts, actor_experts
from raggedright.train.eyes import load_vision
from raggedright.train.models import load_actor, load_critic, load_tokenizer, stop_ids
from raggedright.train.optimizer import Learner
from raggedright.train.passes import computing
from raggedright.train.prompts import load_prompts
from raggedright.train.world import World

ROWS_FILE = "rows.db"


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A rank's models, agents and store."""

    config: Config
    world: World
    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # what agents need for images, of a vision-language model
    tasks: Tasks
    eval_tasks: Tasks
    actor: Learner
    reference: nn.Module | None
    critic: Learner | None
    whole: nn.Module  # the actor unsharded: itself, or the engine's copy
    experts: ActorExperts | None
    engine: Engine
    runner: Runner
    store: Store
    collator: Collator

    def close(self) -> None:
        """Let go of engine and store."""
        self.engine.close()
        self.store.close()

    def publish_weights(self, version: int) -> None:
        """Give the engine the actor's weights."""
        self.engine.update_weights(whole_weights(self.actor.model), version=version)


def set_up(config: Config, world: World) -> Setup:
    """Make everything; every rank makes the same, but for its share of a sharded model."""
    tokenizer = load_tokenizer(config.model)
    agent = load_agent(config.agent.name, config.agent.options)
    tasks, eval_tasks = load_prompts(config)
    actor = load_actor(config.model, tokenizer, seed=config.seed)
    vision = load_vision(config.model, tokenizer, actor)
    reference = None
    if config.reference.kl != "none":
        reference = _place(copy.deepcopy(actor).requires_grad_(False), config, world)
    token_id = padding_token_id(tokenizer)
    sharded = config.parallel.shard == "fsdp2"
    whole = copy.deepcopy(actor).requires_grad_(False).to(world.device) if sharded else actor.to(world.device)
    experts = actor_experts(actor, config.experts)
    engine = LocalEngine(
        whole,
        tokenizer=tokenizer,
        pad_token_id=token_id,
        max_batch_rows=config.rollout.max_batch_rows,
        shared=not sharded,
        routers=find_routers(whole) if experts else None,
    )
    collator = Collator(
        how=config.train.collate,
        token_id=token_id,
        min_row_tokens=config.train.min_row_tokens,
        mrope=vision is not None,
        even_tokens=even_tokens_of(actor),
        image_filler=image_filler(actor.config) if vision else None,
    )
    if collator.how == "tree" and (vision or experts):
        more, remedy = ("images", "") if vision else ("experts", ", or experts.replay to false and balance_coef to 0")
        raise ConfigError(f"train.collate is tree and the model has {more}; set it to packed or padded{remedy}")
    with computing(config.model, world):
        check_packs(whole, collator)
    critic = None
    if config.has_critic:
        model = load_critic(config.model, config.critic.path, tokenizer, seed=config.seed)
        critic = Learner("critic", _place(model, config, world), config.critic, world)
    return Setup(
        config=config,
        world=world,
        tokenizer=tokenizer,
        vision=vision,
        tasks=tasks,
        eval_tasks=eval_tasks,
        actor=Learner("actor", _place(actor, config, world), config.optimizer, world),
        reference=reference,
        critic=critic,
        whole=whole,
        experts=experts,
        engine=engine,
        runner=Runner(
            agent=agent,
            engine=engine,
            tokenizer=tokenizer,
            settings=rollout_settings(config, stop_ids(tokenizer, actor), engine.context_tokens),
            vision=vision,
        ),
        store=open_store(config, world),
        collator=collator,
    )


def rollout_settings(config: Config, stops: frozenset[int], context_tokens: int) -> RolloutSettings:
    """The runner's numbers."""
    rollout = config.rollout
    longest, budget = rollout.max_row_tokens, config.row_budget
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


def open_store(config: Config, world: World) -> Store:
    """The run's store; on TransferQueue a rank attaches to what the driver has started."""
    match config.store_backend:
        case "memory":
            return MemoryStore()
        case "transfer_queue":
            from raggedright.train.ray_store import attach_store  # needs Ray

            return attach_store(config, world)
        case _:
            return SqliteStore(config.out / ROWS_FILE)


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, gathered where it is sharded; then every rank must take all of them."""
    for name, weight in model.state_dict().items():
        yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def _place(model: nn.Module, config: Config, world: World) -> nn.Module:
    model = model.to(world.device)
    return shard(model) if config.parallel.shard == "fsdp2" else model
