"""Which heads of a layer this rank has: read off its weights where they are DTensors, or told by the caller.

What it must hold:
- a dimension of a mesh is tensor parallel if a matrix is sharded over it and its ranks do not share out the data: FSDP2 shards
  every matrix too, and experts lie on ranks of different batches; both are told by the ranks in FSDP2's own groups;
- ranks of one tensor-parallel group see the same batch: an attention that is not sharded over them is counted on one of them;
- nothing here is a collective.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from attemper.errors import ArgumentError
from attemper.weights.families import FAMILIES

# Where the heads of the queries are made, in the modules that have it by name; in others every matrix may tell.
_QUERIES = {family.query for family in FAMILIES} | {"q_b_proj"}

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class HeadShard:
    """The heads of one layer on this rank.

    Attributes:
        part, parts: this rank has the part of that number, from 0, of so many; the heads of part 0 come first.
        counted: whether this rank speaks for them; of ranks that have the same heads and the same batch one does.
    """

    part: int = 0
    parts: int = 1
    counted: bool = True


class Spread(NamedTuple):
    """How a parameter lies along one dimension of its mesh: over which ranks, and which of its own dimensions (None: whole)."""

    ranks: Ranks
    dim: int | None


def shards(
    model: nn.Module, layers: Sequence[str], tensor_parallel: object = None, replicated: Sequence[str] = ()
) -> dict[str, HeadShard]:
    """How the heads of each layer are shared out.

    Args:
        model: on this rank. layers: dotted names within it; one that it does not have is taken to have no sharded weights.
        tensor_parallel: a process group, or a DeviceMesh of one dimension, over which heads are sharded; None: what the DTensors
            among the parameters say. Where none of them lies on its ranks, every layer is taken to be sharded over it.
        replicated: names of layers, or patterns of them ("vision.*"), that every rank of the tensor-parallel group has whole.

    Raises:
        ArgumentError: `tensor_parallel` is neither, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        return dict.fromkeys(layers, HeadShard())
    spreads = [spread for parameter in model.parameters() if parameter.ndim <= 2 for spread in _spreads(parameter)]
    told = False
    if tensor_parallel is None:
        data = _data_parallel(model)
        found = {spread.ranks for spread in spreads if spread.dim is not None}
        groups = sorted(ranks for ranks in found if not any(set(ranks) <= own for own in data))
    else:
        groups = [_ranks_of(tensor_parallel)]
        told = not any(spread.ranks == groups[0] for spread in spreads)
    result = {}
    for layer in layers:
        whole = any(fnmatchcase(layer, pattern) for pattern in replicated)
        sharded = set() if whole else set(groups) if told else _of_heads(model, layer)
        result[layer] = _shard(groups, sharded)
    return result


def _shard(groups: Sequence[Ranks], sharded: set[Ranks]) -> HeadShard:
    shard = HeadShard()
    for ranks in groups:
        place = ranks.index(dist.get_rank())
        if ranks in sharded:
            shard = HeadShard(shard.part * len(ranks) + place, shard.parts * len(ranks), shard.counted)
        else:
            shard = HeadShard(shard.part, shard.parts, shard.counted and place == 0)
    return shard


def _of_heads(model: nn.Module, layer: str) -> set[Ranks]:
    """Over which ranks the outputs of the matrix that makes the queries are sharded."""
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        return set()
    matrices = [(name, parameter) for name, parameter in module.named_parameters() if parameter.ndim == 2]
    of_queries = [one for one in matrices if not _QUERIES.isdisjoint(one[0].split("."))]
    return {spread.ranks for _, matrix in of_queries or matrices for spread in _spreads(matrix) if spread.dim == 0}


def _spreads(parameter: Any) -> Iterator[Spread]:
    from torch.distributed.tensor import DTensor  # here, since importing it takes as long as torch

    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if mesh.size(axis) > 1:
            yield Spread(tuple(dist.get_process_group_ranks(mesh.get_group(axis))), getattr(placement, "dim", None))


def _data_parallel(model: nn.Module) -> list[set[int]]:
    """The sets of ranks over which FSDP2 or `replicate` share out the data of this rank."""
    from torch.distributed.fsdp import FSDPModule

    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one alone before torch 2.12
            found += [set(group.mesh_info.mesh.mesh.flatten().tolist()) for group in groups if group is not None]
    return found


def _ranks_of(tensor_parallel: Any) -> Ranks:
    from torch.distributed.device_mesh import DeviceMesh

    expected = 'a process group, or a DeviceMesh of one dimension such as mesh["tp"], with this process in it'
    if isinstance(tensor_parallel, DeviceMesh):
        if tensor_parallel.ndim != 1:
            raise ArgumentError("tensor_parallel", f"a DeviceMesh of {tensor_parallel.ndim} dimensions", expected)
        tensor_parallel = tensor_parallel.get_group()
    if not isinstance(tensor_parallel, dist.ProcessGroup):
        raise ArgumentError("tensor_parallel", type(tensor_parallel).__name__, expected)
    ranks = tuple(dist.get_process_group_ranks(tensor_parallel))
    if dist.get_rank() not in ranks:
        raise ArgumentError("tensor_parallel", f"a group of ranks {list(ranks)}, without {dist.get_rank()}", expected)
    return ranks
