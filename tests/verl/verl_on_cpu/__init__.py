# pyright: reportMissingImports=false
"""The parts that verl 0.9.1 lacks to run its whole loop on a CPU, added through its registries.

Loaded by `VERL_USE_EXTERNAL_MODULES=verl_on_cpu` in every process of a run. Nothing of verl is replaced: its trainer,
workers, FSDP2 engine, losses, agent-loop workers, replay buffer and TransferQueue are its own. In addition
to the platform and the ranks' process group (`cpu_ranks`), there is an engine that counts, a rollout and an agent loop.
"""

import cpu_ranks  # noqa: F401 isort: skip, verl's modules read the platform's device when they are imported
from verl_on_cpu import agent, engine, rollout  # noqa: F401
