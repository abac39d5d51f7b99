"""The statistics of a layer as two matrices, one that adds up over ranks and one of which the maximum is taken, and back.

Both are float64 [rows, heads]. Counts ride along as float64, in which every whole number up to 2^53 is exact: a sum of them is
too, whatever its order.
"""

import math

import torch
from torch import Tensor

from attemper.monitor.records import WeightNorms
from attemper.stats import HISTOGRAM_EDGES, HeadStats

_COUNTS, _SUMS, _EXTREMES = 5, 6, 5  # rows of the parts of HeadStats
_NORMS = 3
_BINS = {name: len(edges) + 1 for name, edges in HISTOGRAM_EDGES.items()}

# One row more says on how many ranks the layer was seen: a layer without rows is not a layer that did not run.
ADDED_ROWS = _COUNTS + _SUMS + sum(_BINS.values()) + 1
LARGEST_ROWS = _EXTREMES + 1 + _NORMS


def added(stats: HeadStats) -> Tensor:
    """What adds up, float64 [ADDED_ROWS, heads] on the device of the statistics."""
    histograms = [stats.histograms[name].T for name in _BINS]
    return torch.cat([torch.ones_like(stats.sums[:1]), stats.sums, stats.counts, *histograms])


def largest(stats: HeadStats, scaled_max: Tensor, norms: Tensor | None) -> Tensor:
    """Of what the maximum is taken, float64 [LARGEST_ROWS, heads]; NaN, which no maximum over ranks agrees on, is left out.

    The norms of the projections, [3], ride along beside every head: ranks that know them know the same, and others have −inf.
    """
    if norms is None:
        norms = stats.extremes.new_full((_NORMS,), -math.inf)
    beside = norms.to(stats.extremes).unsqueeze(-1).expand(_NORMS, stats.heads)
    return without_nan(torch.cat([stats.extremes, scaled_max.unsqueeze(0), beside]))


def without_nan(maxima: Tensor, instead: float = -math.inf) -> Tensor:
    """The same, float64, with another number for NaN, on which ranks that take a maximum need not agree."""
    return torch.where(torch.isnan(maxima), instead, maxima).double()


def seen(added: Tensor) -> bool:
    """Whether any rank saw the layer; reads the host's memory."""
    return bool((added[0] > 0).any())


def unpacked(added: Tensor, largest: Tensor) -> tuple[HeadStats, Tensor, WeightNorms | None]:
    """The statistics, the largest |scale·q·k| of each head, and the norms where they are known, from the two matrices."""
    counts, *histograms = added[1 + _SUMS :].to(torch.int64).split([_COUNTS, *_BINS.values()])
    by_name = {name: part.T for name, part in zip(_BINS, histograms, strict=True)}
    stats = HeadStats(counts, largest[:_EXTREMES].clone(), added[1 : 1 + _SUMS].clone(), by_name)
    norms = largest[_EXTREMES + 1 :, 0].tolist() if stats.heads else [-math.inf]
    return stats, largest[_EXTREMES].clone(), None if -math.inf in norms else WeightNorms(*norms)
