# pyright: reportMissingImports=false
"""Ray and TransferQueue, started or found, and their calls, bounded in time.

Whoever finds no TransferQueue on the Ray cluster starts one and owns it; the others attach. Only the owner ends it:
TransferQueue's own `close` kills the controller for everybody. It lasts as long as the owner's process.

Ray that is started here listens on 127.0.0.1 alone, and counts enough CPUs for TransferQueue's actors, which would
otherwise be waited for without an end. A call that takes longer than a second makes us ask the actors whether they
live: a dead one is reported in seconds, a silent one when the call's time is over.

The surprise: this process has one link to one TransferQueue, whatever number of stores use it; TransferQueue keeps its
client in module globals.
"""

import asyncio
import os
import sys
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from raggedright.store.protocol import StoreError
from raggedright.store.ray_sessions import Sessions

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NAMESPACE, SESSIONS = "raggedright", "RaggedRightSessions"
CONTROLLER, STORAGE_UNIT = "TransferQueueController", "TransferQueueStorageUnit#"
SLOW = 1.0  # seconds after which we ask whether the actors live
OBJECT_STORE_BYTES = 256 * 2**20  # of a Ray that is started for the store alone; tensors do not go through it


class Link:
    """This process's way to TransferQueue and to the sessions' actor."""

    def __init__(self, sessions: "ActorHandle", owner: bool, started_ray: bool) -> None:
        import ray

        self.sessions, self.owner, self.started_ray = sessions, owner, started_ray
        self.address: str = ray.get_runtime_context().gcs_address
        named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        self.actors = {
            found["name"]: ray.get_actor(found["name"], namespace=found["namespace"])
            for found in named
            if found["name"] == CONTROLLER or found["name"].startswith(STORAGE_UNIT)
        }
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="transfer-queue", daemon=True)
        self._thread.start()

    def queue(self, what: str, call: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """The answer of one of TransferQueue's coroutines, or a StoreError in a bounded time."""
        future, until = asyncio.run_coroutine_threadsafe(call, self._loop), monotonic() + timeout
        while True:
            try:
                return future.result(max(0.0, min(SLOW, until - monotonic())))
            except TimeoutError:
                if future.done():
                    raise StoreError(f"{what}: TransferQueue timed out; look at its actors' logs") from None
                try:
                    self._check_alive(what)
                    if monotonic() >= until:
                        raise StoreError(
                            f"{what}: no answer from TransferQueue in {timeout:g} s though its actors live; it is "
                            "overloaded or cut off: raise timeout"
                        )
                except StoreError:
                    future.cancel()
                    raise
            except StoreError:
                raise
            except Exception as error:
                self._check_alive(what)
                raise StoreError(f"{what}: TransferQueue failed: {type(error).__name__}: {error}") from error

    def ask(self, run: str, method: str, *args: object) -> Any:
        """Put a question to the sessions' actor; `hear` has its answer."""
        return self.sessions.call.remote(run, method, *args)

    def hear(self, asked: Any, timeout: float) -> Any:
        """The sessions' actor's answer, its own StoreError, or one that says it is dead or silent."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(asked, timeout=min(timeout, 1e8))
        except RayTaskError as error:
            if isinstance(error.cause, StoreError):
                raise StoreError(str(error.cause)) from None
            raise
        except GetTimeoutError:
            raise StoreError(f"the actor {SESSIONS} did not answer in {timeout:g} s; raise timeout") from None
        except RayError as error:
            raise StoreError(
                f"the actor {SESSIONS} is dead, and with it what is whole in the store; start a new store and go on "
                f"from the last checkpoint ({type(error).__name__})"
            ) from None

    def stop(self) -> None:
        """End TransferQueue for everybody, and Ray if it was started here."""
        global _link
        import ray
        import transfer_queue
        from ray.exceptions import RayError

        with _lock:
            _link = None
        if ray.is_initialized():
            transfer_queue.close()
            with suppress(RayError):
                ray.kill(self.sessions)
            if self.started_ray:
                ray.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_alive(self, what: str) -> None:
        import ray
        from ray.exceptions import RayActorError

        asked: dict[Any, str] = {handle.__ray_ready__.remote(): name for name, handle in self.actors.items()}
        answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=2 * SLOW)
        dead = []
        for ref in answered:
            try:
                ray.get(ref)
            except RayActorError:
                dead.append(asked[ref])
        if dead:
            lost = "nothing can be put or got" if CONTROLLER in dead else "its rows are lost"
            raise StoreError(
                f"{what}: TransferQueue's actor {' and '.join(sorted(dead))} is dead and {lost}; start a new store and "
                "go on from the last checkpoint"
            )


_link: Link | None = None
_lock = Lock()


def connect(address: str | None, storage_units: int, timeout: float) -> tuple[Link, bool]:
    """This process's link, made if there is none, and whether this call started TransferQueue."""
    global _link
    with _lock:
        if _link is not None:
            if address not in (None, "auto", _link.address):
                raise StoreError(f"this process is linked to Ray at {_link.address} and cannot be to {address} as well")
            return _link, False
        _link = _connect(address, storage_units, timeout)
        return _link, _link.owner


def _connect(address: str | None, storage_units: int, timeout: float) -> Link:
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))  # it warns on every call of more
    address = address or os.environ.get("RAY_ADDRESS")
    ray = _import_ray(on_loopback=address is None or address.startswith("127."))
    started_ray = not ray.is_initialized() and address is None
    if not ray.is_initialized():
        _start_ray(ray, address, storage_units)
    try:
        controller, sessions = _actor(CONTROLLER, "transfer_queue"), _actor(SESSIONS, NAMESPACE)
        if controller is None and sessions is not None:
            raise StoreError("TransferQueue's controller is dead; close the store that started it, and start a new one")
        if controller is None:
            _check_cpus(ray, storage_units)
        _in_time(lambda: _start_queue(storage_units), timeout)
        remote = ray.remote(num_cpus=0)(Sessions).options(name=SESSIONS, namespace=NAMESPACE, get_if_exists=True)
        return Link(sessions or remote.remote(), owner=controller is None, started_ray=started_ray)
    except BaseException:
        if started_ray:
            ray.shutdown()
        raise


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
        raise StoreError(f"store transfer_queue needs {error.name}; pip install 'raggedright[ray]'") from None
    return ray


