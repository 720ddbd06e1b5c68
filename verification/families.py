"""Find out which families of transformers are exact with which collation, by building and measuring small models.

Every family of AutoModelForCausalLM that can be built from a small config is run in float64, on rows longer than its
windows, chunks and kernels. Log-probs and the gradient of a weighted sum of them are compared between one micro-batch
and the rows one by one. Collations that `check_packs` accepts must agree to 1e-10; refusals are listed with the reason.

    python verification/families.py            # writes docs/models.md
    python verification/families.py qwen3 opt  # prints these
    python verification/families.py --types    # prints the rounding of float32 and bfloat16 in each family
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raggedright.check.check_inputs import leave_out_casts
from raggedright.errors import ConfigError
from raggedright.plan.layout import Collate
from raggedright.rows import Rows
from raggedright.tensors import Collator, forward_log_probs
from raggedright.tensors.row_independence import check_packs, measure, probe_lengths

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HOWS: tuple[Collate, ...] = ("packed", "tree", "padded")
TOLERANCE = 1e-10
LENGTHS = (9, 23, 37, 2)
_MAX_PARAMETERS = 4_000_000

# Families have different names for the same sizes; a config gets those that it has a field for.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim_model", "emb_dim", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("ffn_hidden_size", "dim_ff", "dff", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "local_attention", "attention_chunk_size"), 8),
    **dict.fromkeys(("attention_window_size", "sliding_window_size", "index_topk", "keep_window_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "index_block_size", "block_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_ffn_hidden_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "zero_expert_num", "index_topk_blocks"), 1),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads", "linear_num_value_heads", "rotary_dim"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 40),
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "index_head_dim": 16,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "initializer_range": 0.1,
}
_MLA: dict[str, Any] = {"num_key_value_heads": 4}
_FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
# Further values that a family needs so that it can be built, or so that it has a layer of each kind.
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "youtu"), _MLA),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3"), _MLA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _FOUR_LAYERS),
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "jamba": {"num_hidden_layers": 8, "mamba_dt_rank": 4},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "zamba": {"layer_types": ["mamba", "hybrid"], "attention_head_dim": 16},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "longcat_flash": _MLA,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xlm": {"emb_dim": 32, "n_words": 40},
    "roc_bert": {"pronunciation_vocab_size": 10, "shape_vocab_size": 10, "enable_pronunciation": False},
}


def build_double(name: str, **changes: Any) -> PreTrainedModel:
    """`build` in float64, without the casts to float32 inside the model."""
    model = build(name, **changes)
    nn.Module.to(model, torch.float64)
    leave_out_casts(model)
    return model


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A small model of a family, with random weights that depend only on the config."""
    config = small_config(name, **changes)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"the small config has {size:,} parameters: it has sizes with other names")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def small_config(name: str, **changes: Any) -> PretrainedConfig:
    """The config of a family with small sizes."""
    kind: Any = CONFIG_MAPPING[name]
    known = kind.__dataclass_fields__.keys() | getattr(kind, "attribute_map", {}).keys()
    values = {key: value for key, value in SMALL.items() if key in known} | MORE.get(name, {}) | changes
    config = kind(**values)
    config._experts_implementation = "eager"  # grouped matrix products have no float64 kernel
    return config


@dataclass(frozen=True, slots=True)
class Verdict:
    """A collation of a family: refused with a message, or accepted with an error of gradient and log-probs."""

    refused: str
    error: float


def judge(name: str) -> dict[Collate, Verdict]:
    """The verdict for every collation of a family; errors of building or running the model are raised."""
    model = build_double(name)
    verdicts: dict[Collate, Verdict] = {}
    for how in HOWS:
        try:
            check_packs(model, Collator(how=how, token_id=0), row_tokens=64, micro_batch_tokens=256)
        except ConfigError as error:
            if error.__cause__ is not None:  # it does not run at all
                raise
            verdicts[how] = Verdict(str(error), 0.0)
        else:
            verdicts[how] = Verdict("", max(compare(model, how)))
    return verdicts


