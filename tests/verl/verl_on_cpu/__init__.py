# pyright: reportMissingImports=false
"""What verl 0.9.1 lacks to run its loop on a CPU, registered where verl lets others register.

Loaded by `VERL_USE_EXTERNAL_MODULES=verl_on_cpu` in every process of a run, before verl asks for a device. Nothing of
verl is replaced: its trainer, workers, FSDP2 engine, losses, agent-loop workers, replay buffer and TransferQueue are
its own. Four things are new: a platform, an entry in the engine registry, a rollout, an agent loop. The order matters:
verl's modules read the platform's device when they are imported.
"""

from verl_on_cpu import platform  # noqa: F401 isort: skip
from verl_on_cpu import agent, engine, process_group, rollout  # noqa: F401
