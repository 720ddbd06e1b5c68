"""Ranks together: gradients and metrics are summed over the data-parallel ranks, never averaged.

A token's weight is fixed over the whole step, so what a rank computes is its share of a sum, and the step's number
is the sum of the shares. An average would need loss x dp to undo it, which is inexact where a model casts to float32.

Every rank calls these in the same order, and runs the same number of micro-batches before: a plan sees to that.
The surprise: a sharded model sums its gradients in the backward pass, so that `sum_gradients` leaves it alone.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from raggedright.errors import ConfigError


def sum_gradients(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Sum every gradient over the ranks in place, one all-reduce a dtype.

    A parameter without a gradient counts as zero, so that all ranks have the same ones afterwards.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def sum_metrics(metrics: Mapping[str, Tensor], group: ProcessGroup | None = None) -> dict[str, Tensor]:
    """Sum every metric over the ranks, in float64; each rank has the same names, as losses give them."""
    if not metrics:
        return {}
    names = sorted(metrics)
    sums = torch.stack([metrics[name].detach().double() for name in names])
    dist.all_reduce(sums, group=group)
    return dict(zip(names, sums.unbind(), strict=True))


def shard(model: nn.Module, group: ProcessGroup | None = None) -> nn.Module:
    """Shard the model in place with FSDP2, block by block and then the rest; its gradients are sums over the ranks."""
    names = getattr(model, "_no_split_modules", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__} does not name its blocks (_no_split_modules is {names!r}); "
            "shard it with fully_shard and then call sum_in_backward, or set parallel.shard = 'none'"
        )
    device = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(group, device) if group else init_device_mesh(device, (dist.get_world_size(),))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    sum_in_backward(model)
    return model


def sum_in_backward(model: nn.Module) -> None:
    """Have every FSDP2 module of the model sum gradients over ranks where it would average them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
