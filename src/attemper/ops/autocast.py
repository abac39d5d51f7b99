"""Autocast: attention computes in its dtype, as torch's own does, and no kernel is disturbed by it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def under_autocast(tensor: Tensor) -> Tensor:
    """The tensor in the dtype in which autocast wants attention; as it is where that is off, and float64 and no floats always."""
    dtype = _dtype(tensor.device) if isinstance(tensor, Tensor) else None
    if dtype is None or not tensor.dtype.is_floating_point or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A region in which autocast leaves the products of a kernel in float32."""
    return nullcontext() if _dtype(device) is None else torch.autocast(device.type, enabled=False)


def _dtype(device: torch.device) -> torch.dtype | None:
    kind = device.type
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
