"""How a kernel lays out what it returns: as its inputs are; who takes it apart as they were put together need not copy it."""

import torch
from torch import Tensor


def beside_heads(like: Tensor) -> bool:
    """Whether the heads of a row lie beside one another, as a projection leaves them: [batch, rows, heads, width] in memory."""
    return bool(like.stride(1) < like.stride(2))


def laid_out(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Empty, of a shape [..., heads, rows, width], without gaps, the heads beside one another where those of `like` are."""
    *parts, heads, rows, width = shape
    if beside_heads(like):
        return like.new_empty(*parts, rows, heads, width, dtype=dtype).transpose(-3, -2)
    return like.new_empty(*shape, dtype=dtype)
