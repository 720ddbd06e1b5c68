"""The connection of this process to TransferQueue on Ray: how both are joined or started, and calls with a time limit.

Ray that is started here listens on 127.0.0.1 only, has enough CPUs for TransferQueue's actors, and ends with this
process. Ray at an address is joined as it is.

A Ray cluster has one sessions actor. The process that makes it starts TransferQueue and owns it; the others wait until
it has started and attach. So of several processes that start at once one does the work. Only the owner ends
TransferQueue, because its `close` kills the controller for all processes; it lasts as long as the owner's process. A
store that is opened afterwards makes a new link, and a new TransferQueue if there is none. With `attach`, as on ranks,
nothing is started: it waits until all actors of TransferQueue exist. A TransferQueue that another program started is
attached to and never ended from here.

When a call takes longer than a second, Ray is asked which actors are alive: a dead one is reported within seconds, one
that does not answer when the call's time is over.

Note: a process has one link, however many stores use it, because TransferQueue keeps its client in module globals.
"""

import asyncio
import os
import re
import socket
import sys
import warnings
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from raggedright.errors import install_hint
from raggedright.store.session_store import StoreError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NAMESPACE = "raggedright"
SESSIONS_ACTOR = "RaggedRightSessions"
CONTROLLER, STORAGE_UNIT = "TransferQueueController", "TransferQueueStorageUnit#"
OBJECT_STORE_BYTES = 256 * 2**20  # of a Ray that is started here; rows do not go through it
CHECK_SECONDS = 1.0  # a call that takes longer checks whether the actors are alive
FREEING_SECONDS = 5.0  # Ray needs some time to release the CPUs of actors that have just ended


def join_ray(address: str | None, num_cpus: int) -> tuple[Any, bool]:
    """Join Ray at an address (default: RAY_ADDRESS), or start one with at least `num_cpus` CPUs.

    Returns the module, and whether Ray was started here.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return _import_ray(on_loopback=False), False
    address = address or os.environ.get("RAY_ADDRESS")
    ray = _import_ray(on_loopback=address is None or address.startswith("127."))
    settings = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        _join(ray, address, settings)
        return ray, False
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15: its workers would wait for all others
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_cpus),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        **settings,
    )
    node_address = ray.util.get_node_ip_address()
    if not node_address.startswith("127."):
        ray.shutdown()
        raise StoreError(f"Ray bound to {node_address}, not to 127.0.0.1; set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0")
    return ray, True


def _import_ray(*, on_loopback: bool) -> Any:
    """Ray binds to all interfaces, except where it assumes that clusters are not supported."""
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


def _join(ray: Any, address: str, settings: dict[str, Any]) -> None:
    if re.fullmatch(r"[^/]+:\d+", address) and not _is_listening(address):
        raise StoreError(f"nothing is listening at {address}; set the address of a running Ray, or none to start one")
    try:
        ray.init(address=address, **settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StoreError(
            f"Ray at {address} cannot be reached: {error}; check that it is running, and if it was started with token "
            "authentication (Ray's default) set RAY_AUTH_MODE=token for this process"
        ) from None


def _is_listening(address: str) -> bool:
    """Whether host:port accepts connections; Ray itself would try for a minute and then end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True


