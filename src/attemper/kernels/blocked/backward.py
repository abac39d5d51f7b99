"""The backward pass: tile by tile from recomputed logits."""

import math

import torch
from torch import Tensor

from attemper.kernels.blocked.tiles import TileLogits, keep_of, keys_of, query_blocks, scale_of, tile_logits, tiles
from attemper.kernels.spec import (
    Forward,
    Gradients,
    Inputs,
    Needs,
    Rules,
    Tile,
    Upstream,
    fold_groups,
    mask_part,
    unfold_groups,
    weighted_sum,
)


def backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    """The gradients that are wanted.

    With D = Σ o·do of the row: dz = p·(dp − D + g_lse − g_entropy·(ln p + H)), then back through the cap, the scale and q·k.
    """
    heads, kv_heads, dtype = inputs.query.shape[1], inputs.key.shape[1], inputs.compute_dtype
    growing = _Accumulators(inputs, needs)
    rows = _RowTerms(inputs, rules, result, upstream)
    for start, end in query_blocks(inputs):
        query = fold_groups(inputs.query[:, :, start:end].to(dtype), kv_heads)
        d_output = None
        if upstream.output is not None:
            d_output = fold_groups(upstream.output[:, :, start:end].to(dtype), kv_heads)
        d_query = torch.zeros_like(query)
        for tile in tiles(inputs, rules, start, end):
            of_tile = tile_logits(inputs, rules, tile, query)
            visible = of_tile.folded_visible(kv_heads)
            shifted = of_tile.logits - rows.shift[..., start:end, None]
            weights = of_tile.hide(torch.exp(shifted) / rows.total[..., start:end, None], 0.0)

            d_weights: Tensor | float = 0.0
            if d_output is not None and inputs.value is not None:
                keep = keep_of(inputs, rules, tile)
                d_weights = unfold_groups(d_output @ keys_of(inputs.value, tile, dtype).transpose(-1, -2), heads)
                d_weights = d_weights if keep is None else d_weights * keep
                if needs.value:
                    kept = fold_groups(weights if keep is None else weights * keep, kv_heads)
                    growing.value[:, :, tile.key_start : tile.key_end] += _transposed_sum(kept, d_output, visible)

            d_logits = of_tile.hide(rows.logit_gradient(weights, shifted, d_weights, start, end), 0.0)
            if needs.mask:
                _add_reduced(mask_part(growing.mask, tile), d_logits)
            scale = scale_of(inputs, tile).unsqueeze(-1)
            if rules.softcap is not None:
                slope = 1.0 - torch.tanh(of_tile.products * scale / rules.softcap).square()
                d_logits = of_tile.hide(d_logits * slope, 0.0)
            if needs.scale:
                growing.add_scale(d_logits, of_tile, rows.product_pivot[..., start:end], tile)
            d_products = fold_groups(d_logits * scale, kv_heads)
            if needs.query:
                d_query = d_query + weighted_sum(d_products, keys_of(inputs.key, tile, dtype), visible, signed=True)
            if needs.key:
                growing.key[:, :, tile.key_start : tile.key_end] += _transposed_sum(d_products, query, visible)
        if needs.query:
            growing.query[:, :, start:end] = unfold_groups(d_query, heads)
    if inputs.sinks is not None:
        growing.add_sink(rows.sink_gradient(inputs.sinks))
    growing.finish_scale(rows)
    return growing.rounded(inputs)


