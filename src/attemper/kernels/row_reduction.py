"""`HeadStats.reduce` in the extension: one pass over the rows, where torch's operations make some eighty.

What it must hold: counts, extremes and histograms are those of the definition, but where a peak lies at an edge of a bin, as two
exponentials may; sums differ by their rounding.
"""

import struct

import torch
from torch import Tensor

from attemper.kernels import cpu
from attemper.stats import HISTOGRAM_EDGES, HeadStats, RowsByHead, cells_of

_RECORD = struct.Struct("=28q")  # the fields of Reduction in csrc/heads.h
_CODES = {torch.float32: 0, torch.float64: 1}


def reduced(of_heads: RowsByHead) -> tuple[HeadStats, Tensor] | None:
    """What `HeadStats.reduce` gives, and float64 [heads], the largest |q·k|; None of rows that the extension does not take."""
    rows, real = of_heads
    lse, entropy, rest = rows.lse, rows.entropy, rows.rest
    if not cpu.available() or torch._C._are_functorch_transforms_active():  # under which new tensors have no memory
        return None
    if cpu.refusal((lse, entropy, rest, real)) or not (real is None or real.dtype is torch.bool):
        return None
    if not lse.dtype is entropy.dtype is rest.dtype or lse.dtype not in _CODES:
        return None
    if not lse.shape == entropy.shape == rest.shape[1:]:
        return None
    lse, entropy, rest = (each if each.stride(-1) == 1 else each.contiguous() for each in (lse, entropy, rest))
    real = None if real is None else real.expand(lse.shape).contiguous()
    heads, count = lse.shape
    counts = lse.new_empty(5, heads, dtype=torch.int64)
    extremes, sums = lse.new_empty(5, heads, dtype=torch.float64), lse.new_empty(6, heads, dtype=torch.float64)
    products = lse.new_empty(heads, dtype=torch.float64)
    histograms = {name: lse.new_empty(heads, len(edges) + 1, dtype=torch.int64) for name, edges in HISTOGRAM_EDGES.items()}
    logits, shares = (cells_of(name, lse.dtype, lse.device) for name in ("max", "peak"))
    written = (counts, extremes, sums, products, *histograms.values())
    record = _RECORD.pack(
        *(_CODES[lse.dtype], heads, count, rows.sink, torch.get_num_threads()),
        *(lse.data_ptr(), entropy.data_ptr(), rest.data_ptr()),
        *(lse.stride(0), entropy.stride(0), rest.stride(0), rest.stride(1)),
        *((0, 0) if real is None else (real.data_ptr(), real.stride(0))),
        *(logits.below.data_ptr(), logits.edge.data_ptr(), histograms["max"].shape[1]),
        *(shares.below.data_ptr(), shares.edge.data_ptr(), histograms["peak"].shape[1]),
        *(each.data_ptr() for each in written),
    )
    cpu.reduce_rows(record)
    return HeadStats(counts, extremes, sums, histograms), products
