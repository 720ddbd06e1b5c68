"""Rows: the counts of a batch of trajectories, and nothing else. The planner sees only these.

A struct of arrays in the caller's order. A row is named by (prompt, session, trajectory); its key is
`prompt/session/trajectory`. Invariants, checked when Rows are made: no key occurs twice, no count is negative,
loss_tokens <= response_tokens. Arrays are read-only. An error names the line, record or row, and the field.

Note: `order` ranks the rows by name, so decisions that use it do not depend on the order in which rows arrived. Fields
that are unknown are ignored, so that a dump of another framework can be planned; only a misspelt `loss_tokens`, which
would silently get its default, is refused.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from os import PathLike
from typing import Any, TextIO

import numpy as np
from numpy.typing import ArrayLike

from raggedright.arrays import Bools, Ints, Strings, number_names, starts_run
from raggedright.errors import RowsError

PADDING_GROUP = "<padding>"
"""Prompts of padding rows start with this; if a field has numbers for prompts, those of padding rows are negative."""

MAX_COUNT = 2**31 - 1
CHUNK_ROWS = 500  # rows of a file that are checked together; more would not fit the processor's cache


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Rows:
    """A batch's rows as arrays of one length; make them with `from_columns`, `from_records` or `from_jsonl`."""

    prompt: Strings
    session: Ints
    trajectory: Ints
    prompt_tokens: Ints
    response_tokens: Ints
    loss_tokens: Ints
    is_padding: Bools

    order: Ints = field(init=False)  # rank of each row in the sort order of (prompt, session, trajectory)
    prompt_index: Ints = field(init=False)  # prompts numbered in the order of their names
    session_index: Ints = field(init=False)  # sessions numbered in the order of (prompt, session)

    def __post_init__(self) -> None:
        prompt_index = number_names(self.prompt)
        by_name = np.lexsort((self.trajectory, self.session, prompt_index))
        new_session = starts_run(prompt_index[by_name]) | starts_run(self.session[by_name])
        twice = ~(new_session | starts_run(self.trajectory[by_name]))
        if twice.any():
            i = int(by_name[np.flatnonzero(twice)[0]])
            raise RowsError(f"row {self.key[i]} is given twice; number the trajectories of a session differently")
        order, session_index = np.empty_like(by_name), np.empty_like(by_name)
        order[by_name] = np.arange(len(by_name))
        session_index[by_name] = np.cumsum(new_session) - 1
        for name, array in (("order", order), ("prompt_index", prompt_index), ("session_index", session_index)):
            object.__setattr__(self, name, array)
        for array in vars(self).values():
            array.setflags(write=False)

    @classmethod
    def from_columns(
        cls,
        *,
        prompt: Sequence[str] | Strings,
        session: ArrayLike,
        trajectory: ArrayLike,
        prompt_tokens: ArrayLike,
        response_tokens: ArrayLike,
        loss_tokens: ArrayLike | None = None,
        is_padding: ArrayLike | None = None,
    ) -> "Rows":
        """Rows from one array or list per field; `loss_tokens` defaults to `response_tokens`."""
        loss_tokens = response_tokens if loss_tokens is None else loss_tokens
        is_padding = np.zeros(len(prompt), dtype=bool) if is_padding is None else is_padding
        values = (prompt, session, trajectory, prompt_tokens, response_tokens, loss_tokens, is_padding)
        return cls(**_check_columns(dict(zip(FIELDS, values, strict=True)), "row {}".format))

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, object]]) -> "Rows":
        """Rows from one mapping per row, with the fields of a JSONL line."""
        return cls._from_places((f"record {i}", record) for i, record in enumerate(records))

    @classmethod
    def from_jsonl(cls, source: str | PathLike[str] | Iterable[str | bytes]) -> "Rows":
        """Rows from a path, or from the lines of an open file, one JSON object per line; blank lines are ignored."""
        if not isinstance(source, str | PathLike):
            return cls._from_places(parse_lines(source))
        with open(source, "rb") as file:
            return cls._from_places(parse_lines(file))

    @classmethod
    def _from_places(cls, records: Iterator[tuple[str, object]]) -> "Rows":
        """Rows from records, each with its place for errors."""
        places: list[str] = []
        parts = [_check_columns({name: [] for name in FIELDS}, str)]
        while chunk := list(islice(records, CHUNK_ROWS)):
            parts.append(_check_columns(_columns_of(chunk), lambda i, chunk=chunk: chunk[i][0]))
            places += [where for where, _ in chunk]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in FIELDS}
        try:
            return cls(**columns)
        except RowsError:
            first: dict[tuple[object, ...], str] = {}
            keys = zip(*(columns[name].tolist() for name in FIELDS[:3]), strict=True)
            for key, where in zip(keys, places, strict=True):
                if first.setdefault(key, where) != where:
                    name = "/".join(map(str, key))
                    raise RowsError(
                        f"{where}: row {name} is in {first[key]} already; number the trajectories differently"
                    ) from None
            raise

    def to_records(self) -> Iterator[dict[str, str | int | bool]]:
        """One mapping per row; `is_padding` only if it is true."""
        columns = [getattr(self, name).tolist() for name in FIELDS]
        for *values, is_padding in zip(*columns, strict=True):
            record = dict(zip(FIELDS[:-1], values, strict=True))
            yield {**record, "is_padding": True} if is_padding else record

    def to_jsonl(self, target: str | PathLike[str] | TextIO) -> None:
        """Write one JSON object per line, in the rows' order."""
        if isinstance(target, str | PathLike):
            with open(target, "w", encoding="utf-8") as file:
                self.to_jsonl(file)
            return
        target.writelines(json.dumps(record) + "\n" for record in self.to_records())

    def take(self, positions: Ints | Bools) -> "Rows":
        """The rows at these positions, in their order."""
        return Rows(**{name: getattr(self, name)[positions] for name in FIELDS})

    def with_padding(self, count: int, tokens: int) -> "Rows":
        """These rows, then `count` padding rows of `tokens` tokens whose prompts differ from all others."""
        if not count:
            return self
        prefix = PADDING_GROUP
        while any(name.startswith(prefix) for name in self.prompt.tolist()):
            prefix = f"<{prefix}>"
        padding = Rows.from_columns(
            prompt=[f"{prefix}{i}" for i in range(count)],
            session=np.zeros(count, dtype=np.int64),
            trajectory=np.zeros(count, dtype=np.int64),
            prompt_tokens=np.full(count, 1),
            response_tokens=np.full(count, tokens - 1),
            loss_tokens=np.zeros(count, dtype=np.int64),
            is_padding=np.ones(count, dtype=bool),
        )
        return Rows(**{name: np.concatenate((getattr(self, name), getattr(padding, name))) for name in FIELDS})

    @cached_property
    def key(self) -> Strings:
        """`prompt/session/trajectory` of each row."""
        names = zip(self.prompt.tolist(), self.session.tolist(), self.trajectory.tolist(), strict=True)
        return np.array([f"{p}/{s}/{t}" for p, s, t in names], dtype=object)

    @property
    def tokens(self) -> Ints:
        """Prompt and response tokens of each row."""
        return self.prompt_tokens + self.response_tokens

    @property
    def num_prompts(self) -> int:
        """Number of prompts that have a row."""
        return int(self.prompt_index.max(initial=-1)) + 1

    @property
    def num_sessions(self) -> int:
        """Number of sessions that have a row."""
        return int(self.session_index.max(initial=-1)) + 1

    def __len__(self) -> int:
        return len(self.prompt)

    def __repr__(self) -> str:
        padding = f", {self.is_padding.sum():,} of them padding" if self.is_padding.any() else ""
        return f"Rows({len(self):,} rows{padding}; {self.num_sessions:,} sessions of {self.num_prompts:,} prompts)"


