"""Which models give a row the same outputs in any micro-batch, and with which sentence the others are refused."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from parallel.whole_runs import BASE, write_run
from raggedright.config import load_config
from raggedright.errors import ConfigError
from raggedright.plan.layout import Collate
from raggedright.tensors import Collator
from raggedright.tensors.row_independence import check_packs, measure, probe_lengths, rope_limits
from raggedright.train.setup import set_up
from raggedright.train.world import World
from verification.families import build, build_double, compare, small_config

PADDED, PACKED, TREE = (Collator(how=how, token_id=0) for how in ("padded", "packed", "tree"))
DEFAULT = {"initializer_range": 0.02}  # what transformers starts from: signals between rows are small
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


def scaled(name: str) -> nn.Module:
    """A model whose rope changes with rows of more than 16 tokens."""
    if name == "longrope":
        return build("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    return build("llama", rope_parameters=DYNAMIC, max_position_embeddings=16)


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "jamba", "lfm2", "falcon_h1", "minimax", "recurrent_gemma", "bloom", "xglm", "bert", "roberta"],
)
def test_a_family_whose_rows_see_each_other_in_a_pack_is_refused_at_its_default_initialisation(name: str) -> None:
    model = build(name, **({} if name == "xglm" else DEFAULT))
    with pytest.raises(ConfigError, match=rf"{name}' does not keep its rows apart.*set train.collate = 'padded'"):
        check_packs(model, PACKED)
    check_packs(model, PADDED)


@pytest.mark.parametrize("name", ["gpt_oss", "mamba", "qwen3_next", "jamba", "bloom", "llama4_text"])
def test_packs_of_one_row_are_exact_and_taken_also_in_a_family_whose_rows_see_each_other(name: str) -> None:
    """`raggedright check` advises train.micro_batch_rows = 1, and a run refused it."""
    model = build(name)
    with pytest.raises(ConfigError, match=r"set train\.collate = 'padded'"):
        check_packs(model, PACKED, row_tokens=40)
    check_packs(model, PACKED, row_tokens=40, micro_batch_tokens=40, micro_batch_rows=1)
    assert max(compare(build_double(name), "packed", lengths=(37,))) < 1e-10


def test_packs_of_one_row_are_refused_where_a_row_sees_its_later_tokens() -> None:
    with pytest.raises(ConfigError, match="model type 'bert' is not causal"):
        check_packs(build("bert", is_decoder=False, **DEFAULT), PACKED, micro_batch_rows=1)


def test_a_run_of_a_family_that_cannot_be_packed_starts_with_one_row_per_micro_batch(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    made = {**BASE["model"]["made"], **sizes, "model_type": "gpt_oss"}
    model = {"made": made, "attention": "eager", "dtype": "float32"}
    for rows in (1, 2):
        values: dict[str, dict[str, object]] = {"model": model, "train": {"micro_batch_rows": rows}}
        config = load_config(write_run(tmp_path / f"{rows}", values) / "config.toml")
        if rows == 2:
            with pytest.raises(ConfigError, match="does not keep its rows apart"):
                set_up(config, World(0, 1, torch.device("cpu")))
        else:
            set_up(config, World(0, 1, torch.device("cpu"))).close()


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt2", "mixtral", "cohere2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_sound_family_has_a_gradient_of_exactly_zero_on_other_rows_and_later_tokens(name: str, dtype: torch.dtype):
    model = nn.Module.to(build(name, **DEFAULT), dtype)
    for collator in (PACKED, PADDED):
        found = measure(model, collator, (15, 21))
        assert (found.others, found.later) == (0, 0)
        check_packs(model, collator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_dependence_that_is_smaller_than_the_rounding_of_bfloat16_is_found_in_a_run_of_bfloat16(
    dtype: torch.dtype, autocast: bool
) -> None:
    """Positions count through the tree: 0.02 of the outputs' spread, and the rounding of axk2 in bfloat16 is 0.04."""
    model = nn.Module.to(build("blenderbot-small"), dtype)
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in model.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with pytest.raises(ConfigError, match=r"does not keep its rows apart when train\.collate is tree"):
            check_packs(model, TREE)
        check_packs(model, PADDED)
    after = model.state_dict()
    assert all(after[name].dtype is was and torch.equal(after[name], value) for name, (was, value) in before.items())


