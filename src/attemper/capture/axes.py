"""Where the axes of a product go while code reshapes, permutes and broadcasts it.

Each axis of the product that is longer than 1 has a number. A dimension of a later tensor is a run of such axes: `view` joins and
splits them, `permute` moves them. So whatever a model adds to its logits, in whatever shape, can be laid over the axes of the
product afterwards, without a copy and without looking at a number on the device. Axes of length 1 are left out: they say nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

Group = tuple[int, ...]


@dataclass(frozen=True)
class Axes:
    """The dimensions of one tensor as runs of numbered axes.

    Attributes:
        groups: for each dimension the axes that it runs over, the slowest first; () where it has length 1.
        sizes: length of every axis ever numbered; parts: what an axis was split into.
    """

    groups: tuple[Group, ...]
    sizes: dict[int, int]
    parts: dict[int, Group]

    def leaves(self, group: Sequence[int]) -> Group:
        """The axes of a run as they are now, after later splits."""
        found: list[int] = []
        for axis in group:
            found += self.leaves(self.parts[axis]) if axis in self.parts else (axis,)
        return tuple(found)

    def size(self, group: Sequence[int]) -> int:
        """How many places a run of axes has."""
        return math.prod(self.sizes[axis] for axis in group)

    def permuted(self, order: Sequence[int]) -> "Axes":
        """The same with the dimensions in another order."""
        return replace(self, groups=tuple(self.groups[place] for place in order))

    def split(self, axis: int, inner: int) -> "Axes":
        """The same with one axis as two, the faster one `inner` long."""
        pair = (len(self.sizes), len(self.sizes) + 1)
        sizes = self.sizes | dict(zip(pair, (self.sizes[axis] // inner, inner), strict=True))
        axes = Axes((), sizes, self.parts | {axis: pair})
        return replace(axes, groups=tuple(axes.leaves(group) for group in self.groups))

    def reshaped(self, shape: Sequence[int]) -> "Axes | None":
        """The same numbers in their order under another shape; None where a dimension would hold a broken piece of an axis."""
        axes, left, groups = self, [axis for group in self.groups for axis in group][::-1], []
        for length in shape:
            group: list[int] = []
            while length != 1:
                if not left or length == 0:
                    return None
                axis = left.pop()
                size = axes.sizes[axis]
                if max(size, length) % min(size, length):
                    return None
                if size > length:
                    axes = axes.split(axis, size // length)
                    axis, rest = axes.parts[axis]
                    left.append(rest)
                group.append(axis)
                length //= axes.sizes[axis]
            groups.append(tuple(group))
        return None if left else replace(axes, groups=tuple(groups))

    def widened(self, shape: Sequence[int]) -> "Axes | None":
        """After broadcasting to a larger shape: a dimension that was 1 long gets an axis of its own."""
        if len(shape) < len(self.groups):
            return None
        groups, sizes = [(), *[()] * (len(shape) - len(self.groups) - 1), *self.groups][-len(shape) :], self.sizes
        for place, length in enumerate(shape):
            if length == self.size(groups[place]):
                continue
            if groups[place]:
                return None
            groups[place] = (len(sizes),)
            sizes = sizes | {len(sizes): length}
        return Axes(tuple(groups), sizes, self.parts)

    def laid_out(self, tensor: Tensor, groups: Sequence[Group], order: Sequence[int]) -> Tensor:
        """A tensor that broadcasts to dimensions `groups`, with one dimension for each axis of `order` (1 where it lacks it)."""
        leaves: list[int] = []
        for length, group in zip(tensor.shape, groups[len(groups) - tensor.ndim :], strict=True):
            leaves += self.leaves(group) if length != 1 else ()
        tensor = tensor.reshape([self.sizes[axis] for axis in leaves])
        tensor = tensor.permute([leaves.index(axis) for axis in order if axis in leaves])
        return tensor.reshape([self.sizes[axis] if axis in leaves else 1 for axis in order])

    def folded(self, tensor: Tensor, runs: Sequence[Group]) -> Tensor:
        """One dimension for each axis of the runs → one for each run; a run in which nothing varies stays 1 long."""
        whole: list[int] = []
        for run in runs:
            own = tensor.shape[len(whole) : len(whole) + len(run)]
            whole += [self.sizes[axis] if max(own, default=1) > 1 else 1 for axis in run]
        tensor, lengths, at = tensor.expand(whole), [], 0
        for run in runs:
            lengths.append(math.prod(whole[at : at + len(run)]))
            at += len(run)
        return tensor.reshape(lengths)
