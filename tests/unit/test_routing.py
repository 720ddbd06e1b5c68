"""What a rollout records of its experts is what the model chose; replay gives back the choice and nothing else."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from rollout_cases import VOCABULARY, generate_all, local_engine, model_of, requests_of
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from raggedright.agents.agent_session import RolloutSettings, Session, Task
from raggedright.check.check_inputs import load_model
from raggedright.config.sections import Experts, Model
from raggedright.errors import ConfigError, RowsError
from raggedright.rollout.engine import Generation, Sampling
from raggedright.rows import Rows
from raggedright.sessions import SessionKey
from raggedright.tensors.collate import Collator, MicroBatch
from raggedright.tensors.forward import forward_log_probs
from raggedright.tensors.routing import NOT_ROUTED, Routers, fill_up, find_routers, routing_dtype
from raggedright.tensors.row_independence import check_packs
from raggedright.train.load_models import load_actor, make_tokenizer
from raggedright.train.update import actor_experts

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = {  # how each calls its number of experts
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 8},
    "olmoe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "granitemoe": {"num_local_experts": 8},
}
REFUSED = {
    "glm4_moe": {"n_routed_experts": 8, "first_k_dense_replace": 0},
    "deepseek_v3": {"n_routed_experts": 8, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "phimoe": {"num_local_experts": 8},
}


def family(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_SIZES, **(FAMILIES | REFUSED)[name])
    if dtype is torch.float64:
        config._experts_implementation = "eager"
    return nn.Module.to(AutoModelForCausalLM.from_config(config), dtype).eval()


def routers_of(model: nn.Module) -> Routers:
    routers = find_routers(model)
    assert routers is not None
    return routers


def collated(
    ids: list[list[int]], experts: list[Tensor | None], how: str = "packed", prompts: list[int] | None = None
) -> MicroBatch:
    """A micro-batch of rows with so many prompt tokens, 1 if not given; all others count."""
    prompts = prompts or [1] * len(ids)
    lengths = [len(row) - prompt for row, prompt in zip(ids, prompts, strict=True)]
    rows = Rows.from_columns(
        prompt=[f"p{i}" for i in range(len(ids))],
        session=[0] * len(ids),
        trajectory=[0] * len(ids),
        prompt_tokens=prompts,
        response_tokens=lengths,
        loss_tokens=lengths,
    )
    fields = [
        {"input_ids": torch.tensor(row), "response_mask": torch.ones(n, dtype=torch.long), "routed_experts": routing}
        for row, n, routing in zip(ids, lengths, experts, strict=True)
    ]
    weight = np.full(len(ids), 1 / sum(lengths))
    return Collator(how=how, token_id=0)(rows, fields, weight=weight, step_loss_tokens=sum(lengths))  # pyright: ignore[reportArgumentType]


def natural(model: nn.Module, ids: list[int]) -> Tensor:
    """The experts of a row, by one pass over it alone."""
    with torch.no_grad(), routers_of(model).recording() as experts:
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return experts()


def chosen_in_batch(model: nn.Module, micro: MicroBatch, rows: list[list[int]]) -> list[Tensor]:
    """The experts of each row, by the very pass over a micro-batch of all of them."""
    with torch.no_grad(), routers_of(model).recording() as experts:
        forward_log_probs(model, micro)
    width = micro.inputs["input_ids"].shape[1]
    starts = [sum(map(len, rows[:i])) if micro.one_sequence else i * width for i in range(len(rows))]
    return [experts()[start : start + len(row)] for start, row in zip(starts, rows, strict=True)]


ROWS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]


@pytest.mark.parametrize("max_batch_rows", [2, 64])
def test_the_engine_records_the_experts_of_every_position_it_feeds_to_the_model(max_batch_rows: int) -> None:
    """Newcomers, rows that leave, contexts of any length beside each other: the same as for the row alone."""
    model = model_of("qwen3-moe")
    requests = requests_of(16)
    requests += [request._replace(noise=bytes([n])) for n, request in enumerate(requests[:5])]
    engine = local_engine(model, max_batch_rows=max_batch_rows, routers=routers_of(model))
    for request, answer in zip(requests, generate_all(engine, requests), strict=True):
        expected = natural(model, [*request.ids, *answer.ids[:-1]])
        assert answer.routed_experts is not None
        assert answer.routed_experts.dtype == np.int8
        assert answer.routed_experts.tolist() == expected.tolist()


def test_an_engine_without_routers_records_nothing() -> None:
    (answer,) = generate_all(local_engine(model_of("qwen3-moe")), requests_of(1))
    assert answer.routed_experts is None


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(8, torch.int8), (128, torch.int8), (129, torch.int16), (32768, torch.int16), (32769, torch.int32)],
)
def test_experts_are_kept_in_the_smallest_type(num_experts: int, dtype: torch.dtype) -> None:
    assert routing_dtype(num_experts) is dtype


def test_a_trajectory_keeps_the_first_routing_of_each_token_and_marks_those_that_have_none() -> None:
    """Turn 2 reads turn 1 again, perhaps with other experts; those that turn 1's tokens were sampled with count."""
    turns = iter([[7, 8], [9]])
    made = iter([np.full((4, 2, 2), 1, np.int8), np.full((8, 2, 2), 2, np.int8)])

    async def generate(_request: object) -> Generation:
        ids = next(turns)
        return Generation(ids, [-1.0] * len(ids), "length", 0, next(made))

    settings = RolloutSettings(sampling=Sampling(max_tokens=4), max_row_tokens=64)
    session = Session(
        Task(uid="p", data={}),
        SessionKey(1, "p", 0, 0),
        tokenizer=make_tokenizer("0123456789"),
        settings=settings,
        generate=generate,
        context_tokens=64,
    )

    async def play() -> None:
        trajectory = session.trajectory([1, 2, 3])
        await trajectory.generate()
        trajectory.observe([4, 5, 6])
        await trajectory.generate()
        trajectory.observe([0])
        session.trajectory([1])

    asyncio.run(play())
    row, idle = session.record(1.0).trajectories
    experts = row.fields["routed_experts"]
    assert experts.dtype == np.int8
    assert experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, NOT_ROUTED, NOT_ROUTED]
    assert "routed_experts" not in idle.fields


