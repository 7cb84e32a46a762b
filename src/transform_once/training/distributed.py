"""A model shared by several processes: copied or cut into shards, and put together again."""

from torch import Tensor, nn

from transform_once.models.operator import Operator
from transform_once.processes import World


def shared(objective: nn.Module, place: World, sharding: str) -> nn.Module:
    """The objective with its gradients summed over all processes: copied to each ("ddp") or cut up ("fsdp")."""
    if place.size == 1:
        return objective
    if sharding == "ddp":
        devices = [place.device] if place.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(objective, device_ids=devices)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(place.device.type, (place.size,))
    for layer in getattr(objective.model, "layers", ()):
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from its shards; all processes must ask for it."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather else tensor


def own(tensor: Tensor) -> Tensor:
    """A tensor, or the shard of it that this process has, in the same memory."""
    local = getattr(tensor, "to_local", None)
    return local() if local else tensor


def fill(tensor: Tensor, values: Tensor) -> None:
    """Set a tensor, or this process's shard of it, to the values of a whole one."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(tensor, DTensor):
        values = distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(values)


def remade(model: Operator) -> Operator:
    """A model of the same configuration, units and way of stepping in time, whole, with new weights."""
    made = type(model)(**model.config)
    made.dynamics = model.dynamics
    if model.input_shift is not None:
        made.set_normalization(model.input_shift, model.input_scale, model.output_shift, model.output_scale)  # type: ignore[arg-type]
    return made.to(next(model.buffers()).device)
