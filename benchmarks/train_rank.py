"""One rank of our trainer under the gate, unchanged, with timers around its rounds and its appends to the store.

    python benchmarks/train_rank.py RUN_FOLDER WARM_ROUNDS

`put` is the time to append sessions to the store while others run; `record` is the time to write its records.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from raggedright.agents.runner import SessionRecorder
from raggedright.train.rank import run_rank
from raggedright.train.record import RunRecorder
from raggedright.train.train_round import RoundResult
from train_gate import Gate


def main() -> None:
    warm = int(sys.argv[2])
    is_first = os.environ.get("RANK", "0") == "0"
    gate = Gate(warm) if is_first else None
    put_seconds = 0.0
    record = RunRecorder.round
    left = warm

    def timed(put: Callable[..., None]) -> Callable[..., None]:
        def timed_put(*args: object, **options: object) -> None:
            nonlocal put_seconds
            began = perf_counter()
            put(*args, **options)
            put_seconds += perf_counter() - began

        return timed_put

    def timed_record(self: RunRecorder, round: int, result: RoundResult) -> None:
        nonlocal put_seconds, left
        began = perf_counter()
        record(self, round, result)
        parts = dict(result.seconds)
        parts["rollout"] -= put_seconds
        rows = result.table.rows
        parts |= {"put": put_seconds, "record": perf_counter() - began}
        counts = {"rows": float(len(rows)), "tokens": float(rows.tokens.sum())}
        put_seconds = 0.0
        left -= 1
        following = gate.passed(**parts, **counts) if gate is not None else 0
        if left == 0:
            left = _from_first(following)

    SessionRecorder.add, SessionRecorder.flush = timed(SessionRecorder.add), timed(SessionRecorder.flush)
    RunRecorder.round = timed_record
    run_rank(Path(sys.argv[1]))


def _from_first(rounds: int) -> int:
    """Let the other ranks wait at the gate as well."""
    if not dist.is_initialized():
        return rounds
    num_rounds = torch.tensor([rounds])
    dist.broadcast(num_rounds, src=0)
    return int(num_rounds)


if __name__ == "__main__":
    main()
