# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""verl's workers on a CPU: a platform for it, verl's own FSDP2 engine under its key, and gloo between ranks.

Loaded in every process by `VERL_USE_EXTERNAL_MODULES`, before verl queries the device. Nothing of verl is replaced.
"""

import os
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform


class CpuModule(ModuleType):
    """torch.cpu, with zeros for what torch only counts on accelerators."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False

    def empty_cache(self) -> None:
        return

    def memory_allocated(self) -> int:
        return 0

    def get_device_name(self) -> str:
        return "CPU"

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


def _nothing(*args: object, **kwargs: object) -> None:
    return


@contextmanager
def _no_range(self: object, msg: str):
    yield


_ANSWERS = {
    "is_available": lambda self: True,
    "current_device": lambda self: "cpu",  # verl passes it to `.to()`, where a number would mean an accelerator
    "device_count": lambda self: 1,
    "get_device_capability": lambda self, device_index=0: (None, None),
    "communication_backend_name": lambda self: "gloo",
    "visible_devices_envvar": lambda self: "CUDA_VISIBLE_DEVICES",
    "nvtx_range": _no_range,
    "ray_resource_name": lambda self: "GPU",  # only a count: Ray is started with as many as there are ranks
    "ray_noset_envvars": lambda self: [],
    "is_ipc_supported": lambda self: False,
}
_abstract = dict.fromkeys(PlatformBase.__abstractmethods__, _nothing)
CpuPlatform = type(
    "CpuPlatform",
    (PlatformBase,),
    {
        **_abstract,
        **_ANSWERS,
        "device_name": "cpu",
        "vendor_name": "cpu",
        "device_module": CpuModule("cpu"),
    },
)
PlatformRegistry.register(platform="cpu")(CpuPlatform)
set_platform(CpuPlatform())

# verl would request "cpu:gloo,cpu:gloo", which torch refuses; it only does so if there is no process group yet.
if "RANK" in os.environ and "MASTER_ADDR" in os.environ and not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")

from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)
