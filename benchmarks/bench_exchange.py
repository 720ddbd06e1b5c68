"""What an exchange between two CPU ranks costs: gloo beside the memory that they share, side by side in one run.

    make bench-exchange

Each rank has one thread and computes for about ten milliseconds before every exchange, as ranks do between theirs; gloo
and shared memory take turns. A wait for the rank that computes longer counts in both.
"""

import os
import platform
import socket
import sys
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.queues import Queue
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from raggedright.train.world import World, loopback

SIZES = {"8 numbers": 8, "400 KB": 100_000}
EXCHANGES = 200
WORK_SECONDS = 0.01


def run_rank(dp_rank: int, port: int, found: "Queue[dict]") -> None:
    """One of both; the first tells the milliseconds of each exchange, by size and way."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": loopback()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=dp_rank, world_size=2)
    with_memory = World.of_group(torch.device("cpu"), timedelta(minutes=1))
    assert with_memory.shared is not None
    ways = {"gloo": World(dp_rank, 2, torch.device("cpu")), "shared memory": with_memory}
    work = torch.randn(256, 256)
    began = perf_counter()
    for _ in range(20):
        work.mm(work)
    products = max(1, round(WORK_SECONDS * 20 / (perf_counter() - began)))
    told = torch.tensor([products])
    dist.broadcast(told, src=0)  # the same work on both
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(EXCHANGES):
        for size, count in SIZES.items():
            for way, world in ways.items():
                for _ in range(int(told)):
                    work.mm(work)
                values = torch.ones(count)
                began = perf_counter()
                world.sum(values)
                seconds.setdefault((size, way), []).append(perf_counter() - began)
    if dp_rank == 0:
        found.put(seconds)
    dist.destroy_process_group()


def main() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SystemExit("ranks share no memory here: it takes Linux on x86")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, port, found), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    seconds = found.get(timeout=300)
    for rank in ranks:
        rank.join()
    table = Table("sum of", "way", "median, ms", "one in ten above, ms", "gloo takes", box=None)
    for (size, way), each in seconds.items():
        median, high = np.quantile(np.array(each) * 1e3, (0.5, 0.9))
        ratio = np.median(seconds[size, "gloo"]) * 1e3 / median
        table.add_row(size, way, f"{median:.3f}", f"{high:.3f}", f"{ratio:.1f} x")
    Console().print(table)


if __name__ == "__main__":
    main()
