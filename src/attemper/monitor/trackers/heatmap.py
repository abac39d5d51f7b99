"""A figure of every head of every layer as a picture: a row a layer, a column a head, bright where the number is large."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.monitor.records import Figure, StepRecord
from attemper.monitor.trackers.summary import finite

# Nine points of viridis, which also reads in grey and for the colour-blind.
_COLOURS = torch.tensor(
    [
        [68, 1, 84],
        [71, 44, 122],
        [59, 81, 139],
        [44, 113, 142],
        [33, 144, 141],
        [39, 173, 129],
        [92, 200, 99],
        [170, 220, 50],
        [253, 231, 37],
    ],
    dtype=torch.float64,
)
_MISSING = torch.tensor([128.0, 128.0, 128.0], dtype=torch.float64)
_SHARES = frozenset({"normalized_entropy", "gain", "peak", "saturated_share"})  # between 0 and 1, and shown so
_SIDE, _SMALLEST, _LARGEST = 384, 4, 32  # pixels: of the picture, about, and of a cell


class Heatmap(NamedTuple):
    """A picture, uint8 [3, height, width], the numbers that its darkest and its brightest colour stand for, and pixels a cell."""

    image: Tensor
    low: float
    high: float
    cell: int


def heatmap(record: StepRecord, figure: Figure) -> Heatmap | None:
    """Draw one figure; what is not finite, and heads that a layer does not have, are grey. None without layers."""
    rows = [layer.figure(figure.name) for layer in record.layers]
    heads = max((len(row) for row in rows), default=0)
    if heads == 0:
        return None
    table = torch.stack([torch.nn.functional.pad(row, (0, heads - len(row)), value=math.nan) for row in rows])
    numbers = finite(table)
    low, high = 0.0, 1.0
    if figure.name not in _SHARES and len(numbers):
        low, high = float(numbers.min()), float(numbers.max())
    share = ((table - low) / (high - low if high > low else 1.0)).clamp(0.0, 1.0).nan_to_num(0.0)
    place = share * (len(_COLOURS) - 1)
    under = place.long().clamp(max=len(_COLOURS) - 2)
    between = (place - under).unsqueeze(-1)
    colours = _COLOURS[under] * (1 - between) + _COLOURS[under + 1] * between
    colours = torch.where(torch.isfinite(table).unsqueeze(-1), colours, _MISSING)
    cell = min(max(_SIDE // max(table.shape), _SMALLEST), _LARGEST)
    image = colours.round().to(torch.uint8).permute(2, 0, 1)
    return Heatmap(image.repeat_interleave(cell, 1).repeat_interleave(cell, 2), low, high, cell)
