"""TransferQueue on Ray, started or found: who starts it, who owns it.

Whoever makes the sessions' actor, of which a Ray cluster has one, starts TransferQueue and owns it; the others wait
until it is there and attach. So of many that start at once one does it. Only the owner ends it: TransferQueue's own
`close` kills the controller for everybody. It lasts as long as the owner's process; a store that is opened after that
makes a new link, and a new TransferQueue where nobody else has. A store that only attaches, as a rank's does, starts
nothing: it waits until all of TransferQueue's actors are there.

Ray that is started here counts enough CPUs for these actors, which would otherwise be waited for without an end.

The surprise: a TransferQueue that somebody else started, a trainer that has one of its own, is attached to and is
never ended from here.
"""

import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from raggedright.store.protocol import StoreError
from raggedright.store.ray_index import SessionIndex
from raggedright.store.ray_link import CONTROLLER, SESSIONS, STORAGE_UNIT, Link, named_actors
from raggedright.store.ray_node import NAMESPACE, join_ray

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_link: Link | None = None
_lock = Lock()


def connect(address: str | None, storage_units: int, timeout: float, *, attach: bool = False) -> tuple[Link, bool]:
    """This process's link, made if there is none that lives, and whether this call started TransferQueue.

    With `attach` it never does: it waits until somebody else has.
    """
    global _link
    with _lock:
        if _link is not None and not _link.is_alive():
            _link.drop()
            _link = None
        if _link is not None:
            if address not in (None, "auto", _link.address):
                raise StoreError(f"this process is linked to Ray at {_link.address} and cannot be to {address} as well")
            return _link, False
        _link = _connect(address, storage_units, timeout, attach)
        return _link, _link.owner


def disconnect(link: Link) -> None:
    """End what this process owns."""
    global _link
    with _lock:
        if _link is link:
            _link = None
    link.stop()


def _connect(address: str | None, storage_units: int, timeout: float, attach: bool) -> Link:
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))  # it warns on every call of more
    ray, started_ray = join_ray(address, storage_units + 1)
    try:
        if attach:
            _wait_complete(storage_units, timeout)
        return _attach(ray, storage_units, timeout, started_ray, may_make=not attach)
    except BaseException:
        if started_ray:
            ray.shutdown()
        raise


def _wait_complete(storage_units: int, timeout: float) -> None:
    """Until Ray has every actor of a store by name; those that are dead have none."""
    wanted = {SESSIONS, CONTROLLER, *(f"{STORAGE_UNIT}{i}" for i in range(storage_units))}
    until = time.monotonic() + timeout
    while lacking := wanted - named_actors():
        if time.monotonic() >= until:
            raise StoreError(
                f"the store's actor {' and '.join(sorted(lacking))} was not there in {timeout:g} s; see whether Ray "
                "has free CPUs for it, or raise start_timeout"
            )
        time.sleep(0.2)


def _attach(ray: Any, storage_units: int, timeout: float, started_ray: bool, *, may_make: bool) -> Link:
    """Make the sessions' actor and then TransferQueue, or wait for whoever made the actor first."""
    try:
        if not may_make:
            raise ValueError
        named = ray.remote(num_cpus=0)(SessionIndex).options(name=SESSIONS, namespace=NAMESPACE)
        sessions, made = named.remote(), True
    except ValueError:  # the name is taken, or not ours to take
        sessions, made = _wait_started(ray, timeout), False
    owner = made and _actor(CONTROLLER, "transfer_queue") is None
    try:
        if owner:
            _check_cpus(ray, storage_units)
        _in_time(lambda: _start_queue(storage_units), timeout)
        link = Link(sessions, owner=owner, started_ray=started_ray)
        if made:
            ray.get(sessions.set_started.remote(), timeout=timeout)
        return link
    except BaseException:
        if made:
            ray.kill(sessions)
        if owner:
            _end_queue(ray)
        raise


def _wait_started(ray: Any, timeout: float) -> Any:
    """The sessions' actor that another process made, once TransferQueue is there."""
    from ray.exceptions import GetTimeoutError, RayError

    try:
        sessions = ray.get_actor(SESSIONS, namespace=NAMESPACE)
        ray.get(sessions.wait_started.remote(), timeout=timeout)
    except GetTimeoutError:
        raise StoreError(
            f"another process makes the store's TransferQueue and has not ended in {timeout:g} s; see what it waits "
            "for, or raise start_timeout"
        ) from None
    except (RayError, ValueError):
        raise StoreError("the process that made the store's TransferQueue has ended; open the store again") from None
    if _actor(CONTROLLER, "transfer_queue") is None:
        raise StoreError("TransferQueue's controller is dead; close the store that started it, and start a new one")
    return sessions


FREEING_SECONDS = 5.0  # Ray takes a moment to give back the CPUs of actors that were just ended


def _check_cpus(ray: Any, storage_units: int) -> None:
    need, deadline = storage_units + 1, time.monotonic() + FREEING_SECONDS
    while (free := ray.available_resources().get("CPU", 0.0)) < need and time.monotonic() < deadline:
        time.sleep(0.1)
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


def _end_queue(ray: Any) -> None:
    """End what there is of a TransferQueue that did not start, so that the next one finds its names free."""
    import transfer_queue

    transfer_queue.close()
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["name"] == CONTROLLER or found["name"].startswith(STORAGE_UNIT):
            with suppress(ValueError):  # it ended meanwhile
                ray.kill(ray.get_actor(found["name"], namespace=found["namespace"]))


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
