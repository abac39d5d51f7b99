"""Additive attention written down whole, and in tiles whose hidden layer is computed again in the backward pass.

What it must hold:
- both forms give the same numbers, dropout included, and hide the same pairs;
- the tiled one holds no tensor of queries·keys·hidden_dim, and none of queries·keys besides the caller's mask;
- an invisible pair contributes nothing, even where its key or value is NaN.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attemper.kernels.dropout import keep_factor
from attemper.kernels.spec import Inputs, Rules, Tile, keys_in_reach, mask_part, masking, nonfinite, weighted_sum
from attemper.stats import record_and_weights

# Numbers in the hidden layer of a tile over the whole batch: 4 MiB in float32, two or three of which are alive at a time.
_TILE_ELEMENTS = 2**20
_TILE_QUERIES = 64


class Pairs(NamedTuple):
    """A problem with one head, in the compute dtype; query and key are the parts of the hidden layer, [batch, 1, n, hidden]."""

    inputs: Inputs
    rules: Rules


class _TileOfPairs(NamedTuple):
    """hidden: [batch, 1, tile queries, tile keys, hidden_dim]; logits, keep, visible: without the last, or None."""

    hidden: Tensor
    logits: Tensor
    visible: Tensor | None
    keep: Tensor | None

    def hide(self, tensor: Tensor, filler: float) -> Tensor:
        return tensor if self.visible is None else torch.where(self.visible, tensor, filler)


def plain(pairs: Pairs, direction: Tensor) -> tuple[Tensor, Tensor]:
    """(output [batch, 1, queries, d_v], weights after dropout [batch, 1, queries, keys]), materialised; autograd's gradient."""
    inputs = pairs.inputs
    batch, _, queries, keys = inputs.shape
    tile = _tile(pairs, direction, Tile(0, queries, 0, keys))
    seen = None if tile.visible is None else tile.visible.expand(batch, 1, queries, keys)
    weights = record_and_weights(tile.logits, seen, None, None)[1]
    weights = weights if tile.keep is None else weights * tile.keep
    assert inputs.value is not None
    value = inputs.value
    if seen is None or not nonfinite(value):
        return weights @ value, weights
    return (weights.unsqueeze(-1) * torch.where(seen.unsqueeze(-1), value.unsqueeze(-3), 0.0)).sum(-2), weights


