"""An engine of your own: the local engine, with the tokens and seconds of every generation in a file.

    [rollout]
    engine = "examples.plug_in.engine:TimedEngine"
    engine_options = {file = "generations.jsonl"}

An engine is any callable that takes an EngineContext and options, and returns an object with the methods of `Engine`.
"""

import json
from collections.abc import Iterable
from time import perf_counter

from torch import Tensor

from raggedright.rollout.engine import EngineContext, Generation, Request
from raggedright.rollout.local_engine import LocalEngine


class TimedEngine:
    """Generates with the local engine."""

    def __init__(self, context: EngineContext, file: str = "generations.jsonl") -> None:
        self._engine = LocalEngine(context)
        self._log = open(file, "a")  # noqa: SIM115 (closed in `close`)

    @property
    def context_tokens(self) -> int:
        """The maximum tokens of a context with its generation."""
        return self._engine.context_tokens

    async def generate(self, request: Request) -> Generation:
        """Continue a context, and record how long that took."""
        start = perf_counter()
        generation = await self._engine.generate(request)
        self._log.write(json.dumps({"tokens": len(generation.ids), "seconds": perf_counter() - start}) + "\n")
        return generation

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Generate with these weights from now on."""
        self._engine.update_weights(weights, version=version)

    def forget(self, noise: bytes) -> None:
        """Release what is kept for a trajectory that has ended."""
        self._engine.forget(noise)

    def abort(self) -> None:
        """Return from all generations immediately."""
        self._engine.abort()

    def close(self) -> None:
        """End the engine and the file."""
        self._engine.close()
        self._log.close()
