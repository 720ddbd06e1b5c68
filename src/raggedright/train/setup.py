"""All that a rank needs to train, made from the config before the first round: whatever is wrong shows here.

Invariants: nothing here depends on the rank but for its shards and its device, so that all ranks begin with the same
weights; the engine samples from the actor's weights, its own module or a whole copy of a sharded one.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from raggedright.agents.load import load_agent
from raggedright.agents.prompts import Tasks
from raggedright.agents.runner import RolloutSettings, Runner
from raggedright.agents.vision import Vision
from raggedright.config.schema import Config
from raggedright.errors import ConfigError
from raggedright.files import write_file
from raggedright.plan.layout import Layout
from raggedright.rollout.local import LocalEngine
from raggedright.rollout.protocol import Engine, EngineContext, Sampling
from raggedright.store.memory import MemoryStore
from raggedright.store.protocol import Store
from raggedright.store.sqlite import SqliteStore
from raggedright.tensors.collate import Collator
from raggedright.tensors.forward import vocabulary_size
from raggedright.tensors.media import image_filler
from raggedright.tensors.packs import check_packs
from raggedright.tensors.padding import padding_token_id
from raggedright.tensors.parallel import shard
from raggedright.tensors.routing import find_routers
from raggedright.tensors.row_tokens import tensor_of
from raggedright.tensors.tree import even_tokens_of
from raggedright.train.experts import ActorExperts, actor_experts
from raggedright.train.eyes import load_vision
from raggedright.train.models import load_actor, load_critic, load_tokenizer, stop_ids
from raggedright.train.optimizer import Learner
from raggedright.train.passes import computing
from raggedright.train.prompts import PromptSequence, load_prompts
from raggedright.train.world import TrainError, World

ROWS_FILE, RUN_ID_FILE = "rows.db", "run_id"


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A rank's models, agents and store."""

    config: Config
    world: World
    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # what agents need for images, of a vision-language model
    prompts: PromptSequence
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

    def layout(self, round: int) -> Layout:
        """The planner's settings in a round, with room for the image that a micro-batch without one takes along."""
        layout = self.config.layout(round)
        if layout.micro_batch_tokens is None:
            return replace(layout, min_row_tokens=self.collator.min_row_tokens)
        tokens = layout.micro_batch_tokens - self.collator.filler_tokens(layout.micro_batch_tokens)
        return replace(layout, micro_batch_tokens=tokens, min_row_tokens=self.collator.min_row_tokens)

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
    prompts, eval_tasks = load_prompts(config)
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
        EngineContext(
            model=whole,
            tokenizer=tokenizer,
            pad_token_id=token_id,
            max_batch_rows=config.rollout.max_batch_rows,
            shared=not sharded,
            kept_bytes=config.rollout.kept_mib << 20,
            routers=find_routers(whole) if experts else None,
        )
    )
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
        more, remedy = ("images", "") if vision else ("experts", ", or experts.replay to false and balance_coef to 0")
        raise ConfigError(f"train.collate is tree and the model has {more}; set it to packed or padded{remedy}")
    settings = rollout_settings(config, stop_ids(tokenizer, actor), engine.context_tokens, collator)
    row_tokens = settings.max_row_tokens
    most_tokens = config.most_tokens(row_tokens)
    with computing(config.model, world):
        check_packs(whole, collator, row_tokens=row_tokens, micro_batch_tokens=most_tokens)
    critic = None
    if config.has_critic:
        model = load_critic(config.model, config.critic.path, tokenizer, seed=config.seed).to(world.device)
        _check_vocabulary(config, model, actor, len(tokenizer))
        with computing(config.model, world):
            check_packs(model, collator, row_tokens=row_tokens, micro_batch_tokens=most_tokens, key="critic")
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
        whole=whole,
        experts=experts,
        engine=engine,
        runner=Runner(
            agent=agent,
            engine=engine,
            tokenizer=tokenizer,
            settings=settings,
            vision=vision,
        ),
        store=open_store(config, world),
        collator=collator,
    )


def _check_vocabulary(config: Config, critic: nn.Module, actor: nn.Module, num_tokens: int) -> None:
    """Refuse a critic that has no embedding for tokens that the actor knows."""
    of_critic, of_actor = vocabulary_size(critic), vocabulary_size(actor)
    if of_critic is not None and of_critic < min(of_actor or num_tokens, num_tokens):
        raise ConfigError(
            f"critic.path is {config.critic.path}: its vocabulary has {of_critic:,} ids and the actor's tokenizer "
            f"{num_tokens:,}; use a critic of the same tokenizer"
        )


def rollout_settings(config: Config, stops: frozenset[int], context_tokens: int, collator: Collator) -> RolloutSettings:
    """The runner's numbers."""
    rollout = config.rollout
    longest, budget = rollout.max_row_tokens, config.row_budget
    if budget is not None and collator.image_filler is not None:
        most = budget
        budget = most - collator.filler_tokens(most)
        if budget < max(longest or 0, collator.min_row_tokens):
            raise ConfigError(
                f"train.micro_batch_tokens is {most:,}, of which {most - budget:,} are for the image that a "
                f"micro-batch without one takes along, and a row may have {longest or collator.min_row_tokens:,}; "
                "raise the first"
            )
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
            run = world.from_first(run_id(config.out) if world.is_first else None)
            return SqliteStore(config.out / ROWS_FILE, run=run)


def run_id(folder: Path) -> str:
    """The id of the run in a folder, made when it is first asked for: what belongs to another run is refused by it."""
    file = folder / RUN_ID_FILE
    if not file.exists():
        write_file(file, f"{uuid4().hex}\n".encode())
    text = file.read_text(errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise TrainError(
            f"{file}: {text!r:.40} is not the id of a run, the file was altered; remove it and {ROWS_FILE}, and the "
            "same command runs the sessions since the last checkpoint again"
        )
    return text


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, gathered where it is sharded; then every rank must take all of them."""
    for name, weight in model.state_dict().items():
        yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def _place(model: nn.Module, config: Config, world: World) -> nn.Module:
    model = model.to(world.device)
    return shard(model) if config.parallel.shard == "fsdp2" else model
