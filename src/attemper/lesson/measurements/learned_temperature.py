"""A factor that learns: whether it finds the temperature that made the data, for all heads or for each, and SSMax's slope."""

import inspect
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attemper.lesson.figures import Figure, Measured, averaged, estimates, exact, over_seeds, within_factor
from attemper.ops import attention
from attemper.ops.attention import row_stats
from attemper.scales import Learned, LogLength

_HEADS, _WIDTH = 4, 32
_TARGETS = (0.5, 1.0, 2.0, 4.0)
_LENGTHS = (64, 256, 1024, 4096)
_SLOPE = 0.43  # figure 1 of SSMax's paper


@dataclass(frozen=True, kw_only=True)
class LearnedTemperature(Measured):
    """Figures: what SDPA makes of a tensor; factors found; the error that is left; weight of a key as n grows."""

    sdpa_takes_tensor: Figure
    gradient_error: Figure
    found_sharpest: Figure
    found_flattest: Figure
    error_shared: Figure
    error_per_head: Figure
    spread_of_heads_at_start: Figure
    needle_fixed_64: Figure
    needle_fixed_4096: Figure
    needle_loglength_64: Figure
    needle_loglength_4096: Figure


def measure(seed: int) -> LearnedTemperature:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 8)
    points = averaged(samples, {"fixed": "needle_fixed_{}", "loglength": "needle_loglength_{}"}, _LENGTHS)
    figures = estimates(
        samples,
        found_sharpest=".2f",
        found_flattest=".2f",
        error_shared=".2f",
        error_per_head=".1e",
        spread_of_heads_at_start=".3f",
        needle_fixed_64=".3f",
        needle_fixed_4096=".4f",
        needle_loglength_64=".3f",
        needle_loglength_4096=".3f",
    )
    # The largest of what rounding makes, in float64, against a difference quotient: a matter of powers of ten.
    error = within_factor(max(samples["gradient_error"]), 100, ".0e")
    return LearnedTemperature(points=points, sdpa_takes_tensor=exact(_sdpa_takes_tensor()), gradient_error=error, **figures)


def _sdpa_takes_tensor() -> int:
    """1 if PyTorch's attention gives a tensor's scale a gradient, else 0."""
    assert inspect.isbuiltin(F.scaled_dot_product_attention)
    query = torch.ones(1, 2, 4)
    scale = torch.tensor(0.5, requires_grad=True)
    try:
        output = F.scaled_dot_product_attention(query, query, query, scale=scale)
    except (TypeError, ValueError, RuntimeError):
        return 0
    return int(output.requires_grad)


def _once(_seed: int) -> dict[str, float]:
    query, key, value = torch.randn(3, _HEADS, 64, _WIDTH)
    with torch.no_grad():
        wanted = attention(query, key, value, scale=torch.tensor(_TARGETS) * _WIDTH**-0.5)
    found = {}
    for name, heads in (("shared", None), ("per_head", _HEADS)):
        rule, error = _fitted(heads, query, key, value, wanted)
        found[f"error_{name}"] = error
        if heads:
            factors = rule.log_factor.detach().exp()
            found |= {"found_flattest": factors[0].item(), "found_sharpest": factors[-1].item()}
    spreads = row_stats(query, key).var.mean(-1).sqrt()
    found["spread_of_heads_at_start"] = (spreads.std() / spreads.mean()).item()
    found["gradient_error"] = _gradient_error(query.double(), key.double(), value.double())
    for n in _LENGTHS:
        # One key stands out by 3 standard deviations in the direction of the query; the others are noise.
        needle = torch.cat([torch.full((1, 64, 1), 3.0), torch.randn(1, 64, n - 1)], dim=-1)
        found[f"needle_fixed_{n}"] = _weight(needle, 1.0)
        factor = LogLength(initial=_SLOPE, causal=False).slope.item() * math.log(n)
        found[f"needle_loglength_{n}"] = _weight(needle, factor)
    return found


def _fitted(heads: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, wanted: torch.Tensor):
    """The rule after gradient steps towards the wanted outputs, and the error that is left, relative to their size."""
    rule = Learned(heads)
    optimizer = torch.optim.Adam(rule.parameters(), lr=0.1)
    for _ in range(120):
        optimizer.zero_grad()
        loss = (attention(query, key, value, scale=rule) - wanted).square().mean() / wanted.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.97
    return rule, loss.item() ** 0.5


def _gradient_error(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """The scale's gradient against a central difference, relative."""
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(value)
    (attention(query, key, value, scale=scale) * weights).sum().backward()
    step = 1e-5
    ends = [(attention(query, key, value, scale=0.3 + side * step) * weights).sum().item() for side in (1, -1)]
    difference = (ends[0] - ends[1]) / (2 * step)
    assert scale.grad is not None
    return abs(scale.grad.item() / difference - 1)


def _weight(logits: torch.Tensor, factor: float) -> float:
    return torch.softmax(logits * factor, dim=-1)[..., 0].mean().item()
