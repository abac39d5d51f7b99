"""1/d beside 1/√d: at the start, where q and k are independent, and where a query has found its key."""

from dataclasses import dataclass

import torch

from attemper.lesson.figures import Figure, Measured, averaged, estimates, over_seeds
from attemper.ops.attention import row_stats
from attemper.scales import Inverse, InverseSqrt

_KEYS = 512
_WIDTHS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class WhyNotD(Measured):
    """Figures: spread and entropy of independent logits at d = 128; logit and weight of the own key where q = k."""

    std_inverse_128: Figure
    std_sqrt_128: Figure
    entropy_inverse_128: Figure
    entropy_sqrt_128: Figure
    own_logit_inverse_16: Figure
    own_logit_inverse_512: Figure
    own_logit_sqrt_16: Figure
    own_logit_sqrt_512: Figure
    own_weight_inverse_512: Figure
    own_weight_sqrt_512: Figure


def measure(seed: int) -> WhyNotD:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 8)
    points = averaged(samples, {"sqrt": "own_weight_sqrt_{}", "inverse": "own_weight_inverse_{}"}, _WIDTHS)
    figures = estimates(
        samples,
        std_inverse_128=".4f",
        std_sqrt_128=".3f",
        entropy_inverse_128=".5f",
        entropy_sqrt_128=".3f",
        own_logit_inverse_16=".2f",
        own_logit_inverse_512=".3f",
        own_logit_sqrt_16=".2f",
        own_logit_sqrt_512=".2f",
        own_weight_inverse_512=".2g",
        own_weight_sqrt_512=".5f",
    )
    return WhyNotD(points=points, **figures)


def _once(_seed: int) -> dict[str, float]:
    found = {}
    for d in _WIDTHS:
        query, key = torch.randn(2, 1, _KEYS, d)
        own = key.square().sum(-1)
        for name, rule in (("sqrt", InverseSqrt()), ("inverse", Inverse())):
            rows = row_stats(query, key, scale=rule)
            found[f"std_{name}_{d}"] = (rows.var + rows.mean.square()).mean().sqrt().item()
            found[f"entropy_{name}_{d}"] = rows.normalized_entropy().mean().item()
            logits = own * (d**-0.5 if name == "sqrt" else 1 / d)
            found[f"own_logit_{name}_{d}"] = logits.mean().item()
            found[f"own_weight_{name}_{d}"] = torch.exp(logits - row_stats(key, key, scale=rule).lse).mean().item()
    return found
