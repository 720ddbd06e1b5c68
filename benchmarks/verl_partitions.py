"""Time verl's `get_seqlen_balanced_partitions` on a list of lengths, as verl's trainer calls it (`_balance_batch`).

Runs inside `.venv-verl`; `bench_plan.py` starts it once per case. Lengths are a JSON list on standard input, the
answer is one JSON line: seconds of each finished call (none if the first did not finish in time) and the slowest
rank over the mean by verl's workload. As in the trainer, the workload is an int64 tensor and the batch is first
filled up with two-token rows to a multiple of the data-parallel size (the minimum that the trainer requires).

    echo '[900, 20, 340, 1200]' | .venv-verl/bin/python benchmarks/verl_partitions.py --dp 2 --repeat 3 --limit 60
"""

import argparse
import json
import signal
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from verl.utils.seqlen_balancing import (  # pyright: ignore[reportMissingImports]
    calculate_workload,
    get_seqlen_balanced_partitions,
)


def stop(_signal: int, _frame: object) -> None:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, required=True, help="data-parallel size: the number of partitions")
    parser.add_argument("--repeat", type=int, default=3, help="calls to time")
    parser.add_argument("--limit", type=float, default=120, help="seconds for all calls together")
    args = parser.parse_args()

    lengths: list[int] = json.load(sys.stdin)
    lengths += [2] * (-len(lengths) % args.dp)
    workload = calculate_workload(torch.tensor(lengths, dtype=torch.int64))
    seconds, partitions = [], []
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, args.limit)
    try:
        for _ in range(args.repeat):
            start = time.perf_counter()
            partitions = get_seqlen_balanced_partitions(workload, k_partitions=args.dp, equal_size=True)
            seconds.append(time.perf_counter() - start)
    except TimeoutError:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    ranks = [int(workload[partition].sum()) for partition in partitions]
    print(json.dumps({"seconds": seconds, "rank": max(ranks) * len(ranks) / sum(ranks) if ranks else None}))


if __name__ == "__main__":
    main()
