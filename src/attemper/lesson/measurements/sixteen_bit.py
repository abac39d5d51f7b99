"""What fits into 16 bits: products, exponentials, and the spacing of numbers; and one softmax in parts."""

import math
from dataclasses import dataclass

import torch

from attemper.lesson.figures import Figure, Measured, averaged, estimated, estimates, exact, over_seeds, within_factor
from attemper.ops import attention
from attemper.ops.attention import row_stats
from attemper.stats import merge

_WIDTH, _KEYS = 64, 256
_SPREADS = (1, 4, 16, 64)


@dataclass(frozen=True, kw_only=True)
class SixteenBit(Measured):
    """Figures: limits of float16; a product that overflows; errors of eager and fused bfloat16; two softmaxes."""

    fp16_max: Figure
    exp_limit: Figure
    scaled_limit_128: Figure
    raw_of_forty: Figure
    bf16_spacing_300: Figure
    eager_finite: Figure
    fused_finite: Figure
    naive_softmax_finite: Figure
    safe_softmax_finite: Figure
    naive_rows_lost: Figure
    eager_error_1: Figure
    eager_error_16: Figure
    fused_error_16: Figure
    merge_error: Figure


def measure(seed: int) -> SixteenBit:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 8)
    points = averaged(samples, {"eager": "eager_error_{}", "fused": "fused_error_{}"}, _SPREADS)
    largest = torch.finfo(torch.float16).max
    figures = estimates(samples, eager_error_1=".1e", eager_error_16=".1e", fused_error_16=".1e")
    spacing = torch.nextafter(torch.tensor(300.0, dtype=torch.bfloat16), torch.tensor(1e3, dtype=torch.bfloat16)) - 300
    return SixteenBit(
        points=points,
        fp16_max=exact(largest, ".0f"),
        exp_limit=exact(math.log(largest), ".2f"),
        scaled_limit_128=exact(largest / math.sqrt(128), ".0f"),
        raw_of_forty=exact(40 * math.sqrt(128), ".1f"),
        bf16_spacing_300=exact(spacing.item(), ".0f"),
        naive_rows_lost=estimated(samples["naive_rows_lost"], ".0%", floor=0.01),
        merge_error=within_factor(max(samples["merge_error"]), 10, ".0e"),  # a few roundings of float64
        **figures,
        **_finite(),
    )


def _finite() -> dict[str, Figure]:
    """Shares of finite numbers, of inputs without any randomness."""
    query = key = torch.full((1, 4, 64), 40.0, dtype=torch.float16)
    value = torch.ones(1, 4, 64, dtype=torch.float16)
    eager = torch.softmax(query @ key.mT * 64**-0.5, dim=-1) @ value
    logits = torch.tensor([12.0, 3.0, 0.0], dtype=torch.float16)
    naive = logits.exp() / logits.exp().sum()
    shares = {
        "eager_finite": eager,
        "fused_finite": attention(query, key, value),
        "naive_softmax_finite": naive,
        "safe_softmax_finite": torch.softmax(logits, dim=-1),
    }
    return {name: exact(tensor.isfinite().float().mean().item(), ".0%") for name, tensor in shares.items()}


def _once(_seed: int) -> dict[str, float]:
    query, key, value = torch.randn(3, 1, _KEYS, _WIDTH, dtype=torch.float64)
    q, k, v = (each.to(torch.bfloat16) for each in (query, key, value))
    found = {}
    for std in _SPREADS:
        scale = std * _WIDTH**-0.5
        true = attention(q.double(), k.double(), v.double(), scale=scale)
        eager = torch.softmax(q @ k.mT * scale, dim=-1) @ v
        for name, output in (("eager", eager), ("fused", attention(q, k, v, scale=scale))):
            found[f"{name}_error_{std}"] = ((output.double() - true).norm() / true.norm()).item()
    # Logits of standard deviation 8, as unscaled ones are at d = 64: which rows hold a number above ln 65504?
    rows = row_stats(query, key, scale=1.0)
    found["naive_rows_lost"] = (rows.max > math.log(torch.finfo(torch.float16).max)).double().mean().item()
    halves = [attention(query, key[:, part], value[:, part], return_stats=True) for part in (slice(0, 128), slice(128, 256))]
    found["merge_error"] = (merge(*halves)[0] - attention(query, key, value)).abs().max().item()
    return found
