"""The ranks of a run as one of them sees them: its number, and the collective operations.

With one rank there is no process group and nothing is sent. Every rank calls these in the same order.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from raggedright.config.schema import Config
from raggedright.errors import ConfigError, RaggedRightError
from raggedright.train.peer_check import foreign_peer

T = TypeVar("T")
RENDEZVOUS_VARIABLE = "RAGGEDRIGHT_RENDEZVOUS"  # the file through which local ranks find each other
EXTRA_WAIT_SECONDS = 1800.0  # ranks wait for each other this much longer than the longest rollout


class TrainError(RaggedRightError):
    """Training cannot continue."""


@dataclass(frozen=True, slots=True)
class World:
    """This rank among the data-parallel ranks."""

    dp_rank: int
    dp_size: int
    device: torch.device

    @classmethod
    def of_group(cls, device: torch.device) -> "World":
        """This rank of the default process group."""
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.dp_rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of a list that all ranks have.

        Contiguous slices, so the sessions of a prompt stay on one rank and share prefix computation.
        """
        first, last = (len(items) * rank // self.dp_size for rank in (self.dp_rank, self.dp_rank + 1))
        return items[first:last]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values)
        return values

    def from_first(self, value: T | None) -> T:
        """The value of the first rank; the others pass None."""
        box = [value]
        if self.dp_size > 1:
            dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.dp_size == 1:
            return [value]
        values: list[T | None] = [None] * self.dp_size
        dist.all_gather_object(values, value)
        return [value for value in values if value is not None]

    def any(self, value: bool) -> bool:
        """Whether the value is true on any rank."""
        return bool(self.sum(torch.tensor([float(value)], device=self.device)).item())

    def check_same(self, value: str, what: str) -> None:
        """An error on every rank unless all have the same value."""
        values = self.gather(value)
        if len({*values}) > 1:
            by_rank = ", ".join(f"rank {rank}: {text[:12]}" for rank, text in enumerate(values))
            raise TrainError(f"ranks disagree on {what} ({by_rank}); please report this with the run folder")

    def leave(self) -> None:
        """Leave the process group."""
        if self.dp_size > 1:
            dist.destroy_process_group()


def join_world(config: Config, cuda: torch.device | None = None) -> World:
    """This process as a rank, in the existing process group or the one that its launcher's environment describes.

    `cuda` is the device that a launcher chose; otherwise the local rank decides.
    """
    parallel = config.parallel
    has_cuda = torch.cuda.is_available()
    if parallel.device == "cuda" and not has_cuda:
        raise ConfigError("parallel.device is cuda and torch sees no CUDA device; set it to cpu or auto")
    device = torch.device("cpu")
    if has_cuda and parallel.device != "cpu":
        device = cuda or torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(num_threads(config))
    if parallel.dp == 1:
        return World(0, 1, device)
    if not dist.is_initialized():
        _form_group(config, "nccl" if device.type == "cuda" else "gloo")
    return World.of_group(device)


def _form_group(config: Config, backend: str) -> None:
    """Form the process group through a file that the local launcher named, or as torchrun's environment says."""
    timeout = group_timeout(config)
    if file := os.environ.get(RENDEZVOUS_VARIABLE):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store, _, _ = next(rendezvous(f"file://{file}", rank, size))
    else:
        shared, rank, size = next(rendezvous("env://", timeout=timeout))
        attempt = os.environ.get(
            "TORCHELASTIC_RESTART_COUNT", "0"
        )  # its store still has the addresses of the attempt before
        store = PrefixStore(f"attempt {attempt}", shared)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if file and (text := foreign_peer()):  # before any object is exchanged: receiving one unpickles it
        raise TrainError(text)


def group_timeout(config: Config) -> timedelta:
    """How long ranks wait for each other: until the sessions of every rank have certainly ended, and then some."""
    rollout = config.rollout
    sessions_per_rank = -(-config.train.batch_size * rollout.n // config.parallel.dp)
    longest_rollout = rollout.timeout * rollout.attempts * -(-sessions_per_rank // rollout.concurrency)
    return timedelta(seconds=longest_rollout + EXTRA_WAIT_SECONDS)


def loopback() -> str:
    """The name of the loopback interface, which only this machine can reach."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def num_threads(config: Config) -> int:
    """CPU threads of a rank: from the config, the environment, or the cores divided by the ranks."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    default = int(variable) if variable.isdigit() else (os.cpu_count() or 1) // config.parallel.dp
    return config.parallel.threads or max(1, default)
