"""Scores of additive attention beside dot products, as the width grows, and what both cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attemper.lesson.figures import Figure, Measured, averaged, estimates, exact, over_seeds, within_factor
from attemper.nn import AdditiveAttention
from attemper.ops.attention import row_stats

_KEYS = 128
_WIDTHS = (16, 64, 256)
_TIMED = (256, 64)  # queries and keys, width: a hidden layer that an allocator keeps, so that no page is mapped within the time


@dataclass(frozen=True, kw_only=True)
class AdditiveOrDot(Measured):
    """Figures: spread of both kinds of scores; the bound ‖v‖₁ and the largest score; a larger v; the cost of both."""

    dot_std_16: Figure
    dot_std_256: Figure
    additive_std_16: Figure
    additive_std_256: Figure
    bound_256: Figure
    largest_256: Figure
    entropy_additive: Figure
    entropy_sharper: Figure
    multiply_adds: Figure
    tanh: Figure
    hidden_mib: Figure
    time_ratio: Figure


def measure(seed: int) -> AdditiveOrDot:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 12)
    points = averaged(samples, {"dot": "dot_std_{}", "additive": "additive_std_{}"}, _WIDTHS)
    figures = estimates(
        samples,
        dot_std_16=".2f",
        dot_std_256=".1f",
        additive_std_16=".2f",
        additive_std_256=".2f",
        bound_256=".1f",
        largest_256=".2f",
        entropy_additive=".3f",
        entropy_sharper=".2f",
    )
    n, d = _TIMED
    return AdditiveOrDot(
        points=points,
        multiply_adds=exact(n * n * d, ".1e"),
        tanh=exact(n * n * d, ".1e"),
        hidden_mib=exact(n * n * d * 4 / 2**20, ".0f"),
        time_ratio=_time_ratio(),
        **figures,
    )


def _once(_seed: int) -> dict[str, float]:
    found = {}
    for d in _WIDTHS:
        query, key = torch.randn(2, 1, _KEYS, d)
        rows = row_stats(query, key, scale=1.0)
        found[f"dot_std_{d}"] = (rows.var + rows.mean.square()).mean().sqrt().item()
        additive = AdditiveAttention(d)
        with torch.no_grad():
            torch.nn.init.normal_(additive.q_proj.weight, std=d**-0.5)  # as q and k of a dot product come: of variance 1
            torch.nn.init.normal_(additive.k_proj.weight, std=d**-0.5)
            scores = _scores(additive, query, key)
            found[f"additive_std_{d}"] = scores.std().item()
            found[f"bound_{d}"] = additive.v.abs().sum().item()
            found[f"largest_{d}"] = scores.abs().max().item()
            found["entropy_additive"] = _entropy(scores)
            additive.v.mul_(10.0)
            found["entropy_sharper"] = _entropy(_scores(additive, query, key))
    return found


def _scores(additive: AdditiveAttention, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """vᵀ·tanh(W_q·q + W_k·k) of every pair."""
    hidden = torch.tanh(additive.q_proj(query).unsqueeze(-2) + additive.k_proj(key).unsqueeze(-3))
    return hidden @ additive.v


def _entropy(scores: torch.Tensor) -> float:
    weights = torch.softmax(scores, dim=-1)
    return (-(weights * weights.log()).sum(-1).mean() / torch.tensor(float(_KEYS)).log()).item()


def _time_ratio() -> Figure:
    """Time of additive scores over that of dot products, both written down by torch, one after the other.

    Of each the shortest of several, which other work on the machine disturbs least. Its caches and a second thread on the same
    core still make twice or half of it, on either side.
    """
    n, d = _TIMED
    with torch.random.fork_rng(devices=[]):
        query, key = torch.randn(2, 1, n, d)
        additive = AdditiveAttention(d)
    dot, plain = [], []
    with torch.no_grad():
        for _ in range(15):
            dot.append(_seconds(lambda: query @ key.mT))
            plain.append(_seconds(lambda: _scores(additive, query, key)))
    return within_factor(min(plain) / min(dot), 4, ".0f")


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
