"""A few rows of an attention call over all their keys: those with the largest products and logits, and a spread of the others.

What it must hold: nothing is read off the device; of a large batch only the sequences with the largest products are taken, for
each head of the keys its own; rows without a visible key and padded rows are never kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.capture.record import HIDDEN, AttentionCall
from attemper.stats import RowStats

SEQUENCES = 2
LARGEST = 2  # rows with the largest product, and as many with the largest logit
SPREAD = 4
ROWS = 2 * LARGEST + SPREAD


@dataclass(frozen=True)
class Sample:
    """Rows of a call; "group" are the query heads that share a key.

    Attributes:
        query: [sequences, kv_heads, group, rows, d]; key: [sequences, kv_heads, keys, d].
        value: [sequences, kv_heads, keys, d_v].
        visible: bool, and bias: added to the logits, or None; both [sequences, kv_heads, group, rows, keys].
        scale: a number, or a tensor that broadcasts to [sequences, kv_heads, group, rows, 1]; softcap: as in the call.
        sinks: [kv_heads, group, 1, 1] or None.
        kept: bool [sequences, kv_heads, group, rows], False for places that no real row fills.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor
    bias: Tensor | None
    scale: float | Tensor
    softcap: float | None
    sinks: Tensor | None
    kept: Tensor


def sample(call: AttentionCall, rows: RowStats, counted: Tensor) -> Sample:
    """Choose rows and gather what belongs to them.

    Args:
        rows: of the call, [batch, heads, queries]; counted: bool of the same shape, True for real rows with a visible key.
    """
    key, value = call.key, call.value
    heads = call.query.shape[1]
    if value.shape[1] != key.shape[1]:
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
    groups = (key.shape[1], heads // key.shape[1])
    products = torch.where(counted, rows.product_absmax(), -torch.inf).nan_to_num(nan=-torch.inf, posinf=torch.inf)
    logits = torch.where(counted, torch.maximum(rows.max, -rows.min), -torch.inf).nan_to_num(nan=-torch.inf, posinf=torch.inf)
    by_group = [each.unflatten(1, groups) for each in (products, logits, counted)]
    sequence = _sequences(by_group[0])
    products, logits, counted = (_taken(each, sequence) for each in by_group)
    place, kept = _places(products, logits, counted)
    picked = _taken(call.query.unflatten(1, groups), sequence)
    query = picked.gather(-2, place.unsqueeze(-1).expand(*place.shape, picked.shape[-1]))
    visible, bias = _masks(call, groups, sequence, place)
    scale = call.scale
    if isinstance(scale, Tensor) and scale.dim() == 1:
        scale = scale.reshape(*groups, 1, 1)
    elif isinstance(scale, Tensor) and scale.dim() > 1:
        everywhere = scale.expand(call.query.shape[:3]).unflatten(1, groups)
        scale = _taken(everywhere, sequence).gather(-1, place).unsqueeze(-1)
    sinks = None if call.sinks is None else call.sinks.reshape(*groups, 1, 1)
    return Sample(query, _taken(key, sequence), _taken(value, sequence), visible, bias, scale, call.softcap, sinks, kept)


def _sequences(products: Tensor) -> Tensor:
    """[sequences, kv_heads]: which of the batch have the largest products."""
    largest = products.flatten(2).amax(-1)
    return largest.topk(min(SEQUENCES, largest.shape[0]), dim=0).indices


def _taken(tensor: Tensor, sequence: Tensor) -> Tensor:
    """[batch, kv_heads, ...] to [sequences, kv_heads, ...]."""
    return tensor[sequence, torch.arange(sequence.shape[1], device=sequence.device)]


def _places(products: Tensor, logits: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows, [..., rows], and whether each is a real one. First wanted, first served: products, logits, spread, the rest."""
    number = counted.cumsum(-1) - 1
    total = counted.sum(-1, keepdim=True).clamp(min=1)
    wish = ((number * SPREAD) // total != ((number - 1) * SPREAD).div(total, rounding_mode="floor")).int()
    largest = min(LARGEST, counted.shape[-1])
    for strength, values in ((2, logits), (3, products)):
        wish = wish.scatter(-1, values.topk(largest, dim=-1).indices, strength)
    wish = torch.where(counted, wish, -1)
    strongest = wish.topk(min(ROWS, counted.shape[-1]), dim=-1)
    return strongest.indices, strongest.values >= 0


def _masks(call: AttentionCall, groups: tuple[int, int], sequence: Tensor, place: Tensor) -> tuple[Tensor, Tensor | None]:
    batch, heads = call.query.shape[:2]
    keys = call.key.shape[-2]
    position = torch.arange(keys, device=place.device)
    distance = position - place.unsqueeze(-1)
    visible = torch.ones((), dtype=torch.bool, device=place.device).expand(*place.shape, keys)
    if call.is_causal:
        visible = visible & (distance <= call.offset)
    left, right = call.window or (None, None)
    if left is not None:
        visible = visible & (distance >= call.offset - left)
    if right is not None:
        visible = visible & (distance <= call.offset + right)
    if call.attn_mask is None:
        return visible, None
    mask = call.attn_mask.reshape((1,) * (4 - call.attn_mask.dim()) + call.attn_mask.shape)
    one_row = mask.shape[2] == 1
    mask = mask.expand(batch, heads, -1, keys).unflatten(1, groups)
    which = torch.zeros_like(place) if one_row else place
    at = (sequence[:, :, None, None], *(_along(size, axis, place.device) for axis, size in enumerate(groups, 1)), which)
    rows = mask[at]
    if rows.dtype == torch.bool:
        return visible & rows, None
    hidden = rows <= HIDDEN
    return visible & ~hidden, rows.masked_fill(hidden, 0.0)


def _along(size: int, axis: int, device: torch.device) -> Tensor:
    """0 to size − 1, as an index of the given axis of four."""
    return torch.arange(size, device=device).reshape([-1 if each == axis else 1 for each in range(4)])
