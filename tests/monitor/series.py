"""Records of a run made by hand: real statistics of logits that are as sharp as a test wants them."""

import functools
import math
from collections.abc import Sequence

import torch

from attemper.monitor import LayerRecord, StepRecord, WeightNorms
from attemper.stats import HeadStats, RowStats

KEYS = 11


@functools.cache
def stats(sharpness: tuple[float, ...], nonfinite: tuple[int, ...] = ()) -> HeadStats:
    """Heads whose rows have one key that stands `sharpness` above ten others; `nonfinite`: heads with one NaN."""
    logits = torch.zeros(1, len(sharpness), 7, KEYS, dtype=torch.float64)
    logits[..., 3] = torch.tensor(sharpness, dtype=torch.float64).unsqueeze(-1)
    for head in nonfinite:
        logits[0, head, 2, 5] = math.nan
    return HeadStats.from_rows(RowStats.from_logits(logits))


def layer(
    maxima: Sequence[float],
    *,
    name: str = "layers.0.attention",
    call: int = 0,
    sharpness: float | Sequence[float] = 1.0,
    nonfinite: Sequence[int] = (),
    norms: tuple[float, float, float] | None = None,
) -> LayerRecord:
    """A layer with these largest |scale·q·k|, one a head."""
    each = (sharpness,) * len(maxima) if isinstance(sharpness, float | int) else tuple(sharpness)
    found = None if norms is None else WeightNorms(*norms)
    return LayerRecord(name, call, stats(each, tuple(nonfinite)), torch.tensor(maxima, dtype=torch.float64), found)


def record(step: int, *layers: LayerRecord, **scalars: float) -> StepRecord:
    """One logged step."""
    return StepRecord(step, 1e9 + step, layers, scalars=scalars)
