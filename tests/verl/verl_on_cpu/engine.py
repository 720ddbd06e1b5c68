# pyright: reportMissingImports=false
"""verl's own FSDP2 engine for the actor, which also reports what it trained on.

The numbers come from the engine, not from the trainer: rows and loss tokens of each step, of which verl reports the
mean over ranks and steps, and the optimizer's own step count. Its key has a vendor, which verl looks up before the
plain engine.
"""

from collections.abc import Callable
from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu", vendor="cpu")
class CountingEngine(FSDPEngineWithLMHead):
    """The actor's engine, with the rows and tokens of a step in its metrics."""

    def train_batch(self, data: Any, loss_function: Callable) -> dict:
        """One optimizer step, with the number of its rows and tokens."""
        tokens = [int(row.sum()) for row in data["loss_mask"].unbind()]
        output = super().train_batch(data, loss_function)
        output["metrics"] |= {
            "engine/rows": [len(tokens)],
            "engine/loss_rows": [sum(count > 0 for count in tokens)],
            "engine/loss_tokens": [sum(tokens)],
            "engine/optimizer_steps_max": [int(state["step"]) for state in self.optimizer.state.values()][:1],
        }
        return output
