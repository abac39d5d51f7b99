"""One attention call, reduced to its heads: what is kept of it until the step is logged.

Nothing here waits for the device, and nothing of the size of q or k is kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attemper.capture import AttentionCall
from attemper.stats import HeadStats, RowStats


class Measured(NamedTuple):
    """A call's heads: statistics, and float64 [heads], the largest |scale·q·k|; −inf without rows."""

    stats: HeadStats
    scaled_max: Tensor

    def merge(self, other: "Measured") -> "Measured":
        """Of the rows of both."""
        return Measured(self.stats.merge(other.stats), torch.maximum(self.scaled_max, other.scaled_max))


def measure(call: AttentionCall, row_stride: int) -> Measured:
    """Measure every so many rows of a call; all of them where the call made its record itself."""
    mask = call.query_mask()
    rows = call.rows
    if rows is None:
        rows = call.row_stats(row_stride)
        mask = None if mask is None else mask[..., ::row_stride]
    else:
        row_stride = 1
    return Measured(HeadStats.from_rows(rows, mask), _scaled_max(rows, mask, call.scale, row_stride))


def _scaled_max(rows: RowStats, mask: Tensor | None, scale: float | Tensor, row_stride: int) -> Tensor:
    """The scale is a number, or [heads], or broadcasts to [batch, heads, queries]."""
    products = rows.product_absmax()
    if mask is not None:
        products = torch.where(mask.unsqueeze(-2), products, -torch.inf)
    if isinstance(scale, Tensor):
        scale = scale.detach().abs()
        if scale.ndim == 1:
            scale = scale.unsqueeze(-1)
        elif scale.ndim > 1 and scale.shape[-1] > 1:
            scale = scale[..., ::row_stride]
        # Where a row is empty, −inf stays −inf also under a scale of 0.
        products = torch.where(products == -torch.inf, products, products * scale)
    by_head = products.movedim(-2, 0).flatten(1)
    if by_head.shape[1] == 0:
        return by_head.new_full(by_head.shape[:1], -torch.inf, dtype=torch.float64)
    largest = by_head.amax(-1).double()
    return largest if isinstance(scale, Tensor) else torch.where(largest == -torch.inf, largest, largest * abs(scale))