def blocked(pairs: Pairs, direction: Tensor) -> Tensor:
    """The output alone, in tiles."""
    inputs = pairs.inputs
    return _Blocked.apply(inputs.query, inputs.key, inputs.value, inputs.mask, direction, pairs.rules)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, direction: Tensor, rules: Rules
    ) -> Tensor:
        pairs = Pairs(Inputs(query, key, value, mask, query.new_ones(1, 1, 1), None), rules)
        batch, _, queries, _ = query.shape
        output = query.new_zeros(batch, 1, queries, value.shape[-1])
        top = query.new_full((batch, 1, queries, 1), -math.inf)
        total = query.new_zeros(batch, 1, queries, 1)
        for place in (place for row in _rows_of_tiles(pairs) for place in row):
            rows = slice(place.query_start, place.query_end)
            tile = _tile(pairs, direction, place)
            logits = tile.hide(tile.logits, -math.inf)
            before = top[:, :, rows]
            after = torch.maximum(before, logits.amax(-1, keepdim=True))
            shift = torch.where(after == -math.inf, 0.0, after)
            weights = torch.exp(logits - shift)
            fade = torch.exp(before - shift)
            top[:, :, rows] = after
            total[:, :, rows] = total[:, :, rows] * fade + weights.sum(-1, keepdim=True)
            weights = weights if tile.keep is None else weights * tile.keep
            seen = None if tile.visible is None else tile.visible.expand(weights.shape)
            part = weighted_sum(weights, value[:, :, place.key_start : place.key_end], seen, signed=False)
            output[:, :, rows] = output[:, :, rows] * fade + part
        top = torch.where(top == -math.inf, 0.0, top)
        total = torch.where(total == 0.0, 1.0, total)
        ctx.save_for_backward(query, key, value, mask, direction, top, total)
        ctx.rules = rules
        return output / total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyrefly: ignore[bad-override]
        (d_output,) = upstream
        query, key, value, mask, direction, top, total = ctx.saved_tensors
        pairs = Pairs(Inputs(query, key, value, mask, query.new_ones(1, 1, 1), None), ctx.rules)
        d_query, d_key, d_value, d_direction = (torch.zeros_like(each) for each in (query, key, value, direction))
        d_mask = torch.zeros_like(mask, dtype=query.dtype) if ctx.needs_input_grad[3] else None

        def again(place: Tile) -> tuple[_TileOfPairs, Tensor, Tensor]:
            """The tile, its weights p, and the gradient dp with respect to them."""
            rows = slice(place.query_start, place.query_end)
            tile = _tile(pairs, direction, place)
            weights = tile.hide(torch.exp(tile.logits - top[:, :, rows]) / total[:, :, rows], 0.0)
            d_weights = d_output[:, :, rows] @ value[:, :, place.key_start : place.key_end].transpose(-1, -2)
            return tile, weights, tile.hide(d_weights if tile.keep is None else d_weights * tile.keep, 0.0)

        for row in _rows_of_tiles(pairs):
            known = {place: again(place) for place in row} if len(row) == 1 else {}
            # Σ p·dp from these very p and dp, at the price of a pass: taken from output·d_output it would differ from them by
            # the rounding of the output, which then does not cancel in dp − Σ p·dp.
            inner: Tensor | float = 0.0
            for place in row:
                _, weights, d_weights = known.get(place) or again(place)
                inner = inner + (weights * d_weights).sum(-1, keepdim=True)
            for place in row:
                tile, weights, d_weights = known.get(place) or again(place)
                rows, columns = slice(place.query_start, place.query_end), slice(place.key_start, place.key_end)
                kept = weights if tile.keep is None else weights * tile.keep
                d_value[:, :, columns] += kept.transpose(-1, -2) @ d_output[:, :, rows]
                d_logits = weights * (d_weights - inner)
                if d_mask is not None:
                    part = mask_part(d_mask, place)
                    part += d_logits.sum_to_size(part.shape)
                d_direction += (d_logits.unsqueeze(-2) @ tile.hidden).sum((0, 1, 2, 3))
                slope = tile.hidden.square_().neg_().add_(1.0).mul_(d_logits.unsqueeze(-1))
                d_query[:, :, rows] += slope.sum(-2) * direction
                d_key[:, :, columns] += slope.sum(-3) * direction
        return d_query, d_key, d_value, None if d_mask is None else d_mask.to(mask.dtype), d_direction, None


def _rows_of_tiles(pairs: Pairs) -> Iterator[list[Tile]]:
    """Tiles that cover the plane, row by row, those that position hides left out; each keeps within its share of memory."""
    batch, _, queries, keys = pairs.inputs.shape
    per_pair = max(1, batch * pairs.inputs.query.shape[-1])
    height = max(1, min(_TILE_QUERIES, math.isqrt(_TILE_ELEMENTS // per_pair)))
    width = max(1, _TILE_ELEMENTS // (per_pair * height))
    for start in range(0, queries, height):
        end = min(start + height, queries)
        first, last = keys_in_reach(pairs.rules, start, end, keys)
        yield [Tile(start, end, key, min(key + width, last)) for key in range(first, last, width)]


def _tile(pairs: Pairs, direction: Tensor, place: Tile) -> _TileOfPairs:
    inputs, rules = pairs
    query = inputs.query[:, :, place.query_start : place.query_end, None]
    key = inputs.key[:, :, None, place.key_start : place.key_end]
    visible, bias = masking(inputs, rules, place)
    hidden = query + key
    # Where something is not finite, what an invisible pair would put into sums and gradients is replaced.
    if visible is not None and nonfinite(hidden):
        hidden = torch.where(visible.unsqueeze(-1), hidden, 0.0)
    hidden = hidden.tanh_() if not hidden.requires_grad else hidden.tanh()
    logits = hidden @ direction
    logits = logits if bias is None else logits + bias
    keep = None
    if rules.dropout_p > 0.0:
        size = (inputs.shape[0], 1, place)
        keep = keep_factor(rules.seed, rules.dropout_p, *size, dtype=hidden.dtype, device=hidden.device)
    return _TileOfPairs(hidden, logits, visible, keep)
