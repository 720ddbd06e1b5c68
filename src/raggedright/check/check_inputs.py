"""The models and the batches that are checked.

Models are tiny ones that are created here, or a model directory of the user. They are loaded as in a run
(`train/load_models.py`), so that a dropout or cast that a run does not switch off shows here, too.

A batch has ragged sessions with tokens, masks, log-probs, advantages, and images in some rows. Invariants: it depends
only on the seed, and it has every case that a cut can get wrong: sessions without a row, rows without a loss token,
observations between generated tokens, rows with a shared prefix, ratios on both sides of the clip and, on request, rows
of given lengths and ratios beyond every clamp.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig, PretrainedConfig

from raggedright.check.plain_losses import MadeUp, TokenFields, row_outputs
from raggedright.config.sections import Lora, Model
from raggedright.errors import ConfigError
from raggedright.rows import Rows
from raggedright.tensors.images import has_vision, image_positions, placeholder_ids
from raggedright.tensors.routing import NOT_ROUTED, find_routers
from raggedright.tensors.row_independence import is_length
from raggedright.train.load_models import load_actor, load_critic, make_tokenizer
from raggedright.train.lora import add_adapter

PAST = 4  # tokens beyond a length
LONGEST = 1_024  # tokens of a row, by default
SHORT = 12  # tokens; every batch has rows of about this length
_POSITIONS = ("position_embeddings", "n_positions", "seq_len")  # parts of names of a number of positions
_MAX_LOGITS = 2**28  # of a padded micro-batch of _MAX_ROWS rows: 2 GiB in float64
_MAX_ROWS = 8
FAR = 25.0  # a log-ratio beyond every clamp
_FAR_FROM_REFERENCE = 4.0  # k3 of it is beyond its clamp
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # no token is special
_TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    **_NO_IDS,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_IMAGE_IDS = {"image_token_id": 35, "video_token_id": 36, "vision_start_token_id": 37, "vision_end_token_id": 38}
BUILTIN: dict[str, dict[str, object]] = {
    "qwen3": {"model_type": "qwen3", **_TEXT, "attention_dropout": 0.1},
    "qwen3-moe": {"model_type": "qwen3_moe", **_TEXT, **_EXPERTS},
    "qwen3-vl": {
        "model_type": "qwen3_vl",
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": _VISION,
        **_IMAGE_IDS,
    },
}
CRITICS: dict[str, dict[str, object]] = {  # not of the family of an actor
    "mistral": {"model_type": "mistral", **_TEXT, "sliding_window": 8},
}
ADAPTED = {f"{name}-lora": config for name, config in BUILTIN.items()}  # actors with a LoRA adapter
_MADE = {**BUILTIN, **CRITICS, **ADAPTED}
_RANK = 3


def load_model(
    name: str, dtype: str, *, critic: bool = False, casts: bool = True, recompute: bool = False, seed: int = 0
) -> nn.Module:
    """An actor, or a critic with one output per token, loaded as in a run; every dropout is off.

    Without `casts`, a float64 model does not cast to float32 inside. With `recompute`, the model is in training mode
    and recomputes activations.
    """
    _config(name)  # refuses an unknown name before anything is loaded
    try:
        loaded = _load(name, dtype, "sdpa", critic=critic, recompute=recompute, seed=seed)
    except ConfigError:
        try:  # families without sdpa
            loaded = _load(name, dtype, "eager", critic=critic, recompute=recompute, seed=seed)
        except ConfigError as error:
            raise ConfigError(f"--model {name}: {str(error).removeprefix(f'model.path is {name}: ')}") from None
    return loaded if casts or dtype != "float64" else leave_out_casts(loaded)


def _load(
    name: str, dtype: str, attention: Literal["sdpa", "eager"], *, critic: bool, recompute: bool, seed: int
) -> nn.Module:
    source = {"made": _MADE[name]} if name in _MADE else {"path": name}
    settings = {"dtype": dtype, "attention": attention, "activation_checkpointing": recompute}
    model, tokenizer = Model.model_validate({**source, **settings}), make_tokenizer("ab")
    if critic:
        return load_critic(model, None, tokenizer, seed=seed)
    actor = load_actor(model, tokenizer, seed=seed)
    if name in ADAPTED:
        _adapt(actor, seed)
    return actor


def _adapt(actor: nn.Module, seed: int) -> None:
    """Give a model an adapter as in the middle of a run: B, which starts at zero, has values."""
    add_adapter(actor, Lora(rank=_RANK), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


class _Double(TorchFunctionMode):
    """Casts to float32 become casts to float64."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func is Tensor.float:
            return args[0].double()
        doubled = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **doubled)


