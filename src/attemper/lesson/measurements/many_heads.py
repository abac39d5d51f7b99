"""Heads of different widths under one factor and under one each, and the factor that nn.MultiheadAttention applies."""

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from attemper.lesson.figures import Figure, Measured, averaged, estimates, exact, over_seeds
from attemper.ops.attention import row_stats
from attemper.scales import InverseSqrt

_KEYS = 256
_WIDTHS = (8, 16, 32, 64, 128)
_SHARED = 32


@dataclass(frozen=True, kw_only=True)
class ManyHeads(Measured):
    """Figures: spread of the logits at width 8, 32 and 128, under 1/√32 for all and under 1/√d each; torch's own module."""

    shared_8: Figure
    shared_32: Figure
    shared_128: Figure
    own_8: Figure
    own_128: Figure
    entropy_shared_8: Figure
    entropy_shared_128: Figure
    module_has_scale: Figure
    module_factor_times_root: Figure


def measure(seed: int) -> ManyHeads:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 12)
    points = averaged(samples, {"shared": "shared_{}", "own": "own_{}"}, _WIDTHS)
    figures = estimates(
        samples,
        shared_8=".2f",
        shared_32=".2f",
        shared_128=".2f",
        own_8=".2f",
        own_128=".2f",
        entropy_shared_8=".3f",
        entropy_shared_128=".3f",
    )
    return ManyHeads(
        points=points,
        module_has_scale=exact("scale" in inspect.signature(nn.MultiheadAttention).parameters),
        # A slope of exact products: the same for every seed, up to rounding.
        module_factor_times_root=exact(round(samples["module_factor"][0], 3), ".3f"),
        **figures,
    )


def _once(_seed: int) -> dict[str, float]:
    found = {"module_factor": _module_factor(48, 4)}
    for d in _WIDTHS:
        query, key = torch.randn(2, 1, _KEYS, d)
        for kind, scale in (("shared", _SHARED**-0.5), ("own", InverseSqrt())):
            rows = row_stats(query, key, scale=scale)
            found[f"{kind}_{d}"] = (rows.var + rows.mean.square()).mean().sqrt().item()
            found[f"entropy_{kind}_{d}"] = rows.normalized_entropy().mean().item()
    return found


def _module_factor(width: int, heads: int) -> float:
    """√(head width) times the slope of ln p on q·k in nn.MultiheadAttention: 1 where its factor is 1/√(head width)."""
    module = nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
    x = torch.randn(1, 32, width, dtype=torch.float64)
    with torch.no_grad():
        weights = module(x, x, x, average_attn_weights=False)[1]
        query, key, _ = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
    products = query.unflatten(-1, (heads, -1)).transpose(1, 2) @ key.unflatten(-1, (heads, -1)).transpose(1, 2).mT
    logs = weights.log()
    products, logs = (each - each.mean(-1, keepdim=True) for each in (products, logs))
    return ((products * logs).sum() / products.square().sum()).item() * (width / heads) ** 0.5
