"""One head in float16, at products of growing size, under each remedy: which rows are lost, how far off the others are."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KEYS, WIDTH, CAP = 64, 128, 10.0
SIZES = tuple(2.0**power for power in range(-2, 9))
REMEDIES = (
    "naive",
    "scale after the product",
    "scale on q, before the product",
    "maximum subtracted, 16 bits",
    "maximum subtracted, float32",
    "scale on q, maximum subtracted",
    "QK-norm and scale",
    "softcap",
)


class Rounding(NamedTuple):
    """One remedy at one size.

    Attributes:
        remedy: in words. size: standard deviation of the entries of q and k. logit: the largest |q·k|, before any scale.
        broken: share of the rows of the output that are lost: no number, or zeros, since a sum of exponentials that is infinite
            leaves no key any weight. error: of the others, root mean square against the same formula in float64, relative to
            the root mean square of v.
    """

    remedy: str
    size: float
    logit: float
    broken: float
    error: float


def roundings() -> list[Rounding]:
    """Every remedy at every size."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    return [_at(remedy, size, size * q, size * k, v) for remedy in REMEDIES for size in SIZES]


def _at(remedy: str, size: float, q: Tensor, k: Tensor, v: Tensor) -> Rounding:
    q, k, v = q.half(), k.half(), v.half()  # what both see
    wanted = _product(_weights(remedy, q.double(), k.double()), v.double())
    weights = _weights(remedy, q, k)
    found = _product(weights, v).double()
    whole = found.isfinite().all(-1) & (weights > 0).any(-1)
    error = (found - wanted)[whole].square().mean().sqrt() / v.double().square().mean().sqrt() if whole.any() else torch.nan
    return Rounding(remedy, size, (q.double() @ k.double().T).abs().max().item(), 1 - whole.double().mean().item(), float(error))


def _weights(remedy: str, q: Tensor, k: Tensor) -> Tensor:
    """softmax(…) with every step in the type of q; in float64 a safe softmax gives what the remedy should."""
    scale = 1 / math.sqrt(q.shape[-1])
    if remedy == "QK-norm and scale":
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
    if remedy in ("scale on q, before the product", "scale on q, maximum subtracted"):
        q = q * scale
    logits = _product(q, k.T)
    if remedy in ("scale after the product", "QK-norm and scale"):
        logits = logits * scale
    if remedy == "softcap":
        logits = CAP * torch.tanh(logits / CAP)
    if remedy == "maximum subtracted, float32" and q.dtype == torch.float16:
        logits = logits.float()
    if (
        remedy in ("maximum subtracted, 16 bits", "maximum subtracted, float32", "scale on q, maximum subtracted")
        or q.dtype == torch.float64
    ):
        logits = logits - logits.amax(-1, keepdim=True)
    powers = logits.exp()
    return (powers / powers.sum(-1, keepdim=True)).to(q.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Added up in float32 and rounded once, as matrix units do; in float64 as it is."""
    return (a.float() @ b.float()).half() if a.dtype == torch.float16 else a @ b
