"""A row's tags as JSON text, checked: what may be a tag, and the one way it is written.

Rows of a run have few different tags, and making JSON of short ones takes longer than all else in a short row's put.
So a text is remembered by the tags' bytes as `marshal` has them, which differ where types do (1, 1.0 and True).
"""

import json
import marshal
import sys
from collections.abc import Mapping

from raggedright.store.protocol import StoreError, Tag

MOST_KNOWN = 4_096
_PLAIN_TAGS = frozenset((bool, int, type(None)))
_MARSHAL = 2  # the last version without references, so that what is alike has the same bytes
_MOST = sys.float_info.max  # compared exactly, whole numbers of any size too
_known: dict[bytes, str] = {}

to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # made once


def tags_text(tags: Mapping[str, Tag]) -> str:
    """Tags as JSON; an error says which cannot be one, without a subject."""
    try:
        marked = marshal.dumps(tags, _MARSHAL)  # type: ignore[arg-type]
    except ValueError:  # another mapping than a dict, or something in it that is no tag
        return _checked_text(tags)
    text = _known.get(marked)
    if text is None:
        text = _checked_text(tags)
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[marked] = text
    return text


def _checked_text(tags: Mapping[str, Tag]) -> str:
    for name, value in tags.items():
        if not is_text(name) or not (type(value) in _PLAIN_TAGS or is_text(value) or is_number(value)):
            raise StoreError(f"tag {name} is {value!r:.80}; it takes text, a finite number, a boolean or None")
    return to_json({**tags})


def is_number(value: object) -> bool:
    """Whether it is a finite number, of Python's own types."""
    return (type(value) is int or type(value) is float) and -_MOST <= value <= _MOST


def is_text(value: object) -> bool:
    """Whether it is text of whole Unicode characters, which UTF-8 can hold."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))
