"""Attention calls, reduced to their heads: what is kept of them until the step is logged.

What it must hold: nothing waits for the device; nothing of the size of q or k is kept; where the extension does not reduce them,
calls are reduced together, since the many small operations of a reduction take longer to begin than to end.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.capture import AttentionCall
from attemper.kernels import row_reduction
from attemper.ops import without_autocast
from attemper.stats import HeadStats, RowsByHead, RowStats

MOST_ROWS = 2**17  # of all heads, that wait to be reduced: 6 MiB in float32


class Measured(NamedTuple):
    """A call's heads: statistics, and float64 [heads], the largest |scale·q·k|; −inf without rows."""

    stats: HeadStats
    scaled_max: Tensor

    def merge(self, other: "Measured") -> "Measured":
        """Of the rows of both."""
        return Measured(self.stats.merge(other.stats), torch.maximum(self.scaled_max, other.scaled_max))


class Taken(NamedTuple):
    """A call's rows, not yet reduced.

    Attributes:
        scale: a number, or [heads].
        scaled_max: where the scale differs by row, the largest |scale·q·k| of each head, float64 [heads]; else None.
    """

    rows: RowsByHead
    scale: float | Tensor
    scaled_max: Tensor | None


def take(call: AttentionCall, row_stride: int) -> Taken:
    """The record of every so many rows of a call; of all of them where the call made it itself.

    Raises:
        AttemperError: the call cannot be measured.
    """
    mask = call.query_mask()
    rows = call.rows
    if rows is None:
        rows = call.row_stats(row_stride)
        mask = None if mask is None else mask[..., ::row_stride]
    else:
        row_stride = 1
    scale, scaled_max = call.scale, None
    if isinstance(scale, Tensor):
        scale = scale.detach().abs()
        if scale.ndim == 0:
            scale = scale.expand(rows.lse.shape[-2])
        elif scale.ndim > 1:
            scaled_max = _scaled_max(rows, mask, scale[..., ::row_stride] if scale.shape[-1] > 1 else scale)
    return Taken(RowsByHead.of(rows, mask), scale, scaled_max)


def measure(calls: Sequence[Taken]) -> list[Measured]:
    """Reduce calls to their heads."""
    found: dict[int, tuple[HeadStats, Tensor]] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, call in enumerate(calls):
        compiled = row_reduction.reduced(call.rows)
        if compiled is None:
            groups.setdefault(call.rows.likeness, []).append(place)
        else:
            found[place] = compiled
    for alike in groups.values():
        found |= zip(alike, _reduced_together([calls[place].rows for place in alike]), strict=True)
    return [
        Measured(found[place][0], _scaled(found[place][1], call.scale) if call.scaled_max is None else call.scaled_max)
        for place, call in enumerate(calls)
    ]


def _reduced_together(records: Sequence[RowsByHead]) -> Iterable[tuple[HeadStats, Tensor]]:
    """What `row_reduction.reduced` gives, of records that are alike."""
    with without_autocast(records[0].rows.lse.device):
        whole = RowsByHead.stack(records)
        products = whole.rows.product_absmax()
        if whole.real is not None:
            products = torch.where(whole.real, products, -torch.inf)
        largest, reduced = _largest(products), HeadStats.reduce(whole)
    heads = [record.heads for record in records]
    return zip(reduced.split(heads), largest.split(heads), strict=True)


def _scaled_max(rows: RowStats, mask: Tensor | None, scale: Tensor) -> Tensor:
    """Of a scale that broadcasts to [batch, heads, queries]."""
    products = rows.product_absmax()
    if mask is not None:
        products = torch.where(mask.unsqueeze(-2), products, -torch.inf)
    return _largest(_scaled(products, scale).movedim(-2, 0).flatten(1))


def _scaled(products: Tensor, scale: float | Tensor) -> Tensor:
    """Where a row is empty, −inf stays −inf also under a scale of 0."""
    return torch.where(products == -torch.inf, products, products * (scale if isinstance(scale, Tensor) else abs(scale)))


def _largest(by_head: Tensor) -> Tensor:
    """Of each head, in float64; −inf without rows."""
    if by_head.shape[1] == 0:
        return by_head.new_full(by_head.shape[:1], -torch.inf, dtype=torch.float64)
    return by_head.amax(-1).double()
