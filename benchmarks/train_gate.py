"""How the programs of the benchmark take turns: each runs the requested number of rounds, reports them, and waits.

So all of them are started once and measured a few rounds at a time, one after another, and other load on the machine
affects all of them. An input line is a number of rounds; an output line has the seconds of each of them, and the most
memory that the process had since the line (Linux).
"""

import json
import re
import sys
from pathlib import Path
from time import perf_counter

Round = dict[str, float]


class Gate:
    """The program's side; it calls `passed` at the end of every round and first reports after `warm` rounds."""

    def __init__(self, warm: int) -> None:
        self._left = warm
        self._rounds: list[Round] = []
        self._out, sys.stdout = sys.stdout, sys.stderr  # so that output of libraries is not read as a report
        self._began = perf_counter()

    def passed(self, **parts: float) -> int:
        """Record a round and its seconds by part; after the last one, report and wait. Returns the rounds left."""
        self._rounds.append({**parts, "round": perf_counter() - self._began, "peak_mib": peak_mib()})
        self._left -= 1
        if self._left == 0:
            self._left = self._answer()
        self._began = perf_counter()
        return self._left

    def _answer(self) -> int:
        print(json.dumps(self._rounds), file=self._out, flush=True)
        self._rounds = []
        line = sys.stdin.readline()
        if not line.strip():
            sys.exit(0)
        reset_peak()
        return int(line)


def reset_peak() -> None:
    """Let the peak begin again from what is in use."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """The most resident memory of this process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0
