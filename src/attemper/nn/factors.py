"""The factor on the products of one group of heads, from whatever a module was given as its scale."""

from typing import Any

import torch
from torch import Tensor

from attemper.nn.heads import HeadGroup, of_heads
from attemper.scales import LogitShape


def factor_of(
    scale: Any, group: HeadGroup, *, heads: int, queries: int, keys: int, offset: int, device: torch.device
) -> float | Tensor | None:
    """What `attention` takes as `scale` for these heads.

    Args:
        scale: None, a number, a tensor for all heads of the module ([heads], or broadcastable to [batch, heads, queries]), or a
            rule, which is asked with the group's own width.
        heads: of the whole module.
        device: of the products.
    """
    if hasattr(scale, "factor"):
        scale = scale.factor(LogitShape(group.width, heads, queries, keys, offset, device=device))
    if not isinstance(scale, Tensor) or scale.ndim == 0:
        return scale
    return of_heads(scale, group, heads, 0 if scale.ndim == 1 else -2)
