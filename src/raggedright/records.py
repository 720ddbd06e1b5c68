"""One row as a mapping or a JSONL line, checked: an error names the place and the field.

Fields that are not ours are passed over, so that another framework's dump can be planned; only a
misspelt `loss_tokens`, which would silently fall back to its default, is refused.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from operator import itemgetter
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


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, refused where it has a key twice: Python's own reader would keep the last value silently."""
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowsError(f"the key {twice!r:.40} is given {names.count(twice)} times in one object; keep one of them")
    return record


_decode = json.JSONDecoder(object_pairs_hook=_without_duplicates).raw_decode


def parse_lines(lines: Iterable[str | bytes], *, noun: str = "row") -> Iterator[tuple[str, object]]:
    """Each line's place and what its JSON says, a row or another noun; blank lines are passed over."""
    for i, line in enumerate(lines, start=1):
        try:
            text = (line if isinstance(line, str) else line.decode()).strip()
            if i == 1:
                text = text.removeprefix("\ufeff").lstrip()
            if not text:
                continue
            record, end = _decode(text)
        except RowsError as error:
            raise RowsError(f"line {i}: {error}") from None
        except UnicodeDecodeError:
            raise RowsError(f"line {i}: not UTF-8 text; {noun}s are JSON, one object per line") from None
        except json.JSONDecodeError as error:
            raise _not_json(i, error.msg, error.colno, noun) from None
        except RecursionError as error:
            raise RowsError(f"line {i}: not JSON ({error}); one line is one {noun}, an object") from None
        except ValueError:  # Python reads no integer of more than 4,300 digits
            raise RowsError(f"line {i}: a number has too many digits; numbers go up to {LARGEST:,}") from None
        if end < len(text):
            raise _not_json(i, "Extra data", end + 1, noun)
        yield f"line {i}", record


def _not_json(line: int, fault: str, column: int, noun: str) -> RowsError:
    return RowsError(f"line {line}: not JSON ({fault} at column {column}); one line is one {noun}, an object")


def check_records(named: Sequence[tuple[str, object]]) -> Iterable[Sequence[str | int | bool]]:
    """The columns of many rows, in the order of FIELDS; `named` has the place and the mapping of each row.

    Columns are checked whole, which is several times faster than row by row; only where one of them is not plainly
    right does `check_record` look at each row, and say which is wrong.
    """
    columns = _plain_columns([record for _, record in named])
    if columns is not None:
        return columns
    return zip(*(check_record(where, record) for where, record in named), strict=True)


def _plain_columns(records: list) -> list[list] | None:
    """The columns of dicts whose values have the right types and ranges; None where that does not hold."""
    if {*map(type, records)} != {dict}:
        return None
    try:
        columns = [[*map(itemgetter(name), records)] for name in REQUIRED]
    except KeyError:
        return None
    if all("loss_tokens" in record for record in records):
        columns.append([*map(itemgetter("loss_tokens"), records)])
    elif any(_is_like_loss_tokens(name) for name in {*chain.from_iterable(records)} - {*FIELDS}):
        return None
    else:
        columns.append([record.get("loss_tokens", record["response_tokens"]) for record in records])
    columns.append([record.get("is_padding", False) for record in records])
    prompt, *counts, is_padding = columns
    if {*map(type, prompt)} != {str} or {*map(type, is_padding)} != {bool}:
        return None
    if any({*map(type, count)} != {int} or min(count) < 0 or max(count) > LARGEST for count in counts):
        return None
    response_tokens, loss_tokens = counts[-2:]
    return columns if not any(map(int.__gt__, loss_tokens, response_tokens)) else None


@lru_cache(maxsize=1024)
def _is_like_loss_tokens(name: str) -> bool:
    return bool(get_close_matches("loss_tokens", [name.lower()], n=1, cutoff=0.85))


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
        for name in record:
            if name not in FIELDS and _is_like_loss_tokens(str(name)):
                raise RowsError(f"{where}: field {name} is unknown; is it loss_tokens?")
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
