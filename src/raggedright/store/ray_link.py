"""This process's calls to TransferQueue and to the sessions' actor: bounded in time, and errors as sentences.

A call that takes longer than a second makes us ask the actors whether they live: a dead one is reported in seconds, a
silent one when the call's time is over.

The surprise: there is one link a process, whatever number of stores use it; TransferQueue keeps its client in module
globals.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from raggedright.store.protocol import StoreError
from raggedright.store.ray_node import somebody_listens

if TYPE_CHECKING:
    from ray.actor import ActorHandle

SESSIONS = "RaggedRightSessions"
CONTROLLER, STORAGE_UNIT = "TransferQueueController", "TransferQueueStorageUnit#"
SLOW = 1.0  # seconds after which we ask whether the actors live


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

    def dead(self) -> list[str]:
        """Those of the store's actors that are dead; Ray is asked, not they."""
        return sorted({SESSIONS, *self.actors} - named_actors())

    def is_alive(self) -> bool:
        """Whether the sessions' actor answers within a few seconds."""
        import ray
        from ray.exceptions import RayError

        if not ray.is_initialized():
            return False
        try:
            ray.get(self.sessions.wait_started.remote(), timeout=5 * SLOW)
        except RayError:
            return False
        return True

    def stop(self) -> None:
        """End TransferQueue for everybody, and Ray if it was started here."""
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

    def drop(self) -> None:
        """Let go of a TransferQueue or Ray that has ended; one that lives on, without our sessions, is left alone."""
        import ray
        import transfer_queue

        ray_ended = not somebody_listens(self.address)
        if ray_ended or self._dead([CONTROLLER]):
            transfer_queue.close()  # of this process's client; there is no controller left to kill
        if ray_ended and ray.is_initialized():
            ray.shutdown()  # otherwise it waits for the one that ended, and then ends this process
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_alive(self, what: str) -> None:
        dead = self._dead(self.actors)
        if dead:
            lost = "nothing can be put or got" if CONTROLLER in dead else "its rows are lost"
            raise StoreError(
                f"{what}: TransferQueue's actor {' and '.join(sorted(dead))} is dead and {lost}; start a new store and "
                "go on from the last checkpoint"
            )

    def _dead(self, names: Iterable[str]) -> list[str]:
        """Those of these actors that are known to be dead."""
        import ray
        from ray.exceptions import RayActorError

        asked: dict[Any, str] = {self.actors[name].__ray_ready__.remote(): name for name in names}
        answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=2 * SLOW)
        dead = []
        for ref in answered:
            try:
                ray.get(ref)
            except RayActorError:
                dead.append(asked[ref])
        return dead


def named_actors() -> set[str]:
    """The names of all actors that live, or will."""
    import ray

    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return {found["name"] for found in named}
