"""Rows: the numbers of a batch of trajectories, and nothing else. The planner sees only this.

A struct of arrays in the caller's order. A row is named by (prompt, session, trajectory); its key is
`prompt/session/trajectory`. Invariants, checked when Rows are made: no key twice, no negative count,
loss_tokens <= response_tokens. Arrays are read-only.

The surprise: `order` ranks the rows by name, so that whatever is decided with it does not depend on
the order in which rows arrived.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from os import PathLike
from typing import TextIO

import numpy as np
from numpy.typing import ArrayLike

from raggedright.arrays import Bools, Ints, Strings, changes
from raggedright.errors import RowsError
from raggedright.records import COUNTS, FIELDS, LARGEST, check_records, parse_lines, too_many_loss_tokens

PADDING_GROUP = "<padding>"
"""How the prompts of padding rows begin; where a field has numbers for prompts, those of padding rows are negative."""

CHUNK_ROWS = 500  # rows of a file that are checked together; more of them no longer fit the processor's cache


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

    order: Ints = field(init=False)  # place of each row among all rows sorted by name
    prompt_index: Ints = field(init=False)  # prompts numbered in the order of their names
    session_index: Ints = field(init=False)  # sessions numbered in the order of (prompt, session)

    def __post_init__(self) -> None:
        prompts = self.prompt.tolist()
        number = {name: i for i, name in enumerate(sorted({*prompts}))}
        prompt_index = np.fromiter(map(number.__getitem__, prompts), dtype=np.int64, count=len(prompts))
        by_name = np.lexsort((self.trajectory, self.session, prompt_index))
        new_session = changes(prompt_index[by_name]) | changes(self.session[by_name])
        twice = ~(new_session | changes(self.trajectory[by_name]))
        if twice.any():
            i = int(by_name[np.flatnonzero(twice)[0]])
            raise RowsError(f"row {self.key[i]} is given twice; a trajectory of a session has a number of its own")
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
        if {*map(type, prompt)} - {str}:
            for i, name in enumerate(prompt):
                if not isinstance(name, str):
                    raise RowsError(f"row {i}: prompt is {name!r}; it takes a string")
            prompt = [str(name) for name in prompt]
        prompts = np.array(prompt, dtype=object)
        num_rows = len(prompts)
        given = (session, trajectory, prompt_tokens, response_tokens)
        columns = {name: _counts(name, values, num_rows) for name, values in zip(COUNTS[:-1], given, strict=True)}
        loss = response_tokens if loss_tokens is None else loss_tokens
        columns["loss_tokens"] = _counts("loss_tokens", loss, num_rows)
        over = np.flatnonzero(columns["loss_tokens"] > columns["response_tokens"])
        if len(over):
            i = int(over[0])
            cause = too_many_loss_tokens(int(columns["loss_tokens"][i]), int(columns["response_tokens"][i]))
            raise RowsError(f"row {i}: {cause}")
        padding = np.zeros(num_rows, dtype=bool) if is_padding is None or num_rows == 0 else np.array(is_padding)
        if padding.shape != (num_rows,) or padding.dtype != np.bool_:
            raise RowsError(
                f"is_padding has shape {padding.shape} and type {padding.dtype}; it takes {num_rows} booleans"
            )
        return cls(prompt=prompts, is_padding=padding, **columns)

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, object]]) -> "Rows":
        """Rows from one mapping per row, with the fields of a JSONL line."""
        return cls._from_named((f"record {i}", record) for i, record in enumerate(records))

    @classmethod
    def from_jsonl(cls, source: str | PathLike[str] | Iterable[str | bytes]) -> "Rows":
        """Rows from a path, or from the lines of an open file, one JSON object a line; blank lines are passed over."""
        if not isinstance(source, str | PathLike):
            return cls._from_named(parse_lines(source))
        with open(source, "rb") as file:
            return cls._from_named(parse_lines(file))

    @classmethod
    def _from_named(cls, named: Iterable[tuple[str, object]]) -> "Rows":
        columns: list[list[str | int | bool]] = [[] for _ in FIELDS]
        places: list[str] = []
        named = iter(named)
        while chunk := list(islice(named, CHUNK_ROWS)):
            places += [where for where, _ in chunk]
            for column, more in zip(columns, check_records(chunk), strict=True):
                column.extend(more)
        dtypes = {"prompt": object, "is_padding": bool}
        arrays = {n: np.array(c, dtype=dtypes.get(n, np.int64)) for n, c in zip(FIELDS, columns, strict=True)}
        try:
            return cls(**arrays)
        except RowsError as error:
            raise _with_places(error, columns, places) from None

    def to_records(self) -> Iterator[dict[str, str | int | bool]]:
        """One mapping per row; `is_padding` only where it is true."""
        columns = [getattr(self, name).tolist() for name in FIELDS]
        for *values, is_padding in zip(*columns, strict=True):
            record = dict(zip(FIELDS[:-1], values, strict=True))
            yield {**record, "is_padding": True} if is_padding else record

    def to_jsonl(self, target: str | PathLike[str] | TextIO) -> None:
        """Write one JSON object a line, in the rows' order."""
        if isinstance(target, str | PathLike):
            with open(target, "w", encoding="utf-8") as file:
                self.to_jsonl(file)
            return
        target.writelines(json.dumps(record) + "\n" for record in self.to_records())

    def take(self, positions: Ints | Bools) -> "Rows":
        """The rows at these positions, in their order."""
        return Rows(**{name: getattr(self, name)[positions] for name in FIELDS})

    def with_padding(self, count: int, tokens: int) -> "Rows":
        """These rows, then `count` padding rows of `tokens` tokens whose prompts are unlike any real one."""
        if not count:
            return self
        prefix = PADDING_GROUP
        while any(name.startswith(prefix) for name in self.prompt.tolist()):
            prefix = f"<{prefix}>"
        zeros = np.zeros(count, dtype=np.int64)
        ends: dict[str, np.ndarray] = {
            "prompt": np.array([f"{prefix}{i}" for i in range(count)], dtype=object),
            "session": zeros,
            "trajectory": zeros,
            "prompt_tokens": zeros + 1,
            "response_tokens": zeros + (tokens - 1),
            "loss_tokens": zeros,
            "is_padding": np.ones(count, dtype=bool),
        }
        return Rows(**{name: np.concatenate((getattr(self, name), end)) for name, end in ends.items()})

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
        """How many prompts have a row."""
        return int(self.prompt_index.max(initial=-1)) + 1

    @property
    def num_sessions(self) -> int:
        """How many sessions have a row."""
        return int(self.session_index.max(initial=-1)) + 1

    def __len__(self) -> int:
        return len(self.prompt)

    def __repr__(self) -> str:
        padding = f", {self.is_padding.sum():,} of them padding" if self.is_padding.any() else ""
        return f"Rows({len(self):,} rows{padding}; {self.num_sessions:,} sessions of {self.num_prompts:,} prompts)"


