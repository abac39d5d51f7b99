"""How the spread of q·k grows with d: as √d where q and k are independent, as d where they are aligned."""

from dataclasses import dataclass

import torch

from attemper.lesson.figures import Figure, Measured, averaged, estimates, over_seeds
from attemper.ops.attention import row_stats
from attemper.scales import Constant, InverseSqrt

_KEYS = 256
_ALIGNMENT = 0.5  # correlation of a query with its own key
_WIDTHS = (4, 16, 64, 256)


@dataclass(frozen=True, kw_only=True)
class WhySqrtD(Measured):
    """Figures: variance of u = q·k and of the logit u/√d by d; q·k and logit of an aligned pair; what a softmax makes of them."""

    product_variance_16: Figure
    product_variance_64: Figure
    product_variance_256: Figure
    uniform_variance_64: Figure
    scaled_variance_16: Figure
    scaled_variance_256: Figure
    aligned_product_16: Figure
    aligned_product_256: Figure
    aligned_logit_256: Figure
    entropy_unscaled_64: Figure
    entropy_scaled_64: Figure


def measure(seed: int) -> WhySqrtD:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 12)
    series = {"independent": "product_std_{}", "aligned": "aligned_product_{}", "scaled": "scaled_std_{}"}
    points = averaged(samples, series, _WIDTHS)
    figures = estimates(
        samples,
        product_variance_16=".1f",
        product_variance_64=".1f",
        product_variance_256=".0f",
        uniform_variance_64=".1f",
        scaled_variance_16=".3f",
        scaled_variance_256=".3f",
        aligned_product_16=".2f",
        aligned_product_256=".1f",
        aligned_logit_256=".2f",
        entropy_unscaled_64=".2f",
        entropy_scaled_64=".2f",
    )
    return WhySqrtD(points=points, **figures)


def _once(_seed: int) -> dict[str, float]:
    found = {}
    for d in _WIDTHS:
        query, key = torch.randn(2, 1, _KEYS, d)
        rows = row_stats(query, key, scale=Constant(1.0))
        found[f"product_variance_{d}"] = _variance(rows.var, rows.mean)
        found[f"product_std_{d}"] = found[f"product_variance_{d}"] ** 0.5
        scaled = row_stats(query, key, scale=InverseSqrt())
        found[f"scaled_variance_{d}"] = _variance(scaled.var, scaled.mean)
        found[f"scaled_std_{d}"] = found[f"scaled_variance_{d}"] ** 0.5
        found[f"entropy_unscaled_{d}"] = rows.normalized_entropy().mean().item()
        found[f"entropy_scaled_{d}"] = scaled.normalized_entropy().mean().item()
        own = _ALIGNMENT * key + (1 - _ALIGNMENT**2) ** 0.5 * query
        found[f"aligned_product_{d}"] = (own * key).sum(-1).mean().item()
        found[f"aligned_logit_{d}"] = found[f"aligned_product_{d}"] * d**-0.5
    flat = (torch.rand(2, 1, _KEYS, 64) * 2 - 1) * 3**0.5  # of variance 1, and nowhere near a normal distribution
    rows = row_stats(flat[0], flat[1], scale=Constant(1.0))
    found["uniform_variance_64"] = _variance(rows.var, rows.mean)
    return found


def _variance(var: torch.Tensor, mean: torch.Tensor) -> float:
    """Second moment about 0 of all logits, from the records of their rows: q·k has mean 0."""
    return (var + mean.square()).mean().item()
