"""How the benchmark's programs take turns: each runs as many rounds as it is told, says how they went, and waits.

So all of them are started once, and are measured a few rounds at a time, one after another, on a machine that is as
busy for one as for the others. A line in is a number of rounds; a line out is what each of them took.
"""

import json
import sys
from time import perf_counter

Round = dict[str, float]


class Gate:
    """The program's side; `passed` is called at the end of every round, after `warm` of them for the first time."""

    def __init__(self, warm: int) -> None:
        self._left = warm
        self._found: list[Round] = []
        self._out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
        self._began = perf_counter()

    def passed(self, **parts: float) -> int:
        """A round has ended, with these seconds by part; how many follow once this was called `left` times more."""
        self._found.append({**parts, "round": perf_counter() - self._began})
        self._left -= 1
        if self._left == 0:
            self._left = self._answer()
        self._began = perf_counter()
        return self._left

    def _answer(self) -> int:
        print(json.dumps(self._found), file=self._out, flush=True)
        self._found = []
        line = sys.stdin.readline()
        if not line.strip():
            sys.exit(0)
        return int(line)
