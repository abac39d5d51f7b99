"""One number a head: the factor is 1, and what is left is the shape of the distribution."""

import math
from dataclasses import dataclass

import torch

from attemper.lesson.figures import Figure, Measured, Point, estimates, exact, over_seeds
from attemper.ops.attention import row_stats
from attemper.scales import InverseSqrt
from attemper.scales.base import LogitShape

_KEYS = 1024
_WIDTHS = (1, 4, 64)
_EDGES = torch.linspace(-4, 4, 41)


@dataclass(frozen=True, kw_only=True)
class WidthOne(Measured):
    """Figures: the factor at d = 1; variance and kurtosis of u/√d; share of logits, and of normal numbers, beyond ±4; entropy."""

    factor: Figure
    variance_1: Figure
    variance_64: Figure
    kurtosis_1: Figure
    kurtosis_64: Figure
    beyond_four_1: Figure
    beyond_four_64: Figure
    beyond_four_normal: Figure
    entropy_1: Figure
    entropy_64: Figure


def measure(seed: int) -> WidthOne:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 8)
    width = (_EDGES[1] - _EDGES[0]).item()
    points = [
        Point(
            round(low.item() + width / 2, 3),
            max(sum(samples[f"bin_{d}_{number}"]) / len(samples["variance_1"]) / width, 1e-5),
            f"d{d}",
        )
        for d in _WIDTHS
        for number, low in enumerate(_EDGES[:-1])
    ]
    figures = estimates(
        samples,
        variance_1=".2f",
        variance_64=".2f",
        kurtosis_1=".1f",
        kurtosis_64=".2f",
        beyond_four_1=".1e",
        beyond_four_64=".1e",
        entropy_1=".3f",
        entropy_64=".3f",
    )
    return WidthOne(
        points=tuple(points),
        factor=exact(float(InverseSqrt().factor(LogitShape(1, 1, _KEYS, _KEYS))), ".0f"),
        beyond_four_normal=exact(math.erfc(4 / math.sqrt(2)), ".1e"),
        **figures,
    )


def _once(_seed: int) -> dict[str, float]:
    found = {}
    for d in _WIDTHS:
        # Each product once, not a matrix of them, whose entries share queries and keys.
        query, key = torch.randn(2, 400_000, d) if d < 64 else torch.randn(2, 100_000, d)
        logits = (query * key).sum(-1) * d**-0.5
        second = logits.square().mean()
        found[f"variance_{d}"] = second.item()
        found[f"kurtosis_{d}"] = (logits.pow(4).mean() / second.square()).item()
        found[f"beyond_four_{d}"] = (logits.abs() > 4).float().mean().item()
        shares = torch.histogram(logits, _EDGES)[0] / len(logits)
        found |= {f"bin_{d}_{number}": share.item() for number, share in enumerate(shares)}
        query, key = torch.randn(2, 1, _KEYS, d)
        found[f"entropy_{d}"] = row_stats(query, key).normalized_entropy().mean().item()
    return found
