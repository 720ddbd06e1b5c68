"""The lengths in a model's config at which it may begin to compute otherwise, and rows that reach past them.

A sliding window, an attention chunk, a convolution or a rope that is scaled beyond its original positions shows
nothing on rows that are shorter than it. Rows stop at a limit: `not_reached` names the lengths beyond it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformers import PretrainedConfig

PAST = 4  # tokens beyond a length
LONGEST = 1_024  # of a row, unless the caller says otherwise
SHORT = 12  # every batch has rows of about this many tokens
_PARTS = ("window", "chunk", "position_embeddings", "n_positions", "seq_len", "conv", "kernel")
_MOST_LOGITS = 2**28  # of a padded micro-batch: 2 GiB in float64
_MOST_ROWS = 8


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths by the name of their key, and the tokens of the rows that reach past them."""

    reached: dict[str, int]
    not_reached: dict[str, int]
    row_tokens: tuple[int, ...]
    limit: int


def find_lengths(config: PretrainedConfig, *, longest: int | None = None) -> Lengths:
    """The lengths of a model of text, or of the text half of one; rows have at most `longest` tokens."""
    text = config.get_text_config(decoder=True)
    limit = longest or min(LONGEST, _MOST_LOGITS // (_MOST_ROWS * text.vocab_size))
    found = {name: value for name, value in _walk(text.to_dict()) if value > 1}
    tokens = {name: _tokens(name, value, text) for name, value in found.items()}
    reached = {name: found[name] for name in tokens if tokens[name] <= limit}
    not_reached = {name: found[name] for name in tokens if tokens[name] > limit}
    rows = sorted({tokens[name] for name in reached if tokens[name] > SHORT})
    return Lengths(reached, not_reached, tuple(rows) or (min(limit, 2 * SHORT),), limit)


def _walk(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        elif type(value) is int and any(part in name for part in _PARTS) and "layers" not in name:
            yield prefix + name, value


def _tokens(name: str, length: int, text: PretrainedConfig) -> int:
    """Tokens of a row that reaches past a length; learned positions end at the length itself."""
    is_end = "original" not in name and ("position" in name or "seq_len" in name)
    learned = is_end and not getattr(text, "rope_parameters", None)
    return length if learned else length + PAST
