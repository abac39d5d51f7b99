"""The masks of torch's modules (True = hidden) as the one mask of `attemper.attention` (True = take part)."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.errors import ArgumentError


def merge(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    shape: tuple[int, int, int, int],
    device: torch.device,
    *,
    extra_keys: int = 0,
    is_causal: bool = False,
    offset: int = 0,
) -> Tensor | None:
    """Both masks and, where there are extra keys, the causal rule, in one: bool or float, broadcastable to the logits.

    Args:
        attn_mask: [queries, keys] or [batch·heads, queries, keys]; bool, True = hidden, or float, added to the logits.
        key_padding_mask: [batch, keys], of the same two kinds. A bool mask beside a float one hides.
        shape: (batch, heads, queries, keys), without the extra keys.
        device: of the logits.
        extra_keys: keys that come after the others and are visible to every query.

    Raises:
        ArgumentError: a mask is of another shape or dtype.
    """
    batch, heads, queries, keys = shape
    given = []
    if attn_mask is not None:
        _check("attn_mask", attn_mask, [(queries, keys), (batch * heads, queries, keys)])
        given.append(attn_mask.reshape(batch, heads, queries, keys) if attn_mask.ndim == 3 else attn_mask[None, None])
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, [(batch, keys)])
        given.append(key_padding_mask[:, None, None, :])
    if is_causal and extra_keys:  # the rule of the kernels would hide the extra keys from all but the last queries
        given.append(_later(queries, keys, offset, device)[None, None])
    if not given:
        return None
    hidden = [mask for mask in given if mask.dtype == torch.bool]
    added = [mask for mask in given if mask.dtype != torch.bool]
    nowhere = functools.reduce(torch.logical_or, hidden) if hidden else None
    if not added:
        assert nowhere is not None
        return F.pad(~nowhere, (0, extra_keys), value=True)
    total = added[0] if len(added) == 1 else added[0] + added[1]
    if nowhere is not None:
        total = torch.where(nowhere, -torch.inf, total)
    return F.pad(total, (0, extra_keys))


def _later(queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    places = torch.arange(queries, device=device).unsqueeze(-1) + offset
    return torch.arange(keys, device=device) > places


def _check(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if not isinstance(mask, Tensor):
        raise ArgumentError(name, type(mask).__name__, "a bool or float torch.Tensor, or None")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ArgumentError(name, str(mask.dtype), "bool (True = hidden), or a float dtype (added to the logits)")
    if tuple(mask.shape) not in shapes:
        raise ArgumentError(name, f"shape {tuple(mask.shape)}", " or ".join(map(str, shapes)))
