"""Autocast: attention computes in its dtype, as torch's own does, and no kernel is disturbed by it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast wants attention on this device; None where it is off or the device has none."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in autocast's dtype; float64 and what is no float stay."""
    return tensor.to(dtype) if tensor.dtype.is_floating_point and tensor.dtype != torch.float64 else tensor


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A region in which autocast leaves the products of a kernel in float32."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
