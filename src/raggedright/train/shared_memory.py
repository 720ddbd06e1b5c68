"""What the CPU ranks of one machine tell each other, through memory that they share.

A process group's exchange wakes several threads on either side, which takes a millisecond or more where a rank has one
core; a rank that looks into memory has its neighbours' numbers as soon as they are there. Every rank has two rooms,
used in turn, and a count of the exchanges that it has come to. It fills a room, counts, waits until all have counted,
and reads all rooms. Invariants: nobody writes a room that another may still read, since whoever comes to the next
exchange has done with the one before; numbers are added in the order of ranks, so that all have the same bits.

The surprise: it takes a processor whose stores other cores see in their order (x86), and Linux, whose memory without a
name goes with the last process that has it. Anywhere else, and for what no room holds, ranks use their process group.
"""

import os
import platform
import secrets
import sys
from datetime import timedelta
from mmap import mmap
from select import select
from time import monotonic, sleep

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raggedright.errors import RaggedRightError

ROOM = 2**22  # bytes
_LINE = 128  # bytes of a count, so that no two are in one line of a cache
_TOKEN_BYTES = 16
_HEAD = 8  # bytes that say how many follow
_SPIN = 20e-3  # seconds of looking again at once: as uneven as ranks are in most exchanges
_PAUSE = 1e-4  # seconds between two looks after that
GRACE = 10.0  # seconds for a launcher to end this rank, once another has ended


class SharedMemory:
    """This rank's view of the memory; `join` makes one. `others` has a file a rank, readable once that has ended."""

    def __init__(self, memory: mmap, dp_rank: int, others: dict[int, int], timeout: float) -> None:
        self._memory, self._dp_rank, self._others, self._timeout = memory, dp_rank, others, timeout
        self._dp_size = len(others) + 1
        self._counts = np.frombuffer(memory, dtype=np.int64, count=self._dp_size * _LINE // 8)[:: _LINE // 8]
        self._count = 0

    @classmethod
    def join(cls, timeout: timedelta) -> "SharedMemory | None":
        """The memory of all ranks of the process group; None on each of them unless all are on one such machine."""
        dp_rank, dp_size = dist.get_rank(), dist.get_world_size()
        size = dp_size * (_LINE + 2 * ROOM)
        file, token = -1, secrets.token_bytes(_TOKEN_BYTES)
        if dp_rank == 0 and sys.platform == "linux" and platform.machine() == "x86_64":
            file = os.memfd_create("raggedright")
            os.truncate(file, size)
            os.pwrite(file, token, size - _TOKEN_BYTES)
        told = [(f"/proc/{os.getpid()}/fd/{file}", token)]
        dist.broadcast_object_list(told, src=0)
        memory = _open(*told[0], size)
        pids: list[int] = [0] * dp_size
        dist.all_gather_object(pids, os.getpid() if memory is not None else 0)
        if file >= 0:
            os.close(file)
        if memory is None or 0 in pids:
            return None
        others = {rank: os.pidfd_open(pid) for rank, pid in enumerate(pids) if rank != dp_rank}
        return cls(memory, dp_rank, others, timeout.total_seconds())

    def sum(self, values: Tensor) -> None:
        """The sum of all ranks' values, in place; they fit a room."""
        rooms = [
            torch.frombuffer(self._memory, dtype=values.dtype, count=values.numel(), offset=self._room(rank))
            for rank in range(self._dp_size)
        ]
        flat = values.view(-1)
        rooms[self._dp_rank].copy_(flat)
        self._meet()
        flat.copy_(rooms[0])
        for room in rooms[1:]:
            flat += room

    def gather(self, value: bytes) -> list[bytes] | None:
        """What each rank gives, by rank; None on each of them where one gives more than a room holds."""
        starts = [self._room(rank) for rank in range(self._dp_size)]
        own, data = starts[self._dp_rank], len(value).to_bytes(_HEAD, "little") + value[: ROOM - _HEAD]
        self._memory[own : own + len(data)] = data
        self._meet()
        sizes = [int.from_bytes(self._memory[start : start + _HEAD], "little") for start in starts]
        if max(sizes) > ROOM - _HEAD:
            return None
        return [self._memory[start + _HEAD : start + _HEAD + size] for start, size in zip(starts, sizes, strict=True)]

    def _room(self, rank: int) -> int:
        """Where a rank's room of the next exchange begins."""
        return self._dp_size * _LINE + (2 * rank + self._count % 2) * ROOM

    def _meet(self) -> None:
        """Say that this rank's room is filled, and wait until all are."""
        self._count += 1
        self._counts[self._dp_rank] = self._count
        for rank in self._others:
            self._wait_for(rank)

    def _wait_for(self, rank: int) -> None:
        began = monotonic()
        while self._counts[rank] < self._count:
            waited = monotonic() - began
            if waited < _SPIN:
                os.sched_yield()
            elif select([self._others[rank]], (), (), _PAUSE)[0] and self._counts[rank] < self._count:
                sleep(GRACE)
                raise RaggedRightError(f"rank {rank} has ended and the others wait for it; see its output")
            elif waited > self._timeout:
                raise RaggedRightError(f"rank {rank} has not come within {self._timeout:g} s; see its output")


def _open(path: str, token: bytes, size: int) -> mmap | None:
    """The memory behind a path, if it is that of the rank which told both."""
    try:
        with open(path, "r+b") as file:
            memory = mmap(file.fileno(), size)
    except (OSError, ValueError):  # on another machine there is no such process, or one with another file
        return None
    return memory if memory[-_TOKEN_BYTES:] == token else None
