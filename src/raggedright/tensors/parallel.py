"""Sums of gradients and metrics over the data-parallel ranks; nothing is averaged.

A token's weight is fixed for the whole step, so each rank computes its share of a sum, and the step's number is the sum
of the shares. An average would need loss x dp to undo it, which is inexact where a model casts to float32.

Every rank calls these functions in the same order, after the same number of micro-batches; a plan ensures that.
Note: a sharded model sums its gradients in the backward pass, so `sum_gradients` skips it.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from raggedright.errors import ConfigError


def sum_gradients(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Sum every gradient over the ranks, with one all-reduce per dtype.

    A parameter without a gradient counts as zero, so that all ranks have the same ones afterwards.
    """
    for vector in join_gradients(model.parameters()):
        dist.all_reduce(vector, group=group)


def join_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """All gradients as one vector per dtype, zero where there is none; those of a sharded model are skipped.

    Each parameter's gradient becomes a view of its vector, so that a change of the vector changes the gradients.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    vectors = []
    for same_dtype in by_dtype.values():
        gradients = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in same_dtype]
        vector = torch.cat(gradients)
        for parameter, part in zip(same_dtype, vector.split([p.numel() for p in same_dtype]), strict=True):
            parameter.grad = part.view_as(parameter)
        vectors.append(vector)
    return vectors


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
