"""A made-up batch for a model: ragged sessions with tokens, masks, log-probs, advantages, and images in some rows.

Invariants: the same for the same seed; every case that a cut can get wrong is in it: sessions without a row, rows
without a loss token, observed tokens among generated ones, rows with a shared prefix, ratios on both sides of the clip,
and on request rows of given lengths and ratios beyond every clamp.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from raggedright.check.lengths import PAST
from raggedright.check.models import known_routers
from raggedright.check.reference import MadeUp, TokenFields, row_outputs
from raggedright.rows import Rows
from raggedright.tensors.images import has_vision, placeholder_ids
from raggedright.tensors.routing import NOT_ROUTED

FAR = 25.0  # a log-ratio beyond every clamp
_FAR_FROM_REFERENCE = 4.0  # k3 of it is beyond its clamp


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

    Old and reference log-probs lie near the model's own, so that ratios lie about 1 and some are clipped; or `far`
    from them in some tokens, and in all tokens of some rows. With `row_tokens`, the second row has that many tokens at
    the first place, the third at the second, and so on, and no session is without a row.
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
            for name, of_tokens in noise.items():
                row[f"{name}_log_probs"] = log_probs.to(dtype) + of_tokens
    return MadeUp(rows, fields)


def _far(rng: np.random.Generator, noise: dict[str, Tensor], *, whole_row: bool) -> dict[str, Tensor]:
    """The noise with jumps up and down; the rollout's log-probs stay near the old ones."""
    size = len(noise["old"])
    jumps = torch.from_numpy(rng.choice([-1.0, 0.0, 0.0, 0.0, 0.0, 1.0], size=(2, size))).to(noise["old"].dtype)
    old = noise["old"] + FAR * (-torch.ones_like(jumps[0]) if whole_row else jumps[0])
    return {"old": old, "ref": noise["ref"] + _FAR_FROM_REFERENCE * jumps[1], "rollout": old + noise["rollout"]}


def _record_experts(rng: np.random.Generator, model: nn.Module, rows: Rows, fields: list[TokenFields]) -> None:
    """Experts as a rollout leaves them: some other than the model's own, none at the end, none at all in some rows."""
    routers = known_routers(model)
    for i, row in enumerate(fields if routers else ()):
        assert routers is not None
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
    """A row, of `total` tokens of text if given, that begins as an earlier one of its prompt does for some tokens."""
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
        row |= _image(rng, config, ids, response, dtype) if rng.integers(0, 2) else {}
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


def _image(
    rng: np.random.Generator, config: PretrainedConfig, ids: Tensor, response: int, dtype: torch.dtype
) -> TokenFields:
    """An image of one or two merged patches in front of the prompt, with the positions that the model gives it."""
    merge, patch = config.vision_config.spatial_merge_size, config.vision_config.patch_size
    height, width = merge, merge * int(rng.integers(1, 3))
    num_tokens = height * width // merge**2
    start, image, end = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    ids = torch.cat((torch.tensor([start, *[image] * num_tokens, end]), ids))
    pixels = 3 * config.vision_config.temporal_patch_size * patch**2
    rows, columns = torch.arange(height // merge), torch.arange(width // merge)
    grid = torch.stack(
        (rows.repeat_interleave(len(columns)) * 0, rows.repeat_interleave(len(columns)), columns.repeat(len(rows)))
    )
    after = int(grid.max()) + 1
    text = torch.arange(len(ids) - 1 - num_tokens)
    positions = torch.cat((torch.zeros(3, 1, dtype=torch.long), 1 + grid, (1 + after + text).expand(3, -1)), dim=1)
    return {
        "input_ids": ids,
        "position_ids": positions,
        "multi_modal_inputs": {
            "pixel_values": torch.from_numpy(rng.normal(size=(height * width, pixels))).to(dtype),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        },
    }