@pytest.mark.parametrize("collator", [PACKED, PADDED], ids=lambda collator: collator.how)
def test_a_model_that_does_not_run_in_float64_is_refused_with_what_to_set(collator: Collator) -> None:
    """xglm casts its attention to float32 and then masks it with the least number of float64: an error of torch's."""
    with pytest.raises(ConfigError, match=r"'xglm' does not run .*float64.*set model.dtype = 'float32'"):
        check_packs(nn.Module.to(build("xglm"), torch.float64), collator)


@pytest.mark.parametrize("collator", [PACKED, PADDED, TREE], ids=lambda collator: collator.how)
def test_a_model_that_sees_later_tokens_is_refused_in_every_collation(collator: Collator) -> None:
    """A bert decoder trained, and its gradient was 1.2e-2 apart between two cuts."""
    with pytest.raises(ConfigError, match=r"model: model type 'bert' is not causal.*is_decoder = true"):
        check_packs(build("bert", is_decoder=False, **DEFAULT), collator)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_a_rope_that_follows_the_longest_row_is_refused_for_rows_that_reach_its_limit(name: str) -> None:
    """The gradient of a row of 9 tokens changed by up to 0.36 with the length of the row beside it."""
    assert rope_limits(scaled(name)) == [(name, 16)]
    for collator in (PACKED, PADDED):
        check_packs(scaled(name), collator, row_tokens=16)
        for most in (17, None):
            with pytest.raises(ConfigError, match=rf"rope type '{name}'.*more than 16 tokens.*max_row_tokens = 16"):
                check_packs(scaled(name), collator, row_tokens=most)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_a_rope_that_follows_the_longest_row_is_exact_below_its_limit_and_not_above(name: str) -> None:
    model = nn.Module.to(scaled(name), torch.float64)
    for how in ("packed", "padded"):
        assert max(compare(model, how, lengths=(5, 16, 9))) < 1e-10
        assert max(compare(model, how, lengths=(5, 40, 9))) > 1e-3


def test_attention_in_chunks_is_refused_in_packs_longer_than_a_chunk_and_exact_otherwise() -> None:
    """Llama-4's gradient was off by 0.17: chunks are counted from the start of the pack."""
    model = build_double("llama4_text")  # chunks of 8
    for most in (9, None):
        with pytest.raises(ConfigError, match=r"chunks of 8 tokens.*set train.collate = 'padded', or"):
            check_packs(model, PACKED, micro_batch_tokens=most)
    check_packs(model, PACKED, micro_batch_tokens=8)
    check_packs(model, PADDED)
    assert max(compare(model, "packed", lengths=(5, 9, 7))) > 1e-3
    assert max(compare(model, "packed", lengths=(5, 3))) < 1e-10
    assert max(compare(model, "padded", lengths=(5, 19, 30))) < 1e-10


def test_a_scale_of_attention_is_refused_in_packs_that_reach_it_also_if_two_rows_do_not() -> None:
    """Llama-4's gradient was off by 0.017: layers without rope scale queries by their place in the pack."""
    model = build_double("llama4_text", num_hidden_layers=4, attention_chunk_size=4096, floor_scale=30)
    for row_tokens in (12, 64):
        with pytest.raises(ConfigError, match=r"of 30 tokens \(floor_scale\).*train\.micro_batch_tokens = 30 or less"):
            check_packs(model, PACKED, row_tokens=row_tokens, micro_batch_tokens=256)
    check_packs(model, PACKED, row_tokens=12, micro_batch_tokens=30)
    check_packs(model, PADDED, row_tokens=64)
    assert max(compare(model, "packed", lengths=(12,) * 8)) > 1e-4
    assert max(compare(model, "packed", lengths=(12, 9, 9))) < 1e-10
    assert max(compare(model, "padded", lengths=(12, 40, 64))) < 1e-10


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "phi3", "cohere2"])
@pytest.mark.parametrize("how", ["packed", "padded"])
def test_a_sliding_window_counts_within_the_row_wherever_it_is_in_the_micro_batch(name: str, how: Collate) -> None:
    model = build_double(name)
    assert model.config.sliding_window == 8
    assert max(compare(model, how)) < 1e-10


