"""One rank of a run on Ray, and what Ray Train runs for it: the process group, and the record of failures.

The process group is formed as Ray Train does it, except that the store of rank 0, through which ranks find each other,
listens on its node's address instead of all interfaces. Anyone who reaches its port can read and write keys; it has no
authentication, so the network of a cluster must be private in any case (docs/clusters.md).
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch.distributed as dist
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.train import UserCallback
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from raggedright.errors import ConfigError, RaggedRightError
from raggedright.files import open_to_append
from raggedright.train.rank import CONFIG_FILE, run_rank
from raggedright.train.world import TrainError

_stores: list[TCPStore] = []  # rank 0's, which lives as long as its process


def run_on_ray(settings: dict[str, str]) -> None:
    """Train as this worker's rank, in the driver's working folder and with its modules if this machine has them."""
    context, folder = ray.train.get_context(), Path(settings["folder"])
    if os.path.isdir(settings["working_folder"]):
        os.chdir(settings["working_folder"])
    sys.path += [path for path in settings["path"].split(os.pathsep) if path not in sys.path and os.path.isdir(path)]
    if not (folder / CONFIG_FILE).is_file():
        raise TrainError(
            f"there is no {folder / CONFIG_FILE} on the machine {ray.util.get_node_ip_address()}; out must be a folder "
            "on storage that all machines share"
        )
    check_shared(settings["store"], on_this_machine=context.get_local_world_size(), in_all=context.get_world_size())
    device = ray.train.torch.get_device()
    run_rank(folder, device if device.type == "cuda" else None)


def check_shared(store: str, *, on_this_machine: int, in_all: int) -> None:
    """Refuse SQLite unless all ranks are on one machine: its write-ahead log does not work over a network."""
    if store == "sqlite" and on_this_machine < in_all:
        raise ConfigError(
            f"store.backend is sqlite and only {on_this_machine} of {in_all} ranks are on this machine; set "
            "store.backend to transfer_queue, or parallel.placement to pack"
        )


@dataclass
class GroupConfig(TorchConfig):
    """Has Ray Train form the process group with our backend."""

    @property
    def backend_cls(self) -> type["_Backend"]:
        """The class that forms it."""
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Form the group of all workers; Ray Train's controller calls this at every start."""
        size, timeout = len(worker_group), timedelta(seconds=backend_config.timeout_s)
        worker_group.execute(_set_torch_distributed_env_vars)
        host, port = worker_group.execute_single(0, _open_tcp_store, timeout)
        joining = [
            worker_group.execute_single_async(rank, _join, backend_config.backend, host, port, rank, size, timeout)
            for rank in range(size)
        ]
        ray.get(joining)


def _open_tcp_store(timeout: timedelta) -> tuple[str, int]:
    """Start the store through which ranks find each other, on this node's address; its host and port."""
    host = ray.util.get_node_ip_address()
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    _stores.append(
        TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    )
    return host, port


def _join(backend: str, host: str, port: int, rank: int, size: int, timeout: timedelta) -> None:
    store = _stores[-1] if rank == 0 else TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


class FailureLog(UserCallback):
    """Writes each failure of ranks to a file, in Ray Train's controller; the driver shows it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_exception(self, run_context: object, worker_exceptions: dict[int, Exception]) -> None:
        """Some ranks failed; Ray Train starts all of them again, or gives up."""
        with open_to_append(self.path) as file:
            file.write(f"{rank_failure_text(worker_exceptions)}\n".encode())


def rank_failure_text(failures: Mapping[int, BaseException]) -> str:
    """Which rank failed first, as far as that is known, and why.

    When a rank dies, the others fail too, since they wait for it; their errors are left out if there is a better cause.
    """
    rank, error = min(failures.items(), key=lambda item: (_distance_from_cause(item[1]), item[0]))
    if isinstance(error, RaggedRightError):
        return f"rank {rank}: {error}"
    if isinstance(error, WorkerHealthCheckFailedError):
        return f"rank {rank} died: {_death_text(error.health_check_failure)}"
    return f"rank {rank}: {error_line(error)}; its output is in Ray's logs on its machine"


def _distance_from_cause(error: BaseException) -> int:
    """Our own errors are nearest to the cause, then deaths, then everything else."""
    if isinstance(error, RaggedRightError):
        return 0
    return 1 if isinstance(error, WorkerHealthCheckFailedError | RayActorError) else 2


def _death_text(error: BaseException) -> str:
    """What Ray knows about the death of a process, without its advice."""
    if isinstance(error, ActorUnavailableError):
        return "its process or its node cannot be reached any more"
    text = " ".join(str(error).split())
    node, cause = re.search(r"\bip: (\S+)", text), re.search(r"because (its [^.]*)", text)
    if not cause:
        return error_line(error)
    return cause[1] + (f", on {node[1]}" if node else "")


def error_line(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