class QueueLink:
    """Calls from this process to TransferQueue and to the sessions actor."""

    def __init__(self, sessions: "ActorHandle", *, owner: bool, started_ray: bool) -> None:
        import ray

        self.sessions, self.owner, self.started_ray = sessions, owner, started_ray
        self.address: str = ray.get_runtime_context().gcs_address
        self._queue_actors = queue_actors()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="transfer-queue", daemon=True)
        self._thread.start()

    def call_queue(self, subject: str, call: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """The result of one of TransferQueue's coroutines, or a StoreError about `subject` in a bounded time."""
        future, deadline = asyncio.run_coroutine_threadsafe(call, self._loop), monotonic() + timeout
        while True:
            try:
                return future.result(max(0.0, min(CHECK_SECONDS, deadline - monotonic())))
            except TimeoutError:
                if future.done():
                    raise StoreError(f"{subject}: TransferQueue timed out; see the logs of its actors") from None
                try:
                    self._check_alive(subject)
                    if monotonic() >= deadline:
                        raise StoreError(
                            f"{subject}: TransferQueue did not answer in {timeout:g} s although its actors are alive; "
                            "it is overloaded or unreachable: raise timeout"
                        )
                except StoreError:
                    future.cancel()
                    raise
            except Exception as error:
                self._check_alive(subject)
                raise StoreError(f"{subject}: TransferQueue failed: {type(error).__name__}: {error}") from error

    def call_actor(self, run: str, method: str, *args: object, timeout: float) -> Any:
        """The sessions actor's answer, its StoreError, or one that says that it is dead or does not answer."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(self.sessions.call.remote(run, method, *args), timeout=min(timeout, 1e8))
        except RayTaskError as error:
            if isinstance(error.cause, StoreError):
                raise StoreError(str(error.cause)) from None
            raise
        except GetTimeoutError:
            raise StoreError(f"the actor {SESSIONS_ACTOR} did not answer in {timeout:g} s; raise timeout") from None
        except RayError as error:
            raise StoreError(
                f"the actor {SESSIONS_ACTOR} is dead, and the sessions of the store are lost; start a new store and "
                f"resume from the last checkpoint ({type(error).__name__})"
            ) from None

    def dead_actors(self) -> list[str]:
        """The actors of the store that are dead, according to Ray."""
        return sorted([*self._dead_queue_actors(), *({SESSIONS_ACTOR} - named_actors())])

    def _dead_queue_actors(self) -> list[str]:
        """The dead actors of this TransferQueue; a new TransferQueue may use the same names."""
        alive = queue_actors()
        return [name for name, actor in self._queue_actors.items() if alive.get(name) != actor]

    def is_alive(self) -> bool:
        """Whether the sessions actor answers within a few seconds."""
        import ray
        from ray.exceptions import RayError

        if not ray.is_initialized():
            return False
        try:
            ray.get(self.sessions.wait_started.remote(), timeout=5.0)
        except RayError:
            return False
        return True

    def stop(self) -> None:
        """End TransferQueue for all processes, and Ray if it was started here."""
        import ray
        import transfer_queue
        from ray.exceptions import RayError

        if ray.is_initialized():
            transfer_queue.close()
            with suppress(RayError):
                ray.kill(self.sessions)
            if self.started_ray:
                ray.shutdown()
        self._end_loop()

    def release(self) -> None:
        """Disconnect from a TransferQueue or Ray that has ended; one that is alive is left as it is."""
        import ray
        import transfer_queue

        ray_ended = not ray.is_initialized() or not _is_listening(self.address)
        if ray_ended:
            transfer_queue.interface._TQ_STORAGE = None  # `close` would start a new Ray to reach the storage units
        if ray_ended or CONTROLLER in self._dead_queue_actors():
            transfer_queue.close()  # closes the client of this process; there is no controller left to kill
        if ray_ended and ray.is_initialized():
            ray.shutdown()  # otherwise it waits for the one that ended, and then ends this process
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_alive(self, subject: str) -> None:
        if not _is_listening(self.address):
            raise StoreError(f"{subject}: Ray at {self.address} has ended; resume from the last checkpoint")
        dead = sorted(self._dead_queue_actors())
        if dead:
            lost = "nothing can be written or read" if CONTROLLER in dead else "its rows are lost"
            raise StoreError(
                f"{subject}: TransferQueue's actor {' and '.join(dead)} is dead and {lost}; start a new store and "
                "resume from the last checkpoint"
            )


_link: QueueLink | None = None
_lock = Lock()


def connect(
    actor_class: type, address: str | None, storage_units: int, timeout: float, *, attach: bool
) -> tuple[QueueLink, bool]:
    """The link of this process, made if there is none that is alive, and whether this call started TransferQueue.

    `actor_class` is the class of the sessions actor. With `attach` nothing is started.
    """
    global _link
    with _lock:
        if _link is not None and not _link.is_alive():
            _link.release()
            _link = None
        if _link is not None:
            if address not in (None, "auto", _link.address):
                raise StoreError(f"this process is connected to Ray at {_link.address}; it cannot also use {address}")
            return _link, False
        _link = _connect(actor_class, address, storage_units, timeout, attach=attach)
        return _link, _link.owner


def disconnect(link: QueueLink) -> None:
    """End what this process owns."""
    global _link
    with _lock:
        if _link is link:
            _link = None
    link.stop()


def _connect(actor_class: type, address: str | None, storage_units: int, timeout: float, *, attach: bool) -> QueueLink:
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))  # with more it warns on every call
    ray, started_ray = join_ray(address, storage_units + 1)
    made_actor, owner = None, False
    try:
        if attach:
            _wait_for_actors(storage_units, timeout)
        else:
            with suppress(ValueError):  # another process has made it
                named = ray.remote(num_cpus=0)(actor_class).options(name=SESSIONS_ACTOR, namespace=NAMESPACE)
                made_actor = named.remote()
        if made_actor is None:
            sessions = _wait_started(ray, timeout)
        else:
            sessions, owner = made_actor, CONTROLLER not in named_actors()
        if owner:
            _check_cpus(ray, storage_units)
        _start_queue(storage_units, timeout)
        if made_actor is not None:
            ray.get(made_actor.set_started.remote(), timeout=timeout)
        return QueueLink(sessions, owner=owner, started_ray=started_ray)
    except BaseException:
        if made_actor is not None:
            ray.kill(made_actor)
        if owner:
            _kill_queue(ray)
        if started_ray:
            ray.shutdown()
        raise


def _wait_for_actors(storage_units: int, timeout: float) -> None:
    """Wait until Ray has every actor of a store by name; a dead actor has none."""
    expected = {SESSIONS_ACTOR, CONTROLLER, *(f"{STORAGE_UNIT}{i}" for i in range(storage_units))}
    deadline = monotonic() + timeout
    while missing := expected - named_actors():
        if monotonic() >= deadline:
            raise StoreError(
                f"the store's actor {' and '.join(sorted(missing))} did not start in {timeout:g} s; check whether Ray "
                "has free CPUs for it, or raise start_timeout"
            )
        sleep(0.2)


def _wait_started(ray: Any, timeout: float) -> Any:
    """The sessions actor that another process made, once TransferQueue has started."""
    from ray.exceptions import GetTimeoutError, RayError

    try:
        sessions = ray.get_actor(SESSIONS_ACTOR, namespace=NAMESPACE)
        ray.get(sessions.wait_started.remote(), timeout=timeout)
    except GetTimeoutError:
        raise StoreError(
            f"another process is starting the store's TransferQueue and has not finished in {timeout:g} s; check what "
            "it waits for, or raise start_timeout"
        ) from None
    except (RayError, ValueError):
        raise StoreError("the process that started the store's TransferQueue has ended; open the store again") from None
    if CONTROLLER not in named_actors():
        raise StoreError("TransferQueue's controller is dead; close the store that started it, and start a new one")
    return sessions


def _check_cpus(ray: Any, storage_units: int) -> None:
    """Raise if TransferQueue would wait forever for CPUs."""
    need, deadline = storage_units + 1, monotonic() + FREEING_SECONDS
    while (free := ray.available_resources().get("CPU", 0.0)) < need and monotonic() < deadline:
        sleep(0.1)
    if free < need:
        raise StoreError(
            f"TransferQueue needs {need} CPUs as Ray counts them (a controller and {storage_units} storage units) and "
            f"{free:g} of {ray.cluster_resources().get('CPU', 0.0):g} are free; start Ray with num_cpus={need} more, "
            "or lower storage_units"
        )


def _start_queue(storage_units: int, timeout: float) -> None:
    """Start TransferQueue, or attach to the one that exists; a start that takes too long is abandoned."""
    started: Future[None] = Future()

    def start() -> None:
        try:
            _init_queue(storage_units)
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)

    Thread(target=start, name="transfer-queue-start", daemon=True).start()
    try:
        started.result(timeout)
    except Exception as error:
        if not started.done():
            raise StoreError(
                f"TransferQueue did not start in {timeout:g} s; check whether Ray has free CPUs and memory, or raise "
                "start_timeout"
            ) from None
        raise StoreError(f"TransferQueue did not start: {type(error).__name__}: {error}") from error


def _init_queue(storage_units: int) -> None:
    import torch
    import transfer_queue
    from omegaconf import OmegaConf

    with warnings.catch_warnings():  # torch warns once per process of strided nested tensors, which TransferQueue uses
        warnings.simplefilter("ignore")
        torch.nested.as_nested_tensor([torch.zeros(1)], layout=torch.strided)
    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": storage_units}}}))


def _kill_queue(ray: Any) -> None:
    """End a TransferQueue that did not start completely, so that its names are free for the next one."""
    import transfer_queue

    transfer_queue.close()
    for actor in queue_actors().values():
        ray.kill(actor)


def queue_actors() -> "dict[str, ActorHandle]":
    """TransferQueue's actors by name."""
    import ray

    actors = {}
    for actor in _list_actors():
        if actor["name"] == CONTROLLER or actor["name"].startswith(STORAGE_UNIT):
            with suppress(ValueError):  # it has ended in the meantime
                actors[actor["name"]] = ray.get_actor(actor["name"], namespace=actor["namespace"])
    return actors


def named_actors() -> set[str]:
    """The names of all actors that are alive or starting."""
    return {actor["name"] for actor in _list_actors()}


def _list_actors() -> list[Any]:
    import ray

    return ray.util.list_named_actors(all_namespaces=True)