def _doubled(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def leave_out_casts(model: nn.Module) -> nn.Module:
    """The model in float64 throughout.

    Depending on the cut, a weight's gradients are added before or after a cast to float32, which differs by 1e-7.
    """
    kind = type(model)

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with _Double():
                return kind.forward(self, *args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})  # a subclass, so that the model can be copied
    return model


def has_critic(name: str) -> bool:
    """Whether the family of a model has critics; a critic has no adapter."""
    if name in ADAPTED:
        return False
    config = _config(name)
    return has_vision(config) or type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING


def _config(name: str) -> PretrainedConfig:
    if name in _MADE:
        return AutoConfig.for_model(**_MADE[name])  # pyright: ignore[reportArgumentType]
    if not (Path(name) / "config.json").is_file():
        raise ConfigError(
            f"--model {name}: not one of {', '.join(_MADE)} and not a model directory (it has no config.json)"
        )
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(f"--model {name}: transformers cannot read its config.json ({cause})") from None


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths in a model's config at which it may compute differently, and the tokens of rows that exceed them.

    A sliding window, an attention chunk, a convolution or a scaled rope has no effect on shorter rows. Rows have up to
    `limit` tokens; `not_reached` has the lengths beyond it.
    """

    reached: dict[str, int]
    not_reached: dict[str, int]
    row_tokens: tuple[int, ...]
    limit: int


def find_lengths(config: PretrainedConfig, *, longest: int | None = None) -> Lengths:
    """The lengths of a text model, or of the text part of a model; rows have at most `longest` tokens."""
    text = config.get_text_config(decoder=True)
    limit = longest or min(LONGEST, _MAX_LOGITS // (_MAX_ROWS * text.vocab_size))
    lengths = {name: value for name, value in _walk(text.to_dict()) if value > 1}
    tokens = {name: _tokens(name, value, text) for name, value in lengths.items()}
    reached = {name: value for name, value in lengths.items() if tokens[name] <= limit}
    not_reached = {name: value for name, value in lengths.items() if tokens[name] > limit}
    rows = sorted({tokens[name] for name in reached if tokens[name] > SHORT})
    return Lengths(reached, not_reached, tuple(rows) or (min(limit, 2 * SHORT),), limit)


def _walk(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        elif type(value) is int and (is_length(name) or any(part in name for part in _POSITIONS)):
            yield prefix + name, value


def _tokens(name: str, length: int, text: PretrainedConfig) -> int:
    """The tokens of a row that exceeds a length; learned positions end at the length itself."""
    is_end = "original" not in name and ("position" in name or "seq_len" in name)
    learned = is_end and not getattr(text, "rope_parameters", None)
    return length if learned else length + PAST


def make_up(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    num_prompts: int = 6,
    seed: int = 0,
    row_tokens: Sequence[int] = (),
    far: bool = False,
) -> MadeUp:
    """Sessions of 0 to 3 rows; some rows without loss tokens, some with observations, some with images.

    Old and reference log-probs are near the model's own, so that ratios are near 1 and some are clipped; or `far` from
    them in some tokens, and in all tokens of some rows. `row_tokens` are the tokens of the second row, the third row,
    and so on; then every session has a row.
    """
    rng = np.random.default_rng(seed)
    config = model.config
    assert isinstance(config, PretrainedConfig)
    size = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    vocab = min(size, 32, *placeholder_ids(config))
    records, fields = [], []
    for prompt in range(num_prompts):
        earlier = torch.empty(0, dtype=torch.long)
        for session in range(int(rng.integers(2, 4))):
            for trajectory in range(int(rng.integers(1 if row_tokens else 0, 4))):
                total = row_tokens[len(fields) - 1] if 1 <= len(fields) <= len(row_tokens) else None
                row = _row(rng, config, vocab, dtype, earlier, total)
                earlier, mask = row["input_ids"], row["response_mask"]
                assert isinstance(earlier, Tensor)
                assert isinstance(mask, Tensor)
                total = len(earlier)
                records.append(
                    {
                        "prompt": f"p{prompt}",
                        "session": session,
                        "trajectory": trajectory,
                        "prompt_tokens": total - len(mask),
                        "response_tokens": len(mask),
                        "loss_tokens": int(mask.sum()),
                    }
                )
                fields.append(row)
    rows = Rows.from_records(records)
    _record_experts(rng, model, rows, fields)
    with torch.no_grad():
        for i, row in enumerate(fields):
            log_probs, _ = row_outputs(model, rows, i, row)
            noise = {name: row.pop(f"{name}_noise") for name in ("old", "ref", "rollout")}
            if far:
                noise = _far(rng, noise, whole_row=i % 5 == 0)
            for name, values in noise.items():
                row[f"{name}_log_probs"] = log_probs.to(dtype) + values
    return MadeUp(rows, fields)


def _far(rng: np.random.Generator, noise: dict[str, Tensor], *, whole_row: bool) -> dict[str, Tensor]:
    """The noise with large positive and negative steps; the rollout's log-probs stay near the old ones."""
    size = len(noise["old"])
    jumps = torch.from_numpy(rng.choice([-1.0, 0.0, 0.0, 0.0, 0.0, 1.0], size=(2, size))).to(noise["old"].dtype)
    old = noise["old"] + FAR * (-torch.ones_like(jumps[0]) if whole_row else jumps[0])
    return {"old": old, "ref": noise["ref"] + _FAR_FROM_REFERENCE * jumps[1], "rollout": old + noise["rollout"]}


