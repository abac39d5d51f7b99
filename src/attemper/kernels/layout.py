"""How a kernel lays out what it returns: as its inputs are; who takes it apart as they were put together need not copy it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def beside_heads(like: Tensor) -> bool:
    """Whether the heads of a row lie beside one another, as a projection leaves them: [batch, rows, heads, width] in memory."""
    return bool(like.stride(1) < like.stride(2))


def laid_out(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Empty, of a shape [..., heads, rows, width], without gaps, the heads beside one another where those of `like` are."""
    if not beside_heads(like):
        return like.new_empty(*shape, dtype=dtype)
    # Not a view of another tensor, as a transposed one would be: autograd refuses to change such a result in place.
    return like.new_empty_strided(shape, strides_beside(shape), dtype=dtype)


def strides_beside(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor [..., heads, rows, width] without gaps in which the heads of a row lie beside one another."""
    *parts, heads, rows, width = shape
    outer, step = [], heads * rows * width
    for size in reversed(parts):
        outer.append(step)
        step = step * size
    return (*reversed(outer), width, heads * width, 1)
