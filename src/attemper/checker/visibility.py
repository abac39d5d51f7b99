"""What a call's mask lets through: pairs that look ahead, and pairs that look at padding.

Only the mask and the position rules are read; a float mask hides a pair as it does in the statistics (-1e4 and below).
"""

import torch
from torch import Tensor

from attemper.capture.record import HIDDEN, AttentionCall


def is_self_attention(call: AttentionCall) -> bool:
    """Keys from the queries' own sequence, as many as there are queries and more than one, both from position 0 on."""
    return call.self_attention and call.query.shape[-2] == call.key.shape[-2] > 1 and call.offset == 0


def sees_future(call: AttentionCall, real: Tensor) -> Tensor:
    """Whether some real query of a self-attention call may look at a real key behind its own position, bool [heads].

    Args:
        real: bool [batch, tokens].
    """
    if call.is_causal or (call.window is not None and call.window[1] == 0):
        return torch.zeros(call.query.shape[1], dtype=torch.bool)
    length = call.query.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=real.device).triu(1)
    return (_visible(call) & later & _pairs(real, real)).any(-1).any(-1).any(0).expand(call.query.shape[1])


def sees_padding(call: AttentionCall, real: Tensor, stated: Tensor) -> Tensor:
    """Whether some real query may look at a padded key (a bool without dimension).

    Args:
        real: bool [batch, queries]; stated: bool [batch, keys], False where a key is padding.
    """
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    visible = _visible(call)
    if call.is_causal:
        row = torch.arange(queries, device=real.device).unsqueeze(-1) + call.offset
        visible = visible & (torch.arange(keys, device=real.device) <= row)
    return (visible & _pairs(real, ~stated)).any()


def causal_alignment(call: AttentionCall) -> str:
    """Which keys the queries that continue a cache may look at: "" where the call has no more keys than queries, else

    "bottom-right" (up to the query's own position), "top-left" (up to its number in this call), "everything", or "otherwise".
    """
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    if not call.self_attention or not 1 < queries < keys:
        return ""
    row, column = torch.arange(queries, device=call.query.device).unsqueeze(-1), torch.arange(keys, device=call.query.device)
    visible = _visible(call).expand(*_visible(call).shape[:2], queries, keys)
    last = column <= row + call.offset if call.is_causal else torch.ones_like(column <= row)
    if call.window is not None and call.window[1] is not None:
        last = last & (column <= row + call.offset + call.window[1])
    reach = torch.where((visible & last).any(0).any(0), column, -1).amax(-1)
    for words, expected in (
        ("bottom-right", row.squeeze(-1) + keys - queries),
        ("top-left", row.squeeze(-1)),
        ("everything", torch.full_like(reach, keys - 1)),
    ):
        if torch.equal(reach, expected):
            return words
    return "otherwise"


def _visible(call: AttentionCall) -> Tensor:
    """What the mask alone lets through, broadcastable to [batch, heads, queries, keys]."""
    mask = call.attn_mask
    if mask is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device)
    visible = mask if mask.dtype == torch.bool else mask > HIDDEN
    return visible[(None,) * (4 - visible.dim())]


def _pairs(queries: Tensor, keys: Tensor) -> Tensor:
    return queries[:, None, :, None] & keys[:, None, None, :]
