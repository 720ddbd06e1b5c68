"""One row as a mapping or a JSONL line, checked: an error names the place and the field.

Fields that are not ours are passed over, so that another framework's dump can be planned; only a
misspelt `loss_tokens`, which would silently fall back to its default, is refused.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np

from raggedright.errors import RowsError

LARGEST = 2**31 - 1


class Record(NamedTuple):
    """The fields of a row, in their order everywhere."""

    prompt: str
    session: int
    trajectory: int
    prompt_tokens: int
    response_tokens: int
    loss_tokens: int
    is_padding: bool


FIELDS = Record._fields
COUNTS = FIELDS[1:-1]
REQUIRED = FIELDS[:-2]


def parse_lines(lines: Iterable[str | bytes], *, noun: str = "row") -> Iterator[tuple[str, object]]:
    """Each line's place and what its JSON says, a row or another noun; blank lines are passed over."""
    for i, line in enumerate(lines, start=1):
        try:
            text = (line if isinstance(line, str) else line.decode()).removeprefix("\ufeff" if i == 1 else "").strip()
            record = json.loads(text) if text else None
        except UnicodeDecodeError:
            raise RowsError(f"line {i}: not UTF-8 text; {noun}s are JSON, one object a line") from None
        except (ValueError, RecursionError) as error:
            said = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise RowsError(f"line {i}: not JSON ({said}); one line is one {noun}, an object") from None
        if text:
            yield f"line {i}", record


def check_record(where: str, record: object) -> Record:
    """The row that a mapping describes; `where` is its place, for the error."""
    if not isinstance(record, Mapping):
        raise RowsError(f"{where}: {record!r:.40} is not an object with the fields {', '.join(REQUIRED)}")
    for name in REQUIRED:
        if name not in record:
            raise RowsError(f"{where}: field {name} is missing; a row has {', '.join(REQUIRED)}")
    prompt, is_padding = record["prompt"], record.get("is_padding", False)
    if not isinstance(prompt, str):
        raise RowsError(f"{where}: prompt is {prompt!r:.40}; it takes a string")
    if type(is_padding) is not bool:
        raise RowsError(f"{where}: is_padding is {is_padding!r:.40}; it takes true or false")
    if "loss_tokens" in record:
        counts = [record[name] for name in COUNTS]
    else:
        others = {str(name).lower(): name for name in record if name not in FIELDS}
        for match in get_close_matches("loss_tokens", others, n=1, cutoff=0.85):
            raise RowsError(f"{where}: field {others[match]} is unknown; is it loss_tokens?")
        counts = [*(record[name] for name in COUNTS[:-1]), record["response_tokens"]]
    for name, value in zip(COUNTS, counts, strict=True):
        if type(value) is bool or not isinstance(value, int | np.integer) or not 0 <= value <= LARGEST:
            raise RowsError(f"{where}: {name} is {value!r:.40}; it takes a whole number from 0 to {LARGEST:,}")
    row = Record._make((prompt, *map(int, counts), is_padding))
    if row.loss_tokens > row.response_tokens:
        raise RowsError(f"{where}: {too_many_loss_tokens(row.loss_tokens, row.response_tokens)}")
    return row


def too_many_loss_tokens(loss_tokens: int, response_tokens: int) -> str:
    """What is wrong with a row whose loss covers more than its response."""
    return (
        f"loss_tokens is {loss_tokens:,} and response_tokens {response_tokens:,}; "
        "the loss covers response tokens only, so it cannot be more"
    )
