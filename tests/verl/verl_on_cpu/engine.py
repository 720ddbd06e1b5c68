# pyright: reportMissingImports=false
"""verl's own FSDP2 engine for the actor, which also says what it trained on.

The numbers are the engine's, not the trainer's: rows and loss tokens as they arrive for a step, of which verl reports
the mean over ranks and steps, and the steps that the optimizer itself has counted. It has the vendor's name in its key,
which verl looks up before the plain engine's.
"""

from collections.abc import Callable
from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu", vendor="cpu")
class CountingEngine(FSDPEngineWithLMHead):
    """The actor's engine, with what arrives for a step among its metrics."""

    def train_batch(self, data: Any, loss_function: Callable) -> dict:
        """One optimizer step, and what it was taken on."""
        tokens = [int(row.sum()) for row in data["loss_mask"].unbind()]
        output = super().train_batch(data, loss_function)
        output["metrics"] |= {
            "engine/rows": [len(tokens)],
            "engine/loss_rows": [sum(count > 0 for count in tokens)],
            "engine/loss_tokens": [sum(tokens)],
            "engine/optimizer_steps_max": [int(state["step"]) for state in self.optimizer.state.values()][:1],
        }
        return output
