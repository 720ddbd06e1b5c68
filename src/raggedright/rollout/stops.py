"""Stopping at a text: whether what was generated, decoded, contains one of the texts to stop at.

Only the end of the generation is decoded, as many tokens as the longest text can span: a text that was there before
has already stopped it. What the prompt ends with does not count.
"""

from collections.abc import Sequence

from raggedright.rollout.engine import Decoder


class TextStops:
    """The texts that one request stops at."""

    def __init__(self, texts: Sequence[str], tokenizer: Decoder) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        # A token is a byte of text or more, but for a few (parts of a character, marks without text).
        self._window = 2 * max(len(text.encode()) for text in texts) + 8

    def found(self, ids: list[int]) -> bool:
        """Whether the last token completed one of the texts."""
        decoded = self._tokenizer.decode(ids[-self._window :])
        return any(text in decoded for text in self._texts)