def _record_experts(rng: np.random.Generator, model: nn.Module, rows: Rows, fields: list[TokenFields]) -> None:
    """Add recorded experts: some differ from the model's own, the last tokens have none, and some rows have none."""
    try:
        routers = find_routers(model)
    except ConfigError:  # they can be neither recorded nor replayed
        return
    if routers is None:
        return
    for i, row in enumerate(fields):
        if rng.integers(0, 6) == 0:
            continue
        with torch.no_grad(), routers.recording() as recorded:
            row_outputs(model, rows, i, row)
        experts = recorded()
        others = torch.from_numpy(rng.random((*experts.shape[:2], routers.num_experts))).argsort(-1)[
            ..., : routers.topk
        ]
        changed = torch.from_numpy(rng.random(experts.shape[:2]) < 0.2)
        row["routed_experts"] = torch.where(changed[..., None], others.to(experts.dtype), experts)
        row["routed_experts"][-int(rng.integers(1, 3)) :] = NOT_ROUTED


def _row(
    rng: np.random.Generator,
    config: PretrainedConfig,
    vocab: int,
    dtype: torch.dtype,
    earlier: Tensor,
    total: int | None,
) -> TokenFields:
    """A row that shares a prefix with an earlier row of its prompt; `total` is its number of tokens, if not random."""
    prompt, response = int(rng.integers(1, 6)), int(rng.integers(1, 8))
    if total is not None:
        response = 2 * PAST
        prompt = max(1, total - response)
    ids = torch.from_numpy(rng.integers(0, vocab, prompt + response))
    if not has_vision(config):
        common = int(rng.integers(0, min(len(ids), len(earlier)) + 1))
        ids[:common] = earlier[:common]
    kind = rng.integers(0, 6) if total is None else 2
    mask = torch.ones(response, dtype=torch.long)
    if kind == 0:
        mask[:] = 0  # nothing to learn from
    elif kind == 1:
        mask[1 : response // 2 + 1] = 0  # an observation in the middle
    row: TokenFields = {"input_ids": ids, "response_mask": mask}
    if has_vision(config):
        row |= _image(rng, config, ids, dtype) if rng.integers(0, 2) else {}
        row.setdefault("position_ids", torch.arange(prompt + response).expand(3, -1))
        row.setdefault("multi_modal_inputs", {})
    noise = torch.from_numpy(rng.normal(size=(6, response))).to(dtype)
    row |= {
        "old_noise": 0.3 * noise[0],
        "ref_noise": 0.2 * noise[1],
        "rollout_noise": 0.1 * noise[2],
        "advantages": noise[3],
        "returns": noise[4],
        "values": 0.5 * noise[5],
    }
    return row


def _image(rng: np.random.Generator, config: PretrainedConfig, ids: Tensor, dtype: torch.dtype) -> TokenFields:
    """The fields of a row with an image of one or two merged patches before its tokens."""
    merge, patch = config.vision_config.spatial_merge_size, config.vision_config.patch_size
    height, width = merge, merge * int(rng.integers(1, 3))
    num_tokens = height * width // merge**2
    start, image, end = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    ids = torch.cat((torch.tensor([start, *[image] * num_tokens, end]), ids))
    pixels = 3 * config.vision_config.temporal_patch_size * patch**2
    grid = np.array([[1, height, width]])
    positions = image_positions(ids.numpy(), grid, image_token_id=image, merge_size=merge)
    return {
        "input_ids": ids,
        "position_ids": torch.from_numpy(positions),
        "multi_modal_inputs": {
            "pixel_values": torch.from_numpy(rng.normal(size=(height * width, pixels))).to(dtype),
            "image_grid_thw": torch.from_numpy(grid),
        },
    }