@pytest.mark.parametrize("how", ["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_replaying_what_the_model_chooses_anyway_changes_no_bit(name: str, dtype: torch.dtype, how: str) -> None:
    if name == "gpt_oss" and (how == "packed" or dtype is torch.float64):
        pytest.skip("it cannot be packed, and masks float64 with what is -inf in float32")
    model = family(name, dtype)
    routers = routers_of(model)
    alone = [natural(model, row) for row in ROWS]
    chosen = chosen_in_batch(model, collated(ROWS, [*alone], how), ROWS)
    if dtype is not torch.bfloat16:  # whose products round differently with the shape, which can tip a choice
        assert [experts.tolist() for experts in chosen] == [experts.tolist() for experts in alone]
    micro = collated(ROWS, [*chosen], how)
    plain = forward_log_probs(model, micro).log_probs
    plain.sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    with routers.replaying(micro.routing):
        replayed = forward_log_probs(model, micro).log_probs
        replayed.sum().backward()
    assert torch.equal(replayed, plain)
    for parameter, p in model.named_parameters():
        before = expected[parameter]
        assert (p.grad is None) == (before is None), parameter
        if p.grad is not None and before is not None:
            assert torch.equal(p.grad, before), parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_experts_are_weighed_by_the_current_router(name: str) -> None:
    """Written out: the softmax over the logits at the recorded experts, divided by its sum where the model does."""
    model = family(name)
    routers = routers_of(model)
    generator = torch.Generator().manual_seed(1)
    given = torch.rand((len(ROWS[0]), 3, 8), generator=generator).argsort(-1)[..., :2]
    given[-1] = NOT_ROUTED
    seen: list[Sequence[Tensor]] = []

    def note(_router: nn.Module, _inputs: object, output: Sequence[Tensor]) -> None:
        seen.append(output)

    with routers.replaying(given):
        handles = [module.register_forward_hook(note) for module in routers._modules]
        model(input_ids=torch.tensor([ROWS[0]]), use_cache=False)
    for handle in handles:
        handle.remove()
    assert len(seen) == 3
    for layer, (logits, weights, chosen) in enumerate(seen):
        assert chosen[:-1].tolist() == given[:-1, layer].tolist()
        assert chosen[-1].tolist() == logits[-1].topk(2).indices.tolist()
        expected = logits.softmax(-1).gather(-1, chosen)
        if name not in ("qwen2_moe", "olmoe"):
            expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_rows_with_and_without_a_routing_keep_their_own_in_a_micro_batch(how: str) -> None:
    """A row's log-probs under replay are those that it has alone; one without a record routes naturally."""
    model = family("qwen3_moe", torch.float64)
    routers = routers_of(model)
    other = natural(model, ROWS[0]).flip(0)
    micro = collated(ROWS, [other, None, natural(model, ROWS[2])], how)
    with torch.no_grad(), routers.replaying(micro.routing):
        together = micro.per_row(forward_log_probs(model, micro).log_probs)
    for row, experts, found in zip(ROWS, [other, None, None], together, strict=True):
        alone = collated([row], [experts])
        with torch.no_grad(), routers.replaying(alone.routing):
            torch.testing.assert_close(found, forward_log_probs(model, alone).log_probs, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert not torch.allclose(together[0], forward_log_probs(model, collated(ROWS[:1], [None])).log_probs)


def test_log_probs_in_float32_are_nearer_to_a_rollout_in_bfloat16_with_replay_than_without() -> None:
    """The same weights: rounding in the rollout changes which experts are chosen, and that is most of the gap."""
    rollout = family("qwen3_moe", torch.bfloat16)
    training = family("qwen3_moe")
    training.load_state_dict(rollout.state_dict())
    requests = requests_of(200, longest=24, most=24)
    answers = generate_all(local_engine(rollout, routers=routers_of(rollout)), requests)
    ids = [[*request.ids, *answer.ids] for request, answer in zip(requests, answers, strict=True)]
    recorded = [torch.from_numpy(answer.routed_experts) for answer in answers]
    experts: list[Tensor | None] = [fill_up(of_row, len(row)) for of_row, row in zip(recorded, ids, strict=True)]
    micro = collated(ids, experts, "padded", prompts=[len(request.ids) for request in requests])
    rollout_log_probs = torch.tensor([log_prob for answer in answers for log_prob in answer.log_probs])

    def gap(routing: Tensor | None) -> Tensor:
        with torch.no_grad(), routers_of(training).replaying(routing):
            return (forward_log_probs(training, micro).log_probs - rollout_log_probs).abs()

    with_replay, without = gap(micro.routing), gap(None)
    print(f"mean gap {with_replay.mean():.5f} with replay and {without.mean():.5f} without")
    assert len(without) > 1_000
    assert with_replay.mean() < 0.8 * without.mean()
    assert with_replay.quantile(0.99) < 0.5 * without.quantile(0.99)
    assert with_replay.max() < 0.5 * without.max()


def test_a_model_without_experts_has_no_routers() -> None:
    assert find_routers(load_model("qwen3", "float32")) is None
    assert actor_experts(load_model("qwen3", "float32"), Experts()) is None


def test_a_balance_loss_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"experts.balance_coef is 0.01 and the model has no experts; set it to 0"):
        actor_experts(load_model("qwen3", "float32"), Experts(balance_coef=0.01))


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_routers_are_not_understood_is_refused_unless_nothing_is_asked_of_them(name: str) -> None:
    model = family(name)
    with pytest.raises(ConfigError, match=rf"model type '{name}'.*set experts.replay = false and experts.balance_coef"):
        actor_experts(model, Experts())
    assert actor_experts(model, Experts(replay=False)) is None


def test_a_routing_of_another_model_is_refused() -> None:
    model = family("qwen3_moe")
    wrong = torch.zeros(4, 2, 2, dtype=torch.long)
    with pytest.raises(RowsError, match=r"has \(2, 2\) layers .* and the model \(3, 2\); .* another model"):  # noqa: SIM117
        with routers_of(model).replaying(wrong):
            pass


def test_a_family_that_lets_rows_of_a_pack_see_each_other_is_refused_and_trains_as_rectangles() -> None:
    packed, padded = (Collator(how=how, token_id=0) for how in ("packed", "padded"))
    with pytest.raises(
        ConfigError, match=r"model type 'gpt_oss' does not keep its rows apart.*set train.collate = 'padded'"
    ):
        check_packs(family("gpt_oss"), packed)
    check_packs(family("gpt_oss"), padded)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_family_that_keeps_rows_of_a_pack_apart_is_taken(name: str, dtype: torch.dtype) -> None:
    check_packs(family(name, dtype), Collator(how="packed", token_id=0))


def test_transformers_own_balance_loss_and_routers_noise_are_off_whatever_the_model_says() -> None:
    made = {"model_type": "mixtral", **_SIZES, "num_local_experts": 4, "vocab_size": 12}
    noisy = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "router_jitter_noise": 0.5}
    config = Model(made={**made, **noisy}, symbols="0123456789", activation_checkpointing=True)
    model = load_actor(config, make_tokenizer("0123456789"), seed=0)
    ids = torch.arange(8)[None]
    first, second = (model(input_ids=ids, labels=ids, use_cache=False) for _ in range(2))
    assert first.aux_loss is None
    assert torch.equal(first.logits, second.logits)
