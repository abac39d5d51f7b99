"""The figures of a head as a page shows them: name, definition, how to write it, and which colours a map of it takes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.stats import HeadStats

_DECADES = 30.0  # a largest value this many times the smallest one is shown on a logarithmic scale
_SYMLOG = 100.0  # so is one this large where others are zero or negative


@dataclass(frozen=True)
class Figure:
    """One figure of a head.

    Attributes:
        key: name in the page's data; label, definition: what a reader sees.
        form: how a value is written: "number" (five digits), "fixed" (a share to four places), "percent", "times" or "count".
        read: [heads] from a record.
        strong: which end of the scale a map paints in the strong colour, "high" or "low": that nearer to trouble; empty: no map.
        share: whether the scale is always 0 to 1, so that maps of two models compare.
    """

    key: str
    label: str
    definition: str
    form: str
    read: Callable[[HeadStats], Tensor]
    strong: str = ""
    share: bool = False


FIGURES: tuple[Figure, ...] = (
    Figure(
        "max", "Largest logit", "of all rows; above 100 training tends to diverge and 16-bit logits become coarse", "number",
        lambda stats: stats.max, "high",
    ),
    Figure(
        "centred_max", "Largest logit − mean", "max − mean of a row, the largest; the softmax ignores what a whole row shares",
        "number", lambda stats: stats.centred_max, "high",
    ),
    Figure("product_absmax", "Largest |q·k|", "before the scale", "number", lambda stats: stats.product_absmax, "high"),
    Figure(
        "headroom_float16", "fp16 room", "65504 / largest |q·k|; below 1× the product overflows float16", "times",
        lambda stats: stats.headroom(torch.float16), "low",
    ),
    Figure(
        "mean_normalized_entropy", "Normalized entropy", "mean of H / ln(visible keys): 0 is one key, 1 is uniform", "fixed",
        lambda stats: stats.mean_normalized_entropy, "low", share=True,
    ),
    Figure(
        "mean_gain", "Gradient gain", "mean of 1 − Σp², the trace of the softmax's Jacobian; 0 passes no gradient", "fixed",
        lambda stats: stats.mean_gain, "low", share=True,
    ),
    Figure(
        "mean_peak", "Peak", "mean of a row's largest weight", "fixed", lambda stats: stats.mean_peak, "high", share=True,
    ),
    Figure(
        "saturated_share", "Saturated rows", "share of rows whose largest weight is above 0.99", "percent",
        lambda stats: stats.saturated_share, "high", share=True,
    ),
    Figure("min", "Smallest logit", "of all rows", "number", lambda stats: stats.min),
    Figure(
        "mean_centred_max", "Mean of logit − mean", "max − mean of a row, averaged", "number",
        lambda stats: stats.mean_centred_max,
    ),
    Figure("mean_entropy", "Entropy", "mean of −Σ p ln p, in nats", "number", lambda stats: stats.mean_entropy),
    Figure(
        "mean_jacobian_norm", "Jacobian norm", "mean Frobenius norm of the softmax's Jacobian", "number",
        lambda stats: stats.mean_jacobian_norm,
    ),
    Figure("rows", "Rows", "queries with a visible key, padding left out", "count", lambda stats: stats.rows),
    Figure("empty_rows", "Empty rows", "real queries that no key is visible to", "count", lambda stats: stats.empty_rows, "high"),
    Figure(
        "nonfinite_rows", "Rows not finite", "with a NaN or an infinity; left out of every mean", "count",
        lambda stats: stats.nonfinite_rows, "high",
    ),
)  # fmt: skip

HISTOGRAMS: tuple[tuple[str, str], ...] = (
    ("max", "Largest logit of a row"),
    ("centred_max", "Largest logit − mean of a row"),
    ("normalized_entropy", "Normalized entropy of a row"),
    ("peak", "Largest weight of a row"),
)
SHARES = ("normalized_entropy", "peak")  # those between 0 and 1


@dataclass(frozen=True)
class Scale:
    """A colour scale: "linear", "log" or "symlog" over [low, high]."""

    kind: str
    low: float
    high: float


def mapped(stats: Sequence[HeadStats]) -> list[tuple[Figure, Scale]]:
    """The figures worth a map, with their scales. Of counts, which should be zero, only those that are not."""
    shown = []
    for figure in FIGURES:
        if not figure.strong:
            continue
        values = [value for each in stats for value in figure.read(each).double().tolist()]
        if figure.form != "count" or any(values):
            shown.append((figure, Scale("linear", 0.0, 1.0) if figure.share else scale_of(values)))
    return shown


def scale_of(values: Sequence[float]) -> Scale:
    """A scale over the finite values: logarithmic where they span decades, and never of no width."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Scale("linear", 0.0, 1.0)
    low, high = min(finite), max(finite)
    if low == high:
        return Scale("linear", low - abs(low) / 10, high + abs(high) / 10) if low else Scale("linear", 0.0, 1.0)
    if low > 0:
        return Scale("log" if high > _DECADES * low else "linear", low, high)
    return Scale("symlog" if max(high, -low) > _SYMLOG else "linear", low, high)
