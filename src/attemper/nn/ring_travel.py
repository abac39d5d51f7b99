"""Tensors that travel around a ring of ranks: each sends to the next one and receives from the one before."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from attemper.errors import ArgumentError


class Ring:
    """This rank's place among the ranks of a group, none but this process where torch.distributed is not initialised."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.size, self.rank = group, 1, 0
        if dist.is_available() and dist.is_initialized():
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
            if self.rank < 0:
                raise ArgumentError("group", "a process group without this process", "one that it is in, or None for all")

    def origin(self, step: int) -> int:
        """Whose tensors are here after so many steps, when every rank began with its own."""
        return (self.rank - step) % self.size

    def lengths(self, queries: int, keys: int, device: torch.device) -> list[tuple[int, int]]:
        """How many queries and keys each rank has; a collective, and the host waits for it."""
        if self.size == 1:
            return [(queries, keys)]
        own = torch.tensor([queries, keys], device=device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        return [(int(one[0]), int(one[1])) for one in found]

    def peer(self, step: int) -> int:
        """The global rank so many places on."""
        place = (self.rank + step) % self.size
        return place if self.group is None else dist.get_global_rank(self.group, place)


class Passing:
    """One step of the ring under way. Nothing may write to what is sent until `wait` returns."""

    def __init__(self, ring: Ring, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], tag: int) -> None:
        self._shapes = shapes
        first, sizes = tensors[0], [torch.Size(shape).numel() for shape in shapes]
        self._sizes = sizes
        # One message, of one number at least: a rank may hold no key.
        self._sent = torch.cat([*(tensor.flatten() for tensor in tensors), first.new_zeros(1)])
        if ring.size == 1:
            self._got, self._works = self._sent, []
            return
        self._got = first.new_empty(sum(sizes) + 1)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, ring.peer(1), ring.group, tag),
                dist.P2POp(dist.irecv, self._got, ring.peer(-1), ring.group, tag),
            ]
        )

    def wait(self) -> list[Tensor]:
        """What arrived, in the shapes that were asked for."""
        for work in self._works:
            work.wait()
        parts = self._got[:-1].split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
