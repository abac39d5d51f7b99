"""What a run's page draws: curves of layers and heads, thinned so that a page stays small and no extreme is lost.

Steps fall into buckets of as many logged steps each. Of a bucket each curve keeps its smallest and its largest number, in the
order in which they came, at two places within the bucket that all curves share. A run with few steps keeps all of them.
"""

import base64
import json
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attemper.monitor.records import BY_NAME
from attemper.report.page.figures import Scale, scale_of
from attemper.report.runs.view import LayerCurves, RunView

_LAYER_NUMBERS, _HEAD_NUMBERS = 60_000, 240_000  # how many a page may hold, of all figures
_MOST, _FEWEST = 512, 16  # points of one curve
_DIGITS = 3  # of a curve: a thousandth of its height is less than a pixel
_NAN = -sys.float_info.max  # a largest number where all are NaN, until it is written: as low as the −inf that it was


@dataclass(frozen=True)
class Shown:
    """A figure as the page shows it; the attributes are those of `attemper.report.page.figures.Figure`."""

    key: str
    label: str
    definition: str
    form: str
    strong: str
    share: bool = False


FIGURES: tuple[Shown, ...] = (
    Shown(
        "max_scaled_product", "Largest |scale·q·k|", "before softcap, bias and mask; 1e3 hurts training, 1e4 ends it", "number",
        "high",
    ),
    Shown("max_logit", "Largest logit", "as it enters the softmax, with softcap and bias", "number", "high"),
    Shown(
        "normalized_entropy", "Normalized entropy", "mean of H / ln(visible keys): 0 is one key, 1 is uniform", "fixed", "low",
        True,
    ),
    Shown(
        "gain", "Gradient gain", "mean of 1 − Σp², the trace of the softmax's Jacobian; 0 passes no gradient", "fixed", "low",
        True,
    ),
    Shown("saturated_share", "Saturated rows", "share of rows whose largest weight is above 0.99", "percent", "high", True),
)  # fmt: skip


@dataclass(frozen=True)
class Thinning:
    """Which steps a curve shows.

    Attributes:
        places: of its points, indices into the logged steps: two of each bucket, or all. size: steps in a bucket, 1 for all.
    """

    places: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, steps: int, points: int) -> "Thinning":
        """Into at most so many points (an even number of them, where steps are left out)."""
        if steps <= points:
            return cls(tuple(range(steps)), 1)
        size = math.ceil(steps / (points // 2))
        places = []
        for first in range(0, steps, size):
            last = min(first + size, steps) - 1
            quarter = (last - first) // 4
            places += [first + quarter, last - quarter]
        return cls(tuple(places), size)

    def apply(self, curves: Tensor) -> Tensor:
        """[steps, curves] → [points, curves]."""
        if self.size == 1:
            return curves
        missing = -len(curves) % self.size
        padded = torch.cat([curves, curves[-1:].expand(missing, -1)]).unflatten(0, (-1, self.size))
        nothing = padded.isnan()
        low, at_low = torch.where(nothing, math.inf, padded).min(1)
        high, at_high = torch.where(nothing, -math.inf, padded).max(1)
        empty = nothing.all(1)
        first, second = torch.where(at_low <= at_high, low, high), torch.where(at_low <= at_high, high, low)
        return torch.stack([first.masked_fill(empty, math.nan), second.masked_fill(empty, math.nan)], 1).flatten(0, 1)


def run_data(view: RunView, labels: Sequence[str]) -> dict[str, Any]:
    """What the page reads when it opens: which steps curves show, scalars, and the heads at the last step.

    Args:
        labels: a short name for each layer.
    """
    layers = [_with_nan(each) for each in view.layers]
    fine, coarse = layer_thinning(view), head_thinning(view)
    return {
        "figures": [{name: getattr(shown, name) for name in ("key", "label", "definition", "form")} for shown in FIGURES],
        "maps": [_map(shown, view) for shown in FIGURES],
        "steps": [view.steps[place] for place in fine.places],
        "headSteps": [view.steps[place] for place in coarse.places],
        "scalars": {name: _numbers(fine.apply(values.unsqueeze(1))[:, 0]) for name, values in view.scalars.items()},
        "layers": [
            {
                "label": label,
                "title": layer.name or "the model",
                "heads": layer.heads,
                "values": {shown.key: _numbers(layer.figures[shown.key][-1], 5) for shown in FIGURES},
            }
            for layer, label in zip(layers, labels, strict=True)
        ],
    }


def layer_thinning(view: RunView) -> Thinning:
    """How the curves of layers are thinned."""
    return _thinning(view, _LAYER_NUMBERS // max(1, len(view.layers) * len(FIGURES)))


def head_thinning(view: RunView) -> Thinning:
    """How the curves of heads are thinned."""
    return _thinning(view, _HEAD_NUMBERS // max(1, sum(each.heads for each in view.layers) * len(FIGURES)))


def layers_data(view: RunView) -> str:
    """For each figure a curve for each layer, that of its worst head: JSON, deflated, in base 64."""
    thinning = layer_thinning(view)
    layers = [_with_nan(each) for each in view.layers]
    worst = {shown.key: torch.stack([each.worst(shown.key)[0] for each in layers], 1) for shown in FIGURES}
    return _packed({key: _columns(thinning.apply(values)) for key, values in worst.items()})


def heads_data(layer: LayerCurves, thinning: Thinning) -> str:
    """The curves of one layer's heads, for each figure a list for each head, packed in the same way."""
    figures = _with_nan(layer).figures
    return _packed({shown.key: _columns(thinning.apply(figures[shown.key])) for shown in FIGURES})


def _with_nan(layer: LayerCurves) -> LayerCurves:
    """The same, where the largest of NaN alone is told from the largest of nothing."""
    largest = {
        name: torch.where(layer.all_nan() & (layer.figures[name] == -math.inf), _NAN, layer.figures[name])
        for name in ("max_scaled_product", "max_logit")
    }
    return replace(layer, figures=layer.figures | largest)


def _packed(curves: dict[str, list[list[Any]]]) -> str:
    text = json.dumps(curves, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _thinning(view: RunView, points: int) -> Thinning:
    return Thinning.of(len(view.steps), max(_FEWEST, min(_MOST, points) // 2 * 2))


def _map(shown: Shown, view: RunView) -> dict[str, Any]:
    """The colours of a figure: one scale over the whole run, so that steps compare."""
    scale = Scale("linear", 0.0, 1.0)
    if not shown.share:
        ends = [value for each in view.layers for value in _ends(each.figures[shown.key])]
        scale = scale_of(ends)
    return {
        "key": shown.key, "kind": scale.kind, "low": scale.low, "high": scale.high, "reverse": shown.strong == "low",
        "worst": BY_NAME[shown.key].worst,
    }  # fmt: skip


def _ends(values: Tensor) -> list[float]:
    known = values[values.isfinite()]
    return [float(known.min()), float(known.max())] if len(known) else []


def _columns(values: Tensor) -> list[list[Any]]:
    return [_numbers(column) for column in values.mT]


def _numbers(values: Tensor, digits: int = _DIGITS) -> list[Any]:
    """Rounded to what is shown; "inf", "-inf" and "nan" as strings, no number as null."""
    return [_short(value, digits) for value in values.tolist()]


def _short(value: float, digits: int) -> Any:
    if math.isnan(value):
        return None
    if value == _NAN:
        return "nan"
    if math.isinf(value):
        return str(value)
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short