def _with_places(error: RowsError, columns: Sequence[Sequence[object]], places: Sequence[str]) -> RowsError:
    """The error of rows of which two have one key, with the places of both."""
    first: dict[tuple[object, ...], str] = {}
    for key, where in zip(zip(*columns[:3], strict=True), places, strict=True):
        if first.setdefault(key, where) != where:
            name = "/".join(map(str, key))
            return RowsError(f"{where}: row {name} stands at {first[key]} already; give each trajectory its own number")
    return error


def _counts(name: str, values: ArrayLike, num_rows: int) -> Ints:
    plain = isinstance(values, list | tuple) and {*map(type, values)} <= {int}
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=None if plain else object)
    if array.shape != (num_rows,):
        raise RowsError(f"{name} has shape {array.shape} and prompt has {num_rows} rows; give one number a row")
    if array.dtype == object:
        for i, value in enumerate(array.tolist()):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise RowsError(f"row {i}: {name} is {value!r}; it takes a whole number from 0 to {LARGEST:,}")
    elif array.dtype.kind not in "iu" and num_rows:
        raise RowsError(f"{name} has type {array.dtype}; it takes whole numbers")
    bad = np.flatnonzero((array < 0) | (array > LARGEST))
    if len(bad):
        raise RowsError(f"row {bad[0]}: {name} is {array[bad[0]]:,}; it takes a whole number from 0 to {LARGEST:,}")
    return array.astype(np.int64)
