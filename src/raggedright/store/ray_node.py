"""Ray itself: the one that this process is in, one at an address, or one started here.

Ray that is started here listens on 127.0.0.1 alone, and ends with this process. One at an address is joined as it is:
where it listens is for whoever started it.
"""

import os
import re
import socket
import sys
from typing import Any

from raggedright.errors import install_hint
from raggedright.store.protocol import StoreError

NAMESPACE = "raggedright"
OBJECT_STORE_BYTES = 256 * 2**20  # of a Ray that is started here; rows do not go through it


def join_ray(address: str | None, num_cpus: int) -> tuple[Any, bool]:
    """Ray, and whether it was started here, with so many CPUs; without an address RAY_ADDRESS has one."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return _import_ray(on_loopback=False), False
    address = address or os.environ.get("RAY_ADDRESS")
    ray = _import_ray(on_loopback=address is None or address.startswith("127."))
    if address is None:
        _start(ray, num_cpus)
        return ray, True
    _join(ray, address)
    return ray, False


def _import_ray(*, on_loopback: bool) -> Any:
    """Ray binds to all interfaces unless it thinks that clusters are not supported here."""
    if on_loopback:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        if on_loopback and "ray" in sys.modules:
            from ray._private import ray_constants

            ray_constants.ENABLE_RAY_CLUSTER = False
        import ray
        import transfer_queue  # noqa: F401
    except ImportError as error:
        raise StoreError(f"store transfer_queue needs {error.name}; {install_hint('ray')}") from None
    return ray


def _join(ray: Any, address: str) -> None:
    if re.fullmatch(r"[^/]+:\d+", address) and not somebody_listens(address):
        raise StoreError(f"nobody listens at {address}; give the address of a Ray that runs, or none to start one")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StoreError(
            f"Ray at {address} cannot be reached: {error}; see whether it runs, and if it was started with token "
            "authentication (Ray's default) set RAY_AUTH_MODE=token for this process"
        ) from None


def _start(ray: Any, num_cpus: int) -> None:
    os.environ.setdefault("RAY_worker_niceness", "0")  # of 15: its workers would wait for all else on this machine
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_cpus),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
    )
    bound = ray.util.get_node_ip_address()
    if not bound.startswith("127."):
        ray.shutdown()
        raise StoreError(f"Ray bound to {bound}, not to 127.0.0.1; set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0")


def somebody_listens(address: str) -> bool:
    """Whether host:port takes connections; Ray itself would try for a minute and then end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True
