"""The part of a parameter that this process holds: all of a plain one, a shard of a DTensor (`fully_shard`, tensor parallelism).

It must hold: every number of the parameter is multiplied by the factor of its place in the whole, on whichever process it lies
and in whatever order shards were made; what is said of an edit is the same on all processes; nothing is gathered.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attemper.errors import UnsupportedError


class Part(NamedTuple):
    """What lies here.

    Attributes:
        numbers: the tensor of this process; writing to it writes to the parameter.
        places: int64, of each of its outputs along a dimension (of each of its numbers, where no dimension was named) the place
            in the whole parameter; None where it is the whole.
        mesh: over which processes the parameter is spread; None where it is not.
    """

    numbers: Tensor
    places: Tensor | None
    mesh: Any

    def here(self, features: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Of features of the whole, counted below `size`: which lie here (bool), and where those do (int64)."""
        if self.places is None:
            return torch.ones_like(features, dtype=torch.bool), features
        local = torch.full((size,), -1)
        local[self.places] = torch.arange(len(self.places))
        local = local[features]
        return local >= 0, local[local >= 0]


def part(name: str, parameter: nn.Parameter, dim: int | None) -> Part:
    """What this process holds of a parameter.

    Args:
        name: of the parameter, for errors. dim: along which outputs are counted; None: its numbers are.

    Raises:
        UnsupportedError: each process holds a summand of it.
    """
    placements: Sequence[Any] | None = getattr(parameter, "placements", None)
    if placements is None:
        return Part(parameter, None, None)
    from torch.distributed.tensor import Replicate, distribute_tensor

    if any(each.is_partial() for each in placements):
        raise UnsupportedError(f"{name} is a sum over processes (Partial): redistribute it before it is edited")
    mesh = parameter.device_mesh  # pyrefly: ignore[missing-attribute]
    if dim is None:
        places, split = torch.arange(parameter.numel()).view(parameter.shape), tuple(placements)
    else:
        places = torch.arange(parameter.shape[dim])
        # Places along one dimension are sharded as it is; what shards another dimension leaves them whole.
        split = tuple(_of_vector(each) if getattr(each, "dim", None) == dim else Replicate() for each in placements)
    with torch.no_grad():  # in which to_local gives the tensor itself, not a view of it
        held = distribute_tensor(places.to(mesh.device_type), mesh, split, src_data_rank=None).to_local()  # without communication
        return Part(parameter.to_local(), held.flatten().cpu(), mesh)  # pyrefly: ignore[missing-attribute]


def reshard(model: nn.Module) -> None:
    """Have `fully_shard` put away what it gathered for a forward pass without a backward one: edits to that would be lost."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def largest_of_all(mesh: Any, numbers: Tensor) -> Tensor:
    """The elementwise maximum over the processes of a mesh, on the CPU."""
    import torch.distributed as dist

    numbers = numbers.to(mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.all_reduce(numbers, dist.ReduceOp.MAX, mesh.get_group(dimension))
    return numbers.cpu()


def _of_vector(placement: Any) -> Any:
    """The placement along some dimension of a matrix, for a vector."""
    from torch.distributed.tensor import Shard

    if type(placement) is Shard:
        return Shard(0)
    return type(placement)(0, split_factor=placement.split_factor)  # _StridedShard: fully_shard on top of tensor parallelism
