# pyright: reportMissingImports=false
"""A platform whose device is the CPU and whose collectives are gloo's.

The surprises: verl counts accelerators as Ray's resource GPU, so a run declares as many as it has ranks
(`ray_kwargs.ray_init.num_gpus`), and that is a number only; and `current_device` is the text "cpu", because verl hands
it to `.to()`, where a number would mean an accelerator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform


class CpuModule(ModuleType):
    """torch.cpu, and zero for what torch counts on accelerators alone."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False

    def get_device_name(self) -> str:
        return "CPU"

    def empty_cache(self) -> None:
        return

    def memory_allocated(self) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU, in the words of verl's platforms."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuModule("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        return

    def empty_cache(self) -> None:
        return

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


set_platform(CpuPlatform())
