"""Calls that outlive the forward pass: copies on the CPU, linear in the length but for a mask, which layers share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attemper.capture import AttentionCall


def copied(call: AttentionCall, mask: Tensor | None = None) -> AttentionCall:
    """A copy of the call on the CPU.

    Args:
        mask: a copy that was made before, taken instead of another where the call's mask equals it.
    """
    own = call.attn_mask
    if mask is not None and own is not None and own.dtype == mask.dtype and torch.equal(own.cpu(), mask):
        return _moved(replace(call, attn_mask=None), _copy, attn_mask=mask)
    return _moved(call, _copy)


def brought(call: AttentionCall, other: AttentionCall) -> AttentionCall:
    """The call on the device of the other."""
    device = other.query.device
    return call if call.query.device == device else _moved(call, lambda given: given.to(device))


def _copy(given: Tensor) -> Tensor:
    return given.detach().to("cpu", copy=True)


def _moved(call: AttentionCall, move: Callable[[Tensor], Tensor], attn_mask: Tensor | None = None) -> AttentionCall:
    def moved(given: Any) -> Any:
        return move(given) if isinstance(given, Tensor) else given

    return replace(
        call,
        query=move(call.query),
        key=move(call.key),
        value=move(call.value),
        attn_mask=moved(call.attn_mask) if attn_mask is None else attn_mask,
        scale=moved(call.scale),
        scale_given=moved(call.scale_given),
        sinks=moved(call.sinks),
        output=moved(call.output),
    )
