"""The process group of ranks on Ray: as Ray Train forms it, except that rank 0's store listens on its node's address.

Ray Train's own store listens on all interfaces of rank 0's node. Whoever reaches its port can read and write keys; it
has no authentication, so that a cluster's network must be private in any case (docs/clusters.md).
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_stores: list[TCPStore] = []  # rank 0's, which lives as long as its process


@dataclass
class GroupConfig(TorchConfig):
    """How the process group is formed."""

    @property
    def backend_cls(self) -> type["_Backend"]:
        """Who forms it."""
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Form the group of all workers; Ray Train's controller calls this at every start."""
        size, timeout = len(worker_group), timedelta(seconds=backend_config.timeout_s)
        worker_group.execute(_set_torch_distributed_env_vars)
        host, port = worker_group.execute_single(0, open_store, timeout)
        joining = [
            worker_group.execute_single_async(rank, _join, backend_config.backend, host, port, rank, size, timeout)
            for rank in range(size)
        ]
        ray.get(joining)


def open_store(timeout: timedelta) -> tuple[str, int]:
    """Start the store through which ranks find each other, on this node's address: its host and port."""
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