FIELDS = tuple(each.name for each in fields(Rows) if each.init)
"""The fields of a row, in their order everywhere; all but the first and the last are counts."""
REQUIRED = FIELDS[:-2]
COUNTS = FIELDS[1:-1]
TOKEN_COUNTS = FIELDS[3:-1]


def _check_columns(columns: Mapping[str, Any], place: Callable[[int], str]) -> dict[str, np.ndarray]:
    """The columns as arrays of one length; an error names the field and, with `place`, the row."""
    prompts = columns["prompt"]
    if {*map(type, prompts)} - {str}:
        for i, name in enumerate(prompts):
            if not isinstance(name, str):
                raise RowsError(f"{place(i)}: prompt is {name!r:.40}; it must be a string")
        prompts = [str(name) for name in prompts]  # of subclasses, such as numpy's
    arrays: dict[str, np.ndarray] = {"prompt": np.array(prompts, dtype=object)}
    for name in COUNTS:
        arrays[name] = _check_counts(name, columns[name], len(prompts), place)
    over = np.flatnonzero(arrays["loss_tokens"] > arrays["response_tokens"])
    if len(over):
        loss, response = arrays["loss_tokens"][over[0]], arrays["response_tokens"][over[0]]
        raise RowsError(
            f"{place(over[0])}: loss_tokens is {loss:,} and response_tokens {response:,}; loss_tokens counts "
            "response tokens only, so it cannot be larger"
        )
    padding = np.array(columns["is_padding"], dtype=bool if len(prompts) == 0 else None)
    if padding.shape != (len(prompts),):
        raise RowsError(f"is_padding has shape {padding.shape} and there are {len(prompts)} rows; it needs one each")
    if padding.dtype != bool:
        values = columns["is_padding"]
        i = next((i for i, value in enumerate(values) if not isinstance(value, bool | np.bool_)))
        raise RowsError(f"{place(i)}: is_padding is {values[i]!r:.40}; it must be true or false")
    return {**arrays, "is_padding": padding}