def _start_ray(ray: Any, address: str | None, storage_units: int) -> None:
    if address is not None:
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise StoreError(f"Ray at {address} cannot be reached: {error}") from None
        return
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, storage_units + 1),
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


def _check_cpus(ray: Any, storage_units: int) -> None:
    free, need = ray.available_resources().get("CPU", 0.0), storage_units + 1
    if free < need:
        raise StoreError(
            f"TransferQueue needs {need} CPUs as Ray counts them (a controller and {storage_units} storage units) and "
            f"{free:g} of {ray.cluster_resources().get('CPU', 0.0):g} are free; start Ray with num_cpus={need} more, "
            "or lower storage_units"
        )


def _start_queue(storage_units: int) -> None:
    import torch
    import transfer_queue
    from omegaconf import OmegaConf

    with warnings.catch_warnings():  # torch warns of strided nested tensors once a process; TransferQueue uses them
        warnings.simplefilter("ignore")
        torch.nested.as_nested_tensor([torch.zeros(1)], layout=torch.strided)
    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": storage_units}}}))


def _in_time(start: Callable[[], None], timeout: float) -> None:
    """Run what may never return; it is left behind when the time is over."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            start()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run, name="transfer-queue-start", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise StoreError(
            f"TransferQueue did not start in {timeout:g} s; see whether Ray has free CPUs and memory, or raise "
            "start_timeout"
        )
    if errors:
        raise StoreError(f"TransferQueue did not start: {type(errors[0]).__name__}: {errors[0]}") from errors[0]


def _actor(name: str, namespace: str) -> "ActorHandle | None":
    import ray

    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
