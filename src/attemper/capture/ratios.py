"""The ways in which heads of q and k lie in the output of a projection, and whether two sets of norms differ by one factor."""

from collections.abc import Iterator

import torch
from torch import Tensor

SAMPLES = 8  # fewer ratios than this are constant by accident too easily


def splits(norms: Tensor, count: int, heads: tuple[int, int]) -> Iterator[Tensor]:
    """The ways in which `count` heads may lie in the groups of a projection: [batch, tokens, count] each.

    Contiguous ([q | k | v], at every boundary that q's and k's heads make), interleaved by head ([heads, 2 to 4, d]) or by key
    head ([kv_heads, its q's + k + v, d]), and repeated (fewer key heads than the call received).
    """
    groups = norms.shape[-1]
    q, k = heads
    bounds = {0, q, k, q + k, 2 * q, 2 * k, groups - count, groups - 2 * count}
    for start in sorted(bounds):
        if 0 <= start <= groups - count:
            yield norms[..., start : start + count]
    stride = groups // count
    if groups == stride * count and 2 <= stride <= 4:
        for start in range(stride):
            yield norms[..., start::stride]
    if q > k > 0 and q % k == 0 and groups == k * (q // k + 2):
        split = norms.unflatten(-1, (k, q // k + 2))
        yield split[..., :-2].flatten(-2) if count == q else split[..., -2]
    if groups < count and count % groups == 0:
        yield norms.repeat_interleave(count // groups, dim=-1)


def constant_ratio(operand: Tensor, groups: Tensor, tolerance: float) -> float | None:
    """operand ≈ factor · groups for one factor; None where the ratio varies or there is too little to tell."""
    usable = groups > 0
    if operand.shape != groups.shape or groups.numel() < SAMPLES:
        return None
    factor = (operand * groups).sum() / (groups * groups).sum().clamp_min(torch.finfo(torch.float64).tiny)
    close = (operand - factor * groups).abs() <= tolerance * factor * groups
    if bool((close | ~usable).all()) and bool((operand[~usable] == 0).all()) and bool(factor > 0):
        return float(factor)
    return None


def ratio_by_position(operand: Tensor, groups: Tensor, tolerance: float) -> Tensor | None:
    """operand ≈ factor · groups with one factor for each token: [batch, tokens]; None where heads differ in it.

    Two heads at least: the ratio of a single one is a factor by position whatever it is.
    """
    batch, tokens, heads = operand.shape
    if operand.shape != groups.shape or batch * tokens * (heads - 1) < SAMPLES:
        return None
    factor = (operand * groups).sum(-1) / (groups * groups).sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    if not bool(((operand - factor.unsqueeze(-1) * groups).abs() <= tolerance * factor.unsqueeze(-1) * groups).all()):
        return None
    # A padded token whose q is zero has the factor that other sequences have there.
    factor = torch.where(factor > 0, factor, factor.amax(0))
    return factor if bool((factor > 0).all()) else None
