"""What comes back through a softmax as its logits spread, and what that leaves for the query."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.lesson.figures import Figure, Measured, Point, estimates, over_seeds, within_factor
from attemper.ops import attention

_KEYS, _WIDTH = 256, 64
_SPREADS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class SoftmaxJacobian(Measured):
    """Figures by the standard deviation of the logits: entropy / ln n, gain, RMS of ∂L/∂z, median length of a row of it."""

    entropy_1: Figure
    entropy_4: Figure
    entropy_16: Figure
    entropy_64: Figure
    gain_1: Figure
    gain_4: Figure
    gain_16: Figure
    gain_64: Figure
    rms_1: Figure
    rms_4: Figure
    rms_16: Figure
    rms_64: Figure
    median_row_1: Figure
    median_row_4: Figure
    median_row_16: Figure
    median_row_64: Figure
    saturated_64: Figure
    query_gradient_scaled: Figure
    query_gradient_unscaled: Figure


def measure(seed: int) -> SoftmaxJacobian:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 12)
    mean = {name: sum(values) / len(values) for name, values in samples.items()}
    medians = {std: math.exp(mean[f"log_median_{std}"]) for std in _SPREADS}
    points = [Point(std, mean[f"gain_{std}"], "gain") for std in _SPREADS]
    points += [Point(std, mean[f"rms_{std}"], "rms") for std in _SPREADS]
    points += [Point(std, max(medians[std], 1e-7), "median") for std in _SPREADS]
    forms = {
        f"{name}_{std}": form for std in (1, 4, 16, 64) for name, form in (("entropy", ".3f"), ("gain", ".3f"), ("rms", ".3f"))
    }
    figures = estimates(samples, **forms, saturated_64=".2f", query_gradient_scaled=".3f", query_gradient_unscaled=".3f")
    # A median far out on a tail varies by factors: by at most these ones from seed to seed.
    for std, factor in ((1, 1.2), (4, 1.2), (16, 3.0), (64, 30.0)):
        figures[f"median_row_{std}"] = within_factor(medians[std], factor, ".2g" if std < 64 else ".0e")
    return SoftmaxJacobian(points=tuple(points), **figures)


def _once(_seed: int) -> dict[str, float]:
    query, key, value = torch.randn(3, 1, _KEYS, _WIDTH, dtype=torch.float64)
    outer = torch.randn(1, _KEYS, _WIDTH, dtype=torch.float64)
    found = {}
    for std in _SPREADS:
        logit_gradient, _, rows = _gradients(query, key, value, outer, std / _WIDTH**0.5)
        lengths = logit_gradient.norm(dim=-1)
        found |= {
            f"entropy_{std}": rows.normalized_entropy().mean().item(),
            f"gain_{std}": rows.gain().mean().item(),
            f"rms_{std}": logit_gradient.square().mean().sqrt().item(),
            f"log_median_{std}": math.log(max(lengths.median().item(), 1e-30)),
            f"saturated_{std}": rows.saturated().double().mean().item(),
        }
    for name, scale in (("scaled", _WIDTH**-0.5), ("unscaled", 1.0)):
        found[f"query_gradient_{name}"] = _gradients(query, key, value, outer, scale)[1].square().mean().sqrt().item()
    return found


def _gradients(query: Tensor, key: Tensor, value: Tensor, outer: Tensor, scale: float):
    # A mask of zeros is added to the logits, so that its gradient is theirs.
    zeros = torch.zeros(1, _KEYS, _KEYS, dtype=query.dtype, requires_grad=True)
    query = query.detach().requires_grad_()
    output, rows = attention(query, key, value, zeros, scale=scale, return_stats=True)
    logit_gradient, query_gradient = torch.autograd.grad(output, (zeros, query), outer)
    return logit_gradient, query_gradient, rows