def _check_counts(name: str, values: ArrayLike, num_rows: int, place: Callable[[int], str]) -> Ints:
    integers = isinstance(values, list | tuple) and {*map(type, values)} <= {int}
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=None if integers else object)
    if array.shape != (num_rows,):
        raise RowsError(f"{name} has shape {array.shape} and there are {num_rows} rows; it needs one integer each")
    if array.dtype == object:
        for i, value in enumerate(array.tolist()):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise RowsError(f"{place(i)}: {name} is {value!r:.40}; it must be an integer from 0 to {MAX_COUNT:,}")
    elif array.dtype.kind not in "iu" and num_rows:
        raise RowsError(f"{name} has type {array.dtype}; it must have integers")
    bad = np.flatnonzero((array < 0) | (array > MAX_COUNT))
    if len(bad):
        value = f"{array[bad[0]]:,}"
        raise RowsError(f"{place(bad[0])}: {name} is {value:.40}; it must be an integer from 0 to {MAX_COUNT:,}")
    return array.astype(np.int64)


def _columns_of(chunk: Sequence[tuple[str, Any]]) -> dict[str, Sequence]:
    """The columns of records, each with its place; an error names a field that is missing or misspelt."""
    records = [record for _, record in chunk if isinstance(record, Mapping)]
    columns: dict[str, Sequence] = {}
    with suppress(KeyError):
        columns = {name: [*map(itemgetter(name), records)] for name in REQUIRED}
    if not columns or len(records) < len(chunk):
        for where, record in chunk:
            if not isinstance(record, Mapping):
                raise RowsError(f"{where}: {record!r:.40} is not an object with the fields {', '.join(REQUIRED)}")
            if missing := [name for name in REQUIRED if name not in record]:
                raise RowsError(f"{where}: field {missing[0]} is missing; a row has {', '.join(REQUIRED)}")
    without = [(where, record) for where, record in chunk if "loss_tokens" not in record]
    for name in {*chain.from_iterable(record for _, record in without)} - {*FIELDS}:
        if get_close_matches("loss_tokens", [str(name).lower()], n=1, cutoff=0.85):
            where = next(where for where, record in without if name in record)
            raise RowsError(f"{where}: field {name} is unknown; is it loss_tokens?")
    columns["loss_tokens"] = [record.get("loss_tokens", record["response_tokens"]) for record in records]
    columns["is_padding"] = [record.get("is_padding", False) for record in records]
    return columns


def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, refused if it has a key twice: Python's own reader would silently keep the last value."""
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowsError(f"the key {twice!r:.40} is given {names.count(twice)} times in one object; keep one of them")
    return record


_decode = json.JSONDecoder(object_pairs_hook=without_duplicates).raw_decode


def parse_lines(lines: Iterable[str | bytes], *, noun: str = "row") -> Iterator[tuple[str, object]]:
    """The place and the JSON value of each line, which is a row or another noun; blank lines are ignored."""
    for i, line in enumerate(lines, start=1):
        try:
            text = (line if isinstance(line, str) else line.decode()).strip()
            if i == 1:
                text = text.removeprefix("\ufeff").lstrip()
            if not text:
                continue
            record, end = _decode(text)
            if end < len(text):
                raise json.JSONDecodeError("Extra data", text, end)
        except RowsError as error:
            raise RowsError(f"line {i}: {error}") from None
        except UnicodeDecodeError:
            raise RowsError(f"line {i}: not UTF-8 text; {noun}s are JSON, one object per line") from None
        except json.JSONDecodeError as error:
            fault = f"{error.msg} at column {error.colno}"
            raise RowsError(f"line {i}: not JSON ({fault}); one line is one {noun}, an object") from None
        except RecursionError as error:
            raise RowsError(f"line {i}: not JSON ({error}); one line is one {noun}, an object") from None
        except ValueError:  # of int()
            most = sys.get_int_max_str_digits()
            raise RowsError(f"line {i}: a number has more than {most:,} digits; give a smaller one") from None
        yield f"line {i}", record
