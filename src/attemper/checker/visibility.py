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


def looks_ahead(call: AttentionCall, real: Tensor) -> dict[str, Tensor]:
    """Of a self-attention call that shows later keys: which heads are causal but for a few pairs, and which pairs.

    A mask is causal but for a few pairs where real queries see at most one later key each on average, and three times as many
    earlier ones, and where that is no design by blocks (prefixes, chunks, images): in blocks, a query that sees a later key sees
    all that this key's own query sees. One single pair is a block of two; it counts unless it is the first two tokens (a prefix).

    Args:
        real: bool [batch, tokens].

    Returns:
        "near": bool [heads]; "pairs", "query" and "key": int64 without dimension, as in `Ahead`.
    """
    heads, length = call.query.shape[1], call.query.shape[-2]
    nothing = torch.zeros((), dtype=torch.int64, device=real.device)
    empty = {"near": torch.zeros(heads, dtype=torch.bool), "pairs": nothing, "query": nothing - 1, "key": nothing - 1}
    if call.is_causal or (call.window is not None and call.window[1] == 0):
        return empty
    visible = _visible(call).expand(-1, -1, length, length)
    if call.window is not None:
        distance = torch.arange(length, device=real.device) - torch.arange(length, device=real.device).unsqueeze(-1)
        left, right = call.window
        visible = (
            visible & (distance >= (-length if left is None else -left)) & (distance <= (length if right is None else right))
        )
    near, pairs, first = [], [], []
    for head in range(visible.shape[1]):  # one by one: a mask for each head, as a bias makes it, is as large as all logits
        seen = visible[:, head] & _pairs(real, real)[:, 0]
        later = seen.triu(1)
        near.append(_is_near(seen, later, real))
        distinct = later.any(0).flatten()
        pairs.append(distinct.sum())
        first.append(distinct.int().argmax())
    counts = torch.stack(pairs)
    most, worst = counts.max(0)
    place = torch.stack(first)[worst]
    return {
        "near": torch.stack(near).expand(heads),
        "pairs": most,
        "query": torch.where(most > 0, place // length, -1),
        "key": torch.where(most > 0, place % length, -1),
    }


def _is_near(seen: Tensor, later: Tensor, real: Tensor) -> Tensor:
    """Whether a mask is causal but for a few pairs; seen, later: bool [batch, queries, keys]."""
    ahead, behind = later.sum(), seen.tril(-1).sum()
    few = (ahead > 0) & (ahead <= real.sum()) & (3 * ahead <= behind)
    if not bool(few):  # the rest is dear, and nearly every mask ends here
        return few
    length = later.shape[-1]
    row = torch.arange(length, device=later.device)
    furthest = torch.where(later.any(-1), length - 1 - later.flip(-1).int().argmax(-1), row)
    reached = seen.gather(1, furthest.unsqueeze(-1).expand_as(seen))
    by_blocks = ~(reached & ~seen).any()
    at_start = (later.any(-1) & (row == real.int().argmax(-1, keepdim=True))).any()
    single = (later.sum((-1, -2)) <= 1).all() & ~at_start
    return ~by_blocks | single


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
