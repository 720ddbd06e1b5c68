"""Kinds of fields: the well-known names, and what the shapes of any other field say.

The surprise: chance is not evidence. A field that can be read in two ways (in a batch of one row almost every tensor
can) is refused with the words to declare it, since the wrong reading would pad it wrongly later and silently.
"""

from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from raggedright.arrays import Bools, Ints
from raggedright.errors import ConfigError
from raggedright.tensors.column import Column


class Kind(StrEnum):
    """What the values of a field belong to."""

    PROMPT = "prompt"  # one value a prompt token
    RESPONSE = "response"  # one value a response token
    SEQUENCE = "sequence"  # one value a token of prompt and response
    POSITIONS = "positions"  # position ids: [seq], or [3, seq] and [4, seq]
    ROUTING = "routing"  # experts chosen: [seq, layers, topk]
    ROW = "row"  # one value a row, of one shape
    GROUP = "group"  # id of the group that advantages are computed in
    MEDIA = "media"  # images and the like, none in a padding row
    OPAQUE = "opaque"  # anything else

    @property
    def by_token(self) -> bool:
        """Whether one of the dims is the tokens'."""
        return self in _TOKENS

    @property
    def tokens(self) -> str:
        """Which tokens a kind by token has values for."""
        return _TOKENS[self]


_TOKENS: Mapping[Kind, str] = {
    Kind.PROMPT: "prompt",
    Kind.RESPONSE: "response",
    Kind.SEQUENCE: "sequence",
    Kind.POSITIONS: "sequence",
    Kind.ROUTING: "sequence",
}
FIRST_OR_LAST = (Kind.RESPONSE, Kind.PROMPT, Kind.SEQUENCE)  # the shapes say which dim is the tokens'
_NAMES: dict[Kind, str] = {
    Kind.PROMPT: "prompts",
    Kind.RESPONSE: "responses response_mask loss_mask rm_scores token_level_scores token_level_rewards "
    "rollout_log_probs rollout_temperatures old_log_probs ref_log_prob ref_log_probs values advantages returns "
    "entropys rollout_is_weights",
    Kind.SEQUENCE: "input_ids attention_mask token_type_ids mm_token_type_ids teacher_ids teacher_logprobs",
    Kind.POSITIONS: "position_ids",
    Kind.ROUTING: "routed_experts",
    Kind.ROW: "num_turns __num_turns__ reward_score",
    Kind.GROUP: "uid",
    Kind.MEDIA: "multi_modal_inputs multi_modal_data pixel_values image_grid_thw pixel_values_videos video_grid_thw",
    Kind.OPAQUE: "index data_source reward_model extra_info extra_fields reward_extra_info raw_prompt agent_name "
    "tools_kwargs interaction_kwargs metrics session_id request_id",
}
WELL_KNOWN: Mapping[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
TOKEN_IDS = ("input_ids", "prompts", "responses", "teacher_ids")
LOSS_MASKS = ("response_mask", "loss_mask")
VECTORS = frozenset({
    *LOSS_MASKS, "input_ids", "prompts", "responses", "attention_mask", "rollout_log_probs", "old_log_probs",
    "ref_log_prob", "ref_log_probs", "values", "advantages", "returns", "rollout_is_weights",
})  # fmt: skip
"""Fields with one number per token, which losses take as they are."""


def check_token_id(token_id: object) -> None:
    """Refuse what cannot be the id of a padding token."""
    if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
        raise ConfigError(
            f"token_id is {token_id!r:.40}; it takes a token id of the vocabulary, 0 or more, "
            "such as padding_token_id(tokenizer)"
        )


def declared_kind(name: str, kind: str) -> Kind:
    """The kind that a caller gave a name."""
    if kind not in list(Kind):
        raise ConfigError(f"field {name} is declared as {kind!r}; a kind is one of {', '.join(Kind)}")
    return Kind(kind)


def token_lengths(column: Column, kind: Kind) -> Ints:
    """How many tokens a field of a kind by token has in each row of the column."""
    rows = column.rows
    lengths = {"prompt": rows.prompt_tokens, "response": rows.response_tokens, "sequence": rows.tokens}
    return lengths[kind.tokens][column.at]


def infer_kind(column: Column) -> Kind:
    """The one kind that the shapes in all rows allow; an error where that is none or several."""
    if not column.tensors:
        return Kind.OPAQUE
    readings = _readings(column)
    right = [kind for kind, fits in readings.items() if fits.all()]
    if len(right) == 1:
        return right[0]
    num_rows = len(column.at)
    declare = f'declare it, e.g. declared={{"{column.name}": "{right[0] if right else "opaque"}"}}'
    if right:
        raise column.error(
            0,
            f"has shape {column.shape()} and can be {' or '.join(right)} by the shapes of all "
            f"{num_rows:,} rows that have it; {declare}",
        )
    best = max(readings, key=lambda kind: int(readings[kind].sum()))
    i = int(np.argmin(readings[best]))
    raise column.error(
        i,
        f"has shape {column.shape(i)} and its row {column.rows.prompt_tokens[column.at[i]]:,} prompt and "
        f"{column.rows.response_tokens[column.at[i]]:,} response tokens; kind {best} fits "
        f"{readings[best].sum():,} of {num_rows:,} rows and no kind fits all: mend the row, or {declare}",
    )


def _readings(column: Column) -> dict[Kind, Bools]:
    """Which rows each kind fits: the tokens are the first dim or the last, and no other dim varies."""
    sizes = column.sizes
    same = sizes == sizes[:1]
    readings: dict[Kind, Bools] = {}
    for kind in FIRST_OR_LAST if sizes.shape[1] else ():
        for dim in (0, -1):
            fits = (sizes[:, dim] == token_lengths(column, kind)) & np.delete(same, dim, axis=1).all(axis=1)
            if kind not in readings or fits.sum() > readings[kind].sum():
                readings[kind] = fits
    return {**readings, Kind.ROW: same.all(axis=1)}
