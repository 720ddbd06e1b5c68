"""Rounds in a row in which something was amiss, and when to warn of them.

A warning comes once there are `patience` such rounds, whenever their number has doubled since, and when they end. So a
long run repeats itself rarely, and the last warning of a streak says how long it was.
"""

from collections import deque
from collections.abc import Callable, Sequence

from raggedright.report.events import RoundEvent, WarningEvent

Words = Callable[[int, Sequence[RoundEvent]], str]  # from the first round of a streak and its last rounds


class Streak:
    """Counts rounds of one kind; what it returns is to be written down and shown."""

    def __init__(self, kind: str, patience: int, is_amiss: Callable[[RoundEvent], bool], words: Words) -> None:
        self._kind, self._patience, self._is_amiss, self._words = kind, patience, is_amiss, words
        self._last: deque[RoundEvent] = deque(maxlen=patience)
        self.length = self._said = 0

    def add(self, round: RoundEvent) -> WarningEvent | None:
        """Count a round; a warning where it is time for one."""
        if not self._is_amiss(round):
            ended = self.end()
            self._last.clear()
            self.length = self._said = 0
            return ended
        self._last.append(round)
        self.length += 1
        return self._warning() if self.length == max(self._patience, 2 * self._said) else None

    def end(self, *, num_rounds: int | None = None) -> WarningEvent | None:
        """A warning where the streak has become longer since the last one, or is all there is of the run's rounds."""
        is_due = self.length >= self._patience or (self.length > 0 and self.length == num_rounds)
        return self._warning() if is_due and self.length > self._said else None

    def _warning(self) -> WarningEvent:
        self._said = self.length
        round = self._last[-1].round
        first_round = round - self.length + 1
        text = self._words(first_round, [*self._last])
        return WarningEvent(round=round, first_round=first_round, kind=self._kind, text=text)
