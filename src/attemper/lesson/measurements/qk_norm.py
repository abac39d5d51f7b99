"""What a norm on q and k does to their direction and to the logits, however large the weights have become."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attemper.lesson.figures import Figure, Measured, averaged, estimates, exact, over_seeds
from attemper.nn import QKNorm
from attemper.ops.attention import row_stats

_KEYS, _WIDTH = 256, 64
_GROWTHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class QkNorm(Measured):
    """Figures: cosine of a vector and its norm's output; spread and largest logit with weights 8 times as large."""

    cosine_rms: Figure
    cosine_layer: Figure
    cosine_layer_shifted: Figure
    std_plain_1: Figure
    std_plain_8: Figure
    std_normed_1: Figure
    std_normed_8: Figure
    std_normed_unscaled: Figure
    bound: Figure
    aligned_logit: Figure


def measure(seed: int) -> QkNorm:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 12)
    points = averaged(samples, {"plain": "std_plain_{}", "normed": "std_normed_{}"}, _GROWTHS)
    figures = estimates(
        samples,
        cosine_layer=".4f",
        cosine_layer_shifted=".3f",
        std_plain_1=".2f",
        std_plain_8=".1f",
        std_normed_1=".2f",
        std_normed_8=".2f",
        std_normed_unscaled=".2f",
    )
    # Equal up to rounding whatever the seed.
    same = {name: exact(round(samples[name][0], 4), ".3f") for name in ("cosine_rms", "aligned_logit")}
    return QkNorm(points=points, bound=exact(_WIDTH**0.5, ".0f"), **figures, **same)


def _once(_seed: int) -> dict[str, float]:
    query, key = torch.randn(2, 1, 1, _KEYS, _WIDTH)
    norms = {kind: QKNorm(_WIDTH, kind, gain=False) for kind in ("rms", "layer")}
    found = {
        "cosine_rms": _cosine(query, norms["rms"](query, key)[0]),
        "cosine_layer": _cosine(query, norms["layer"](query, key)[0]),
        "cosine_layer_shifted": _cosine(query + 0.5, norms["layer"](query + 0.5, key)[0]),
    }
    for growth in _GROWTHS:
        grown = query * growth, key * growth
        for name, (q, k) in (("plain", grown), ("normed", norms["rms"](*grown))):
            found[f"std_{name}_{growth}"] = _spread(q, k, _WIDTH**-0.5)
    q, k = norms["rms"](query, key)
    found["std_normed_unscaled"] = _spread(q, k, 1.0)
    found["aligned_logit"] = row_stats(q, q, scale=_WIDTH**-0.5).max.mean().item()
    return found


def _cosine(before: torch.Tensor, after: torch.Tensor) -> float:
    return F.cosine_similarity(before.double(), after.double(), dim=-1).mean().item()


def _spread(query: torch.Tensor, key: torch.Tensor, scale: float) -> float:
    rows = row_stats(query, key, scale=scale)
    return (rows.var + rows.mean.square()).mean().sqrt().item()
