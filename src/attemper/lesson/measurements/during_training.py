"""A head that learns to look a token up: how q and k align, the entropy falls and the logits grow, with QK-clip and without."""

from dataclasses import dataclass

import torch
from torch import nn

from attemper.lesson.figures import Figure, Measured, averaged, estimates, exact, over_seeds
from attemper.ops import attention
from attemper.ops.attention import row_stats
from attemper.scales import InverseSqrt

_TOKENS, _WIDTH, _BATCH = 16, 32, 32
_STEPS, _EVERY = 200, 20
_THRESHOLD = 20.0  # low, so that a small head reaches it; Kimi K2 has 100
_NOISE = 0.5
_JUDGED = 16  # batches of which the error is the mean: few rows make most of it


@dataclass(frozen=True, kw_only=True)
class DuringTraining(Measured):
    """Figures: cosine of a query and its key, entropy, largest logit, error, before, after, with QK-clip; an offset."""

    cosine_before: Figure
    cosine_after: Figure
    entropy_before: Figure
    entropy_after: Figure
    largest_before: Figure
    largest_after: Figure
    largest_clipped: Figure
    threshold: Figure
    error_before: Figure
    error_after: Figure
    error_clipped: Figure
    offset_max: Figure
    offset_centred: Figure
    offset_entropy: Figure


def measure(seed: int) -> DuringTraining:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 8)
    points = averaged(samples, {"plain": "plain_{}", "clipped": "clipped_{}"}, range(0, _STEPS + 1, _EVERY))
    figures = estimates(
        samples,
        cosine_before=".2f",
        cosine_after=".2f",
        entropy_before=".2f",
        entropy_after=".3f",
        largest_before=".1f",
        largest_after=".0f",
        largest_clipped=".1f",
        error_before=".2f",
        error_after=".3f",
        error_clipped=".3f",
        offset_max=".0f",
        offset_centred=".1f",
        offset_entropy=".2f",
    )
    return DuringTraining(points=points, threshold=exact(_THRESHOLD, ".0f"), **figures)


class _Head(nn.Module):
    """One head, over tokens and noisy copies of them in another order: each copy is to find its token's value."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(_WIDTH, _WIDTH) * _WIDTH**-0.5)
        self.key = nn.Parameter(torch.randn(_WIDTH, _WIDTH) * _WIDTH**-0.5)

    def operands(self, tokens: torch.Tensor, copies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (copies @ self.query).unsqueeze(1), (tokens @ self.key).unsqueeze(1)


def _drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, noise, values = torch.randn(3, _BATCH, _TOKENS, _WIDTH)
    return tokens, tokens + _NOISE * noise, values


def _error(head: _Head) -> float:
    """Mean squared error over batches not learned from yet: the values have variance 1."""
    total = 0.0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # both trainings then go on with the same batches
        for _ in range(_JUDGED):
            tokens, copies, values = _drawn()
            query, key = head.operands(tokens, copies)
            output = attention(query, key, values.unsqueeze(1), scale=InverseSqrt())
            total += (output.squeeze(1) - values).square().mean().item()
    return total / _JUDGED


def _once(seed: int) -> dict[str, float]:
    found = {}
    for name, threshold in (("plain", None), ("clipped", _THRESHOLD)):
        torch.manual_seed(seed)
        found |= _trained(name, threshold)
    # An entry that all queries and all keys have in common: every logit of a row rises by 60·40/√64.
    query, key = torch.randn(2, 1, 256, 64)
    query[..., 0], key[..., 0] = 60.0, 40.0
    rows = row_stats(query, key)
    found["offset_max"] = rows.max.mean().item()
    found["offset_centred"] = rows.centred_max().mean().item()
    found["offset_entropy"] = rows.normalized_entropy().mean().item()
    return found


def _trained(name: str, threshold: float | None) -> dict[str, float]:
    head = _Head()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    found = {}
    for step in range(_STEPS + 1):
        tokens, copies, values = _drawn()
        query, key = head.operands(tokens, copies)
        output, rows = attention(query, key, values.unsqueeze(1), scale=InverseSqrt(), return_stats=True)
        loss = (output.squeeze(1) - values).square().mean()
        largest = rows.max.max().item()
        if step % _EVERY == 0:
            found[f"{name}_{step}"] = largest
        if name == "plain" and step in (0, _STEPS):
            moment = "before" if step == 0 else "after"
            found[f"cosine_{moment}"] = torch.cosine_similarity(query, key, dim=-1).mean().item()
            found[f"entropy_{moment}"] = rows.normalized_entropy().mean().item()
            found[f"largest_{moment}"] = largest
            found[f"error_{moment}"] = _error(head)
        if step == _STEPS:
            if name == "clipped":
                found["error_clipped"] = _error(head)
            found["largest_clipped"] = largest
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        product = rows.product_absmax().max().item() * _WIDTH**-0.5
        if threshold is not None and product > threshold:
            with torch.no_grad():  # γ = τ / max|s·q·k|, its root on each side; Kimi K2 takes the maximum with its sign
                root = (threshold / product) ** 0.5
                head.query.mul_(root)
                head.key.mul_(root)
    return found
