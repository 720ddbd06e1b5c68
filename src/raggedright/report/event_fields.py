"""The fields of one event, taken out by type: a wrong one is an error that names the line and the key.

A key that is missing or null is no error: a reader of today takes a file of tomorrow or of yesterday. Numbers that JSON
has no word for are written as the strings NaN, Infinity and -Infinity, and come back as what they were.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from raggedright.errors import RaggedRightError

MOST_NAMES = 1000  # metrics, causes or parts of a round; more are left out
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class EventsError(RaggedRightError):
    """An events file, or a line of it, is wrong."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of an event, and its place for the error."""

    where: str
    values: Mapping[str, object]

    @classmethod
    def of(cls, where: str, value: object) -> "Fields":
        """The fields of a value that must be an object."""
        if not isinstance(value, Mapping):
            raise EventsError(f"{where} is {value!r:.40}; it takes an object")
        return cls(where, value)

    def wrong(self, name: str, value: object, takes: str) -> EventsError:
        """The error of a value of the wrong type."""
        return EventsError(f"{self.where}: {name} is {value!r:.40}; it takes {takes}")

    def text(self, name: str) -> str:
        """A string; empty where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value or ""

    def number(self, name: str) -> float | None:
        """A number of any size."""
        value = self.values.get(name)
        return None if value is None else self._float(name, value)

    def count(self, name: str) -> int | None:
        """A whole number from 0."""
        value = self.values.get(name)
        return None if value is None else self._count(name, value)

    def needed_count(self, name: str) -> int:
        """A whole number that the event means nothing without."""
        return self._count(name, self.values.get(name))

    def table(self, name: str) -> "Fields":
        """An object within; empty where there is none."""
        value = self.values.get(name)
        return Fields.of(f"{self.where}: {name}", {} if value is None else value)

    def tables(self, name: str, most: int) -> "list[Fields]":
        """A list of objects, the first `most` of them."""
        items = enumerate(self.items(name)[:most])
        return [Fields.of(f"{self.where}: {name}[{i}]", item) for i, item in items]

    def items(self, name: str) -> Sequence[object]:
        """A list of anything; empty where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value or []

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        items = self.items(name)
        for item in items:
            if not isinstance(item, str):
                raise self.wrong(name, item, "strings")
        return tuple(str(item) for item in items)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; null is NaN."""
        return tuple(math.nan if item is None else self._float(name, item) for item in self.items(name))

    def named_numbers(self, name: str) -> dict[str, float]:
        """An object of numbers; what is null is left out."""
        table = self.table(name)
        pairs = islice(table.values.items(), MOST_NAMES)
        return {sys.intern(key): table._float(key, value) for key, value in pairs if value is not None}

    def named_counts(self, name: str) -> dict[str, int]:
        """An object of whole numbers."""
        table = self.table(name)
        pairs = islice(table.values.items(), MOST_NAMES)
        return {sys.intern(key): table._count(key, value) for key, value in pairs if value is not None}

    def _float(self, name: str, value: object) -> float:
        if isinstance(value, str) and value in NOT_FINITE:
            return NOT_FINITE[value]
        if not isinstance(value, int | float):
            raise self.wrong(f"{name:.60}", value, "a number")
        try:
            return float(value)
        except OverflowError:  # a whole number that no float holds
            return math.inf if value > 0 else -math.inf

    def _count(self, name: str, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
            raise self.wrong(f"{name:.60}", value, "a whole number from 0")
        return value