def judge_all(names: Iterable[str]) -> tuple[dict[str, dict[Collate, Verdict]], dict[str, str]]:
    """Verdicts by family, and the cause for each family that cannot be built small or does not run."""
    verdicts, causes = {}, {}
    for name in names:
        try:
            verdicts[name] = judge(name)
        except Exception as error:  # whatever transformers raises for a config that it does not expect
            causes[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return verdicts, causes


def main(names: list[str]) -> None:
    """Print the verdicts of these families, or write the page with all families."""
    transformers.logging.set_verbosity_error()
    if names[:1] == ["--types"]:
        for name in names[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            _print_rounding(name)
        return
    verdicts, causes = judge_all(names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    page = _page(verdicts, causes)
    if names:
        print(page)
    else:
        PAGE.write_text(page)
        print(f"{PAGE}: {len(verdicts)} families, {len(causes)} not measured")


def _print_rounding(name: str) -> None:
    """What `check_packs` measures in a family, by type and collation: gradients on other tokens, and the difference."""
    for dtype in (torch.float32, torch.bfloat16):
        for how in HOWS:
            collator = Collator(how=how, token_id=0)
            try:
                model = nn.Module.to(build(name), dtype)
                lengths = probe_lengths(model, collator, row_tokens=64, micro_batch_tokens=256)
                print(name, dtype, how, measure(model, collator, lengths), flush=True)
            except Exception as error:  # whatever transformers raises, as above
                print(name, dtype, how, f"{type(error).__name__}: {' '.join(str(error).split())[:100]}", flush=True)


def _page(verdicts: Mapping[str, Mapping[Collate, Verdict]], causes: Mapping[str, str]) -> str:
    lines = [_HEAD.format(version=transformers.__version__, families=len(verdicts), lengths=_listed(LENGTHS))]
    lines += ["| family | packed | tree | padded |", "| --- | --- | --- | --- |"]
    for name, of_family in sorted(verdicts.items()):
        lines.append(f"| {name} | {' | '.join(_cell(of_family[how]) for how in HOWS)} |")
    lines += ["", "## Not measured", "", _NOT_MEASURED, ""]
    lines.append(_listed(f"`{name}`" for name in sorted(causes)) + ".")
    return "\n".join(lines) + "\n"


def _cell(verdict: Verdict) -> str:
    if not verdict.refused:
        return "exact" if verdict.error < TOLERANCE else f"**wrong, {verdict.error:.1g}**"
    for words, short in _REASONS.items():
        if words in verdict.refused:
            return f"refused: {short}"
    raise AssertionError(verdict.refused)


def _listed(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in names)


_REASONS = {
    "is not causal": "not causal",
    "no collation avoids it": "depends on the micro-batch",
    "in chunks of": "packs longer than a chunk",
    "does not keep its rows apart": "rows attend to each other",
    "do not see all that came before": "not full attention",
    "the model's attention is": "no sdpa attention",
}
_HEAD = """# Supported models

Whether a row has the same log-probs and the same gradient in every micro-batch depends on the model family and on
`train.collate`. `raggedright train` measures this before the first round, for the actor and for the critic, and refuses
a collation that is not exact (`check_packs` in `tensors/row_independence.py`). It checks:

- **Rows that attend to each other or to later tokens.** The gradient of a row's outputs with respect to the embeddings
  of other rows, and of later tokens of the same row, must be exactly zero. The test rows are longer than the windows,
  chunks and kernels in the model's config, as far as the rows of the run can be that long.
- **Positions and routing choices.** The outputs of a row in a micro-batch must equal those of the row alone, up to
  rounding. This is measured in float32, also when a run computes in bfloat16 (the weights are cast for the check, and
  cast back). Over the families below, exact collations differ by at most 8e-7 of the outputs' spread in float32, and
  wrong ones that no gradient shows by 0.02 or more (`blenderbot-small` in trees). In bfloat16 an exact collation
  differs by up to 0.05 (`qwen3_moe`, a router's choice), so bfloat16 cannot tell them apart. With flash attention,
  which has no float32, the check runs in the run's type and allows 0.1. `python verification/families.py --types`
  measures this.
- **Rope types that depend on the longest row** (longrope, as in Phi-3 with a long context, and dynamic NTK). They are
  refused unless `rollout.max_row_tokens` is at most the model's original number of positions; up to that length they
  do not depend on it.
- **Chunked attention, and attention scaled by position** (Llama-4). They are exact when padded. When packed, they are
  refused unless a pack fits into one chunk (`attention_chunk_size`) and one step of the scale (`floor_scale`), because
  transformers counts both from the start of the pack.

With `train.micro_batch_rows = 1`, a pack has one row, and only later tokens and positions of that row are checked.
Families whose rows attend to each other in a pack are exact with it.

Models are always in evaluation mode, also with `model.activation_checkpointing`, so dropout is never active.

The table was measured with transformers {version}: {families} families of `AutoModelForCausalLM`, built from small
configs with windows and chunks of 8 tokens, in float64, on rows of {lengths} tokens. `python verification/families.py`
writes it. "exact" means that log-probs and gradient agree with those of the rows run one by one to 1e-10. "refused" is
followed by the reason. The local rollout engine supports fewer families: it refuses those that keep a state other than
keys and values.
"""
_NOT_MEASURED = """These families need a composite config (most are a vision model around a family of the table),
another package, or inputs that a text row does not have. A run checks them in the same way."""


def compare(model: nn.Module, how: Collate, *, lengths: tuple[int, ...] = LENGTHS) -> tuple[float, float]:
    """Largest difference of log-probs and relative error of the gradient, between one micro-batch and single rows."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 40, (size,), generator=generator) for size in lengths]
    together, gradient = _run(model, Collator(how=how, token_id=0, even_tokens=10**9), ids)
    parts = [_run(model, Collator(how="padded", token_id=0), [row], first=i) for i, row in enumerate(ids)]
    apart = max(float((ours - row[0]).abs().max()) for ours, (row, _) in zip(together, parts, strict=True))
    total = sum(float(value.square().sum()) for value in gradient.values())
    for _, part in parts:
        for name, value in part.items():
            gradient[name] = gradient.get(name, torch.zeros_like(value)) - value
    return apart, (sum(float(value.square().sum()) for value in gradient.values()) / total) ** 0.5


def _run(
    model: nn.Module, collator: Collator, ids: list[Tensor], first: int = 0
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The log-probs of each row, and the gradient of their weighted sum, with one weight per row and token."""
    rows = Rows.from_columns(
        prompt=[f"p{i}" for i in range(len(ids))],
        session=[0] * len(ids),
        trajectory=[0] * len(ids),
        prompt_tokens=[1] * len(ids),
        response_tokens=[len(row) - 1 for row in ids],
    )
    fields = [{"input_ids": row, "response_mask": torch.ones(len(row) - 1, dtype=torch.long)} for row in ids]
    micro = collator(rows, fields, weight=np.zeros(len(ids)), step_loss_tokens=1)
    model.zero_grad(set_to_none=True)
    log_probs = micro.per_row(forward_log_probs(model, micro).log_probs)
    weights = (torch.sin(torch.arange(1.0, len(row) + 1).double() * (first + i + 1)) for i, row in enumerate(log_probs))
    torch.stack([(row * weight).sum() for row, weight in zip(log_probs, weights, strict=True)]).sum().backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return [row.detach() for row in log_probs], gradient


if __name__ == "__main__":
    main(sys.argv[1:])
