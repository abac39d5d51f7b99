"""Histograms of figures of rows: edges that never move, and which bin each value lies in, exactly.

What it must hold:
- bin i holds values in [edge i − 1, edge i) to the last bit, whatever the dtype of the values;
- nothing waits for the device: no boolean index, no bincount; torch's default device has no say;
- it is cheap: a search among the edges takes seven times as long as two look-ups in a table.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

# Logits: eighths of an octave between 2^-4 and 2^17 on both sides of zero, so a quantile is known within 9 %.
_OCTAVES = torch.pow(2.0, torch.arange(-32, 137, dtype=torch.float64, device="cpu") / 8)
_LOGIT_EDGES = torch.cat([-_OCTAVES.flip(0), _OCTAVES.new_zeros(1), _OCTAVES])
# Shares: hundredths. Whole numbers divided, not a linspace, so that 0.99 is the double nearest to it.
_SHARE_EDGES = torch.arange(1, 100, dtype=torch.float64, device="cpu") / 100
HISTOGRAM_EDGES = {"max": _LOGIT_EDGES, "centred_max": _LOGIT_EDGES, "normalized_entropy": _SHARE_EDGES, "peak": _SHARE_EDGES}
SHARES = ("normalized_entropy", "peak")

_BITS = {torch.float32: (torch.int32, 12), torch.float64: (torch.int64, 15)}  # sign, exponent, three bits of the mantissa
_SHARE_CELLS = 128


def histogram(name: str, values: Tensor, taken: Tensor) -> Tensor:
    """How many values lie in each bin, int64 [heads, bins].

    Args:
        name: of the figure, as in `HISTOGRAM_EDGES`.
        values: [heads, rows], float32 or float64.
        taken: int64 [heads, rows], 1 where a value counts, else 0; there it may be NaN.
    """
    cells = _cells_of_shares(values) if name in SHARES else _cells_of_logits(values)
    bins = cells_of(name, values.dtype, values.device).bins(cells, values)
    counts = torch.zeros(values.shape[0], len(HISTOGRAM_EDGES[name]) + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(1, bins, taken)


def _cells_of_logits(values: Tensor) -> Tensor:
    """The cell in which each value lies; any of them for a NaN.

    Cells are eighths of an octave cut evenly, edges lie at 2^(k/8). Of both signs a cell has the end that is further from zero
    and not the other one (hence − 1), so none has two edges.
    """
    integer, size = _BITS[values.dtype]
    bits = (values + 0.0).view(integer) - 1  # + 0.0: the negative zero becomes the other one, whose cell is the last
    return (bits >> (8 * values.itemsize - size)) & (2**size - 1)


def _cells_of_shares(values: Tensor) -> Tensor:
    """The same over hundredths, of which a 128th has no two. Times 128 nothing rounds."""
    return (values * _SHARE_CELLS).nan_to_num_(nan=0.0).clamp_(0.0, _SHARE_CELLS - 1.0).to(torch.int32)


class Cells(NamedTuple):
    """A division of the numbers so fine that at most one edge lies within a cell.

    Attributes:
        below: int64 [cells], how many edges are at or below all of the cell.
        edge: [cells], the next one, rounded up to the dtype of the values; NaN where there is none.
    """

    below: Tensor
    edge: Tensor

    @staticmethod
    def beginning(least: Tensor, edges: Tensor, dtype: torch.dtype, device: torch.device) -> "Cells":
        """Cells by their least values, float64 [cells]."""
        rounded = edges.to(dtype)
        rounded = torch.where(rounded.double() < edges, torch.nextafter(rounded, torch.full_like(rounded, math.inf)), rounded)
        below = torch.bucketize(least, edges, right=True)
        following = torch.cat([rounded, rounded.new_full((1,), math.nan)])[below]
        return Cells(below.to(device), following.to(device))

    def bins(self, cells: Tensor, values: Tensor) -> Tensor:
        """How many edges are at or below each value, by the cell that it lies in."""
        flat = cells.flatten()  # one index into one dimension: three times as fast as any other way to look up
        reached = values >= self.edge.index_select(0, flat).view(values.shape)
        return self.below.index_select(0, flat).view(values.shape) + reached


def cells_of(name: str, dtype: torch.dtype, device: torch.device) -> Cells:
    """The cells in which values of a figure are looked up.

    Args:
        name: of the figure, as in `HISTOGRAM_EDGES`. dtype, device: of the values, float32 or float64.
    """
    return _share_cells(dtype, device) if name in SHARES else _logit_cells(dtype, device)


@functools.lru_cache(maxsize=32)
def _logit_cells(dtype: torch.dtype, device: torch.device) -> Cells:
    integer, size = _BITS[dtype]
    free = 8 * dtype.itemsize - size
    cells = torch.arange(2**size, dtype=torch.int64, device="cpu")
    negative = cells >= 2 ** (size - 1)
    first = (cells - negative * 2**size) << free
    least = first + torch.where(negative, 2**free, 1)
    # Beyond infinity there are cells of NaN.
    numbers = least.to(integer).view(dtype).double().nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return Cells.beginning(numbers, _LOGIT_EDGES, dtype, device)


@functools.lru_cache(maxsize=32)
def _share_cells(dtype: torch.dtype, device: torch.device) -> Cells:
    least = torch.arange(_SHARE_CELLS, dtype=torch.float64, device="cpu") / _SHARE_CELLS
    least[0] = -math.inf
    return Cells.beginning(least, _SHARE_EDGES, dtype, device)