@pytest.mark.parametrize("name", ["mistral", "mixtral", "gemma3_text", "phi3", "starcoder2", "cohere2", "olmo3"])
def test_a_tree_with_a_sliding_window_is_exact_while_no_row_is_longer_than_it_and_refused_otherwise(name: str) -> None:
    model = build_double(name)  # windows of 8
    check_packs(model, TREE, row_tokens=8)
    assert max(compare(model, "tree", lengths=(8, 5, 8, 2, 7))) < 1e-10
    for most in (9, None):
        with pytest.raises(ConfigError, match=r"collate is tree.*sliding_attention of 8 tokens.*max_row_tokens to 8"):
            check_packs(model, TREE, row_tokens=most, micro_batch_tokens=10)
    with pytest.raises(ConfigError, match="rows of up to 9 tokens"):
        compare(model, "tree", lengths=(8, 9))


@pytest.mark.parametrize(("row_tokens", "lengths"), [(2048, (9, 12)), (2457, (9, 12)), (2458, (1639, 2458))])
def test_the_rows_of_the_check_are_long_only_where_they_reach_a_length_of_the_config(
    row_tokens: int, lengths: tuple[int, int]
) -> None:
    config = small_config("mistral", sliding_window=4096, max_position_embeddings=8192)
    model = AutoModelForCausalLM.from_config(config)
    collator = Collator(how="packed", token_id=0)
    assert probe_lengths(model, collator, row_tokens=row_tokens, micro_batch_tokens=8192) == lengths


def test_a_critic_of_a_family_that_cannot_be_packed_is_refused_by_name(tmp_path: Path) -> None:
    """A critic of another family had a vf_loss of 0.164 packed and 0.153 padded, without a word."""
    critic = AutoModelForTokenClassification.from_config(small_config("bloom", num_labels=1, vocab_size=64))
    critic.save_pretrained(tmp_path / "critic")
    of_bloom: dict[str, dict[str, object]] = {
        "critic": {"path": str(tmp_path / "critic"), "mini_batch_size": 3},
        "algorithm": {"advantages": "gae"},
        "model": {"attention": "eager"},
    }
    config = load_config(write_run(tmp_path / "run", of_bloom) / "config.toml")
    with pytest.raises(ConfigError, match="critic: model type 'bloom' does not keep its rows apart"):
        set_up(config, World(0, 1, torch.device("cpu")))


def test_a_critic_with_a_smaller_vocabulary_than_the_tokenizer_is_refused_before_the_first_round(
    tmp_path: Path,
) -> None:
    """The first row with an id that it lacks ended the run in the first round, in an error of torch's."""
    critic = AutoModelForTokenClassification.from_config(small_config("qwen3", num_labels=1, vocab_size=5))
    critic.save_pretrained(tmp_path / "critic")
    other: dict[str, dict[str, object]] = {
        "critic": {"path": str(tmp_path / "critic"), "mini_batch_size": 3},
        "algorithm": {"advantages": "gae"},
    }
    config = load_config(write_run(tmp_path / "run", other) / "config.toml")
    with pytest.raises(ConfigError, match=r"critic\.path is .*: its vocabulary has 5 ids"):
        set_up(config, World(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("family", "changes", "collate", "match"),
    [
        ("mistral", {"num_labels": 1}, "tree", "critic: collate is tree.*'mistral'"),
        ("mistral", {"num_labels": 2}, "packed", r"critic\.path is .*: .*other shapes"),
    ],
)
def test_what_a_critic_is_refused_for_names_the_critic(
    tmp_path: Path, family: str, changes: dict[str, int], collate: str, match: str
) -> None:
    """A head of two outputs ended in a traceback of transformers', a window in trees in a sentence about the actor."""
    config = small_config(family, vocab_size=64, **changes)
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path / "critic")
    other: dict[str, dict[str, object]] = {
        "critic": {"path": str(tmp_path / "critic"), "mini_batch_size": 3},
        "algorithm": {"advantages": "gae"},
        "train": {"collate": collate},
    }
    run = load_config(write_run(tmp_path / "run", other) / "config.toml")
    with pytest.raises(ConfigError, match=match):
        set_up(run, World(0, 1, torch.device("cpu")))


def test_weights_that_are_zero_do_not_hide_what_a_model_lets_through() -> None:
    model = build("bloom")
    head = model.lm_head.weight
    head.data.zero_()
    with pytest.raises(ConfigError, match="does not keep its rows apart"):
        check_packs(model, PACKED)
    assert not head.any()