def _transposed_sum(weights: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """weightsᵀ @ values: what the rows of a block send back to the keys of a tile."""
    seen = None if visible is None else visible.transpose(-1, -2)
    return weighted_sum(weights.transpose(-1, -2), values, seen, signed=True)


class _RowTerms:
    """What the backward pass needs of each row, [batch, heads, queries]."""

    def __init__(self, inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream) -> None:
        dtype = inputs.compute_dtype
        assert result.figures is not None
        self.shift, self.total, product_max = result.figures
        # ln p + H = (z − max) + this: the two large parts of ln p never meet.
        self.surprise = result.entropy - torch.log(self.total)
        self.empty = result.lse == -math.inf
        # Any finite number near the products serves; it only keeps their differences small. Where Σ dz is not known exactly, it
        # would bring in that rounding: under a cap Σ dz is known only by summing it, and beside a sink that takes nearly all
        # weight it is a small difference of large numbers.
        exact = rules.softcap is None and inputs.sinks is None
        usable = torch.isfinite(product_max) if exact else torch.zeros_like(self.empty)
        self.product_pivot = torch.where(usable, product_max, 0.0)
        self.d_lse = torch.zeros_like(self.shift) if upstream.lse is None else upstream.lse.to(dtype)
        self.d_entropy = None if upstream.entropy is None else upstream.entropy.to(dtype)
        self.constant = self.d_lse
        output = result.output if result.unrounded is None else result.unrounded
        if upstream.output is not None and output is not None:
            # In float64: where the weights are sharp, dp − D is a small difference of two sums.
            inner = (output.double() * upstream.output.double()).sum(-1)
            self.constant = (self.d_lse - inner).to(dtype)

    def logit_gradient(self, weights: Tensor, shifted: Tensor, d_weights: Tensor | float, start: int, end: int) -> Tensor:
        """dz of a tile, [batch, heads, tile queries, tile keys]."""
        gradient = weights * (d_weights + self.constant[..., start:end, None])
        if self.d_entropy is None:
            return gradient
        surprise = torch.where(weights == 0.0, 0.0, shifted + self.surprise[..., start:end, None])
        return gradient - weights * surprise * self.d_entropy[..., start:end, None]

    def sink_gradient(self, sinks: Tensor) -> Tensor:
        """The gradient with respect to the sink's logit: a weight without a value, so dp is 0."""
        shifted = (sinks.unsqueeze(-1) - self.shift).unsqueeze(-1)
        weight = torch.exp(shifted) / self.total.unsqueeze(-1)
        return self.logit_gradient(weight, shifted, 0.0, 0, self.shift.shape[-1]).squeeze(-1)


class _Accumulators:
    """The gradients as they grow, in the compute dtype; empty tensors where none is wanted."""

    def __init__(self, inputs: Inputs, needs: Needs) -> None:
        dtype = inputs.compute_dtype

        def zeros(tensor: Tensor | None, need: bool) -> Tensor:
            return inputs.query.new_zeros(tensor.shape if need and tensor is not None else (0,), dtype=dtype)

        grown = (zeros(tensor, need) for tensor, need in zip(inputs, needs, strict=True))
        self.query, self.key, self.value, self.mask, self.scale, self.sinks = grown
        self.needs = needs
        rows = inputs.shape[:3] if needs.scale else (0,)
        self.from_pivot = inputs.query.new_zeros(rows, dtype=dtype)

    def add_scale(self, d_logits: Tensor, of_tile: TileLogits, pivot: Tensor, tile: Tile) -> None:
        """Σ dz·(u − pivot) over the tile, with dz taken before the cap."""
        rows = slice(tile.query_start, tile.query_end)
        from_pivot = of_tile.hide(of_tile.products - pivot.unsqueeze(-1), 0.0)
        self.from_pivot[..., rows] += (d_logits * from_pivot).sum(-1)

    def add_sink(self, d_sink: Tensor) -> None:
        """The gradients of the sink's logit, [batch, heads, queries]."""
        if self.needs.sinks:
            self.sinks.copy_(d_sink.sum((0, 2), dtype=torch.float64))

    def finish_scale(self, rows: _RowTerms) -> None:
        """ds = Σ dz·(u − pivot) + pivot·Σ dz.

        Σ dz is the gradient of lse, exactly (the pivot is 0 where it is not, under a cap or beside a sink); a summed one would
        bring back the rounding that the pivot took out.
        """
        if not self.needs.scale:
            return
        of_rows = self.from_pivot.double() + rows.product_pivot.double() * torch.where(rows.empty, 0.0, rows.d_lse)
        self.scale.copy_(of_rows.sum_to_size(self.scale.shape))

    def rounded(self, inputs: Inputs) -> Gradients:
        """The gradients in the dtypes of their inputs."""
        grown = (self.query, self.key, self.value, self.mask, self.scale, self.sinks)
        return Gradients(
            *(
                gradient.to(tensor.dtype) if need and tensor is not None else None
                for gradient, tensor, need in zip(grown, inputs, self.needs, strict=True)
            )
        )


def _add_reduced(target: Tensor, addend: Tensor) -> None:
    """target += addend, summed over the dimensions in which the target is 1."""
    target += addend.sum_to_size(target.shape)
