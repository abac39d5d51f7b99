"""Names the parameters that differ between two models, beyond what rounding to the coarser dtype explains."""

import torch
from torch import nn

from attemper.checker.applying.applied import unit_roundoff


def differing(a: nn.Module, b: nn.Module) -> tuple[str, ...] | None:
    """Names in A's order; None where the models share no name, so that nothing can be said."""
    others = dict(b.named_parameters()) | dict(b.named_buffers())
    mine = [*a.named_parameters(), *a.named_buffers()]
    shared = [(name, tensor, others[name]) for name, tensor in mine if name in others and tensor.is_floating_point()]
    if not shared:
        return None
    return tuple(name for name, one, two in shared if _differ(one.detach(), two.detach()))


def _differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.shape != two.shape:
        return True
    two = two.to(one.device)
    if one.dtype == two.dtype:
        return not torch.equal(one, two) and not bool(((one == two) | (one.isnan() & two.isnan())).all())
    coarse = max(unit_roundoff(one.dtype), unit_roundoff(two.dtype))
    return bool(((one.double() - two.double()).abs() > coarse * one.double().abs() + torch.finfo(torch.float16).tiny).any())


def relevant(names: tuple[str, ...], module: str) -> tuple[str, ...]:
    """Those of one module's own, or all where it has none among them."""
    prefix = f"{module}." if module else ""
    inside = tuple(name for name in names if name.startswith(prefix))
    return inside or names
