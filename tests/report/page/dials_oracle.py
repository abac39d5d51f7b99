"""What the dials must show, in torch: the definitions of dials_numbers.js, with attemper's own record of each row."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.report.page.dials import BINS
from attemper.stats import RowStats

WIDEST = 1024
KEYS, QUERIES, GRADIENTS = range(3)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    d: int = 64
    n: int = 256
    rule: str = "sqrt"
    dtype: str = "float32"
    rho: float = 0.0
    sigma: float = 1.0
    tau: float = 10
    softmax: str = "safe"

    @property
    def rows(self) -> int:
        return min(512, max(16, 4 * (4096 // self.n)))

    def held(self, values: Tensor) -> Tensor:
        """Rounded to the number format, by way of float32, and read back."""
        return values.float().to(DTYPES[self.dtype]).double()

    @property
    def factor(self) -> float:
        return {"none": 1.0, "sqrt": 1 / math.sqrt(self.d), "linear": 1 / self.d, "cosine": self.tau}[self.rule]


@dataclass(frozen=True)
class Expected:
    figures: dict[str, float | None]
    counts: list[int]
    low: float | None
    high: float | None
    weights: list[float]
    jacobian_norms: Tensor

    def ends(self) -> dict[str, float | None]:
        """What stands under the histogram."""
        return {"low": self.low, "high": self.high}


def bits(seed: int, index: Tensor) -> Tensor:
    """32 random bits for each (seed, index), int64."""
    x = (index + seed * 0x9E3779B9) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def normals(seed: int, rows: int, columns: int) -> Tensor:
    """[rows, columns] normal numbers, each a function of (seed, row, column)."""
    pair = torch.arange(rows).unsqueeze(-1) * (WIDEST // 2) + torch.arange((columns + 1) // 2)
    radius = (-2 * ((bits(seed, 2 * pair).double() + 0.5) / 2**32).log()).sqrt()
    angle = 2 * math.pi * bits(seed, 2 * pair + 1).double() / 2**32
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1)[:, :columns]


def entries(at: Settings) -> tuple[Tensor, Tensor]:
    """Queries [rows, d] and keys [n, d], as the number format holds them, float64."""
    keys, others = normals(KEYS, at.n, at.d), normals(QUERIES, at.rows, at.d)
    own = keys[torch.arange(at.rows) % at.n]
    both = (at.sigma * (at.rho * own + math.sqrt(1 - at.rho * at.rho) * others), at.sigma * keys)
    query, key = (at.held(each) for each in both)
    if at.rule == "cosine":
        query, key = (at.held(each / each.norm(dim=-1, keepdim=True).clamp(min=1e-12)) for each in (query, key))
    return query, key


def expected(at: Settings) -> Expected:
    query, key = entries(at)
    products = at.held(query @ key.mT)
    dtype = DTYPES[at.dtype]
    logits = (products.to(dtype) * at.factor).double()  # what eager code writes
    weights = _weights(at, logits)
    kept = products.isfinite().all(-1) & weights.isfinite().all(-1) & (weights > 0).any(-1)
    record = RowStats.from_logits(logits[kept], products=products[kept])
    sizes = _gradient(logits[kept], normals(GRADIENTS, at.rows, at.n)[kept]).square().sum(-1)
    per_row = {
        "normalized_entropy": record.normalized_entropy(),
        "peak": record.peak(),
        "gain": record.gain(),
        "jacobian_norm": record.jacobian_norm(),
    }
    some = bool(kept.any())
    figures = {name: values.mean().item() if some else None for name, values in per_row.items()} | {
        "logit_std": record.var.mean().sqrt().item() if some else None,
        "gradient_rms": (sizes.mean() / at.n).sqrt().item() if some else None,
        "gradient_median": sizes.sqrt().quantile(0.5).item() if some else None,
        "product_absmax": products.abs().max().item(),
        "product_overflow": products.isinf().double().mean().item(),
        "exp_overflow": at.held(logits.exp()).isinf().double().mean().item(),
        "lost_rows": 1 - kept.double().mean().item(),
    }
    counts, low, high = _histogram(logits)
    first = weights[0].sort(descending=True).values.tolist() if kept[0] else []
    return Expected(figures, counts, low, high, first, per_row["jacobian_norm"])


def _weights(at: Settings, logits: Tensor) -> Tensor:
    if at.softmax == "safe":
        return at.held(torch.softmax(logits, -1))
    raised = at.held(logits.exp())
    return at.held(raised / at.held(raised.sum(-1, keepdim=True)))


def _gradient(logits: Tensor, upstream: Tensor) -> Tensor:
    """Into the logits, by autograd: the page has it as a formula."""
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(torch.softmax(leaf, -1), leaf, upstream)[0]


def _histogram(logits: Tensor) -> tuple[list[int], float | None, float | None]:
    finite = logits[logits.isfinite()]
    if not len(finite):
        return [0] * BINS, None, None
    low, high = finite.min(), finite.max()
    places = ((finite - low) / (high - low) * BINS).floor().clamp(max=BINS - 1).long()
    return torch.bincount(places, minlength=BINS).tolist(), low.item(), high.item()
