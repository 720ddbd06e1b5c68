"""Seconds of a round by part."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Clock:
    """Adds up where the time goes."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what runs inside as time of this part."""
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + perf_counter() - began

    @property
    def total(self) -> float:
        """Seconds since it was made."""
        return perf_counter() - self._began
