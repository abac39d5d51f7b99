"""Attention tile by tile in plain PyTorch: O(N·d) memory, any device, forward and backward.

What it must hold:
- no tensor of queries × keys elements exists beyond one tile;
- the maximum is subtracted before anything is multiplied in, and the backward pass gets it and log Σ e^(z − max) apart, since
  their sum rounds away at large logits;
- sums within a tile start from zero and are then added to the running ones, which keeps their error from growing with N;
- mean and variance are formed about a pivot of the row, so that a common offset does not cancel in them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.kernels.dropout import keep_factor
from attemper.kernels.spec import (
    Forward,
    Gradients,
    Inputs,
    Needs,
    Rules,
    Tile,
    Upstream,
    fold_groups,
    keys_in_reach,
    logits_of,
    mask_part,
    masking,
    nonfinite,
    unfold_groups,
    weighted_sum,
)

_TILE_KEYS = 512
# Elements of a tile over all batches and heads: 8 MiB in float32, a few of which are alive at a time.
_TILE_ELEMENTS = 2**21


def forward(inputs: Inputs, rules: Rules, *, statistics: bool) -> Forward:
    """The online softmax over tiles, with the sums from which the record follows."""
    batch, heads, queries, _ = inputs.shape
    dtype, device = inputs.compute_dtype, inputs.query.device
    value = inputs.value
    output = None if value is None else torch.empty(batch, heads, queries, value.shape[-1], dtype=dtype, device=device)
    figures = torch.empty(5, batch, heads, queries, dtype=dtype, device=device)
    rest = torch.empty(10, batch, heads, queries, dtype=dtype, device=device) if statistics else None
    for start, end in _query_blocks(inputs):
        block = _forward_block(inputs, rules, start, end, statistics=statistics)
        if output is not None and block.output is not None:
            output[:, :, start:end] = block.output
        figures[..., start:end] = torch.stack(block.figures)
        if rest is not None:
            rest[..., start:end] = torch.stack(block.rest)
    lse, entropy, shift, log_total, product_max = figures
    rounded = None if output is None else output.to(inputs.query.dtype)
    saved = (shift, log_total, product_max) if output is None else (shift, log_total, product_max, output)
    return Forward(rounded, lse, entropy, rest, saved)


class _Block(NamedTuple):
    output: Tensor | None
    figures: tuple[Tensor, ...]
    rest: tuple[Tensor, ...]


def _forward_block(inputs: Inputs, rules: Rules, start: int, end: int, *, statistics: bool) -> _Block:
    batch, heads, _, keys = inputs.shape
    kv_heads = inputs.key.shape[1]
    dtype = inputs.compute_dtype
    shape = (batch, heads, end - start)

    def filled(number: float) -> Tensor:
        return torch.full(shape, number, dtype=dtype, device=inputs.query.device)

    top, total, weighted, squares, cubes = filled(-math.inf), filled(0.0), filled(0.0), filled(0.0), filled(0.0)
    product_max, product_min = filled(-math.inf), filled(math.inf)
    count, largest, smallest, argmax, mean, var = (
        filled(0.0),
        filled(-math.inf),
        filled(math.inf),
        filled(-1.0),
        filled(0.0),
        filled(0.0),
    )
    output = None
    if inputs.value is not None:
        output = torch.zeros(*shape, inputs.value.shape[-1], dtype=dtype, device=inputs.query.device)

    query = fold_groups(inputs.query[:, :, start:end].to(dtype), kv_heads)
    for tile in _tiles(rules, start, end, keys):
        products, logits, visible = _tile_logits(inputs, rules, tile, query)
        seen_logits = logits if visible is None else torch.where(visible, logits, -math.inf)
        tile_max, tile_argmax = seen_logits.max(-1)
        seen_products = products if visible is None else torch.where(visible, products, -math.inf)
        product_max = torch.maximum(product_max, seen_products.amax(-1))
        if statistics:
            tile_count = filled(tile.key_end - tile.key_start) if visible is None else visible.sum(-1).to(dtype).expand(shape)
            tile_mean, tile_var = _tile_moments(logits, visible, tile_max, tile_count)
            mean, var = _chan(count, mean, var, tile_count, tile_mean, tile_var)
            count = count + tile_count
            # A later tile must be larger to take over, so a tie keeps the lowest index; NaN takes over and stays.
            found = (tile_count > 0) & (((argmax < 0) | (tile_max > largest)) | torch.isnan(tile_max)) & ~torch.isnan(largest)
            argmax = torch.where(found, (tile_argmax + tile.key_start).to(dtype), argmax)
            largest = torch.maximum(largest, tile_max)
            smallest = torch.minimum(smallest, (logits if visible is None else torch.where(visible, logits, math.inf)).amin(-1))
            product_min = torch.minimum(
                product_min, (products if visible is None else torch.where(visible, products, math.inf)).amin(-1)
            )

        raised = torch.maximum(top, tile_max)
        shift = torch.where(raised == -math.inf, 0.0, raised)
        shifted = seen_logits - shift.unsqueeze(-1)
        exponentials = torch.exp(shifted)
        shrink, lift = _rescale(top, shift)
        weighted = shrink * (weighted + total * lift)
        weighted = weighted + (exponentials * torch.where(exponentials == 0.0, 0.0, shifted)).sum(-1)
        total = shrink * total + exponentials.sum(-1)
        if statistics:
            second = exponentials.square()
            squares = shrink.square() * squares + second.sum(-1)
            cubes = shrink.pow(3) * cubes + (second * exponentials).sum(-1)
        if output is not None:
            weights = exponentials
            if rules.dropout_p > 0.0:
                weights = weights * _keep(inputs, rules, tile)
            output = shrink.unsqueeze(-1) * output + _weighted(inputs.value, weights, visible, tile, dtype)
        top = raised

    if inputs.sinks is not None:
        at_sink = inputs.sinks.unsqueeze(-1)
        raised = torch.maximum(top, at_sink)
        shift = torch.where(raised == -math.inf, 0.0, raised)
        shrink, lift = _rescale(top, shift)
        sink_weight = torch.exp(at_sink - shift)
        weighted = shrink * (weighted + total * lift) + sink_weight * torch.where(sink_weight == 0.0, 0.0, at_sink - shift)
        total = shrink * total + sink_weight
        squares = shrink.square() * squares + sink_weight.square()
        cubes = shrink.pow(3) * cubes + sink_weight.pow(3)
        if output is not None:
            output = shrink.unsqueeze(-1) * output
        top = raised

    nothing = top == -math.inf
    shift = torch.where(nothing, 0.0, top)
    safe = torch.where(nothing, 1.0, total)
    log_total = torch.log(safe)
    lse = torch.where(nothing, -math.inf, shift + log_total)
    entropy = torch.where(nothing, 0.0, log_total - weighted / safe)
    if output is not None:
        output = output / safe.unsqueeze(-1)
    rest = (count, largest, smallest, argmax, mean, var, squares / safe.square(), cubes / safe.pow(3), product_max, product_min)
    return _Block(output, (lse, entropy, shift, log_total, product_max), rest if statistics else ())


def _rescale(top: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """(e^(top − shift), top − shift) with 0 for the difference of a row that has seen nothing yet."""
    fall = torch.where(top == -math.inf, 0.0, top - shift)
    return torch.where(top == -math.inf, 0.0, torch.exp(fall)), fall


def _tile_moments(logits: Tensor, visible: Tensor | None, tile_max: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    pivot = torch.where(tile_max == -math.inf, 0.0, tile_max)
    from_pivot = logits - pivot.unsqueeze(-1)
    if visible is not None:
        from_pivot = torch.where(visible, from_pivot, 0.0)
    divisor = count.clamp(min=1.0)
    mean_from_pivot = from_pivot.sum(-1) / divisor
    deviation = from_pivot - mean_from_pivot.unsqueeze(-1)
    if visible is not None:
        deviation = torch.where(visible, deviation, 0.0)
    return torch.where(count > 0, pivot + mean_from_pivot, 0.0), deviation.square().sum(-1) / divisor


def _chan(count: Tensor, mean: Tensor, var: Tensor, more: Tensor, more_mean: Tensor, more_var: Tensor) -> tuple[Tensor, Tensor]:
    divisor = (count + more).clamp(min=1.0)
    old, new = count / divisor, more / divisor
    between = more_mean - mean
    return mean + new * between, old * var + new * more_var + old * new * between.square()


def backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    """The gradients, tile by tile from recomputed logits.

    With D = Σ o·do per row: dz = p·(dp − D + g_lse − g_entropy·(ln p + H)), then back through the cap, the scale and q·k.
    """
    batch, heads, queries, keys = inputs.shape
    kv_heads = inputs.key.shape[1]
    dtype = inputs.compute_dtype
    grads = _Accumulators(inputs, needs)
    rows = _RowTerms(inputs, result, upstream)
    for start, end in _query_blocks(inputs):
        block = slice(start, end)
        query = fold_groups(inputs.query[:, :, block].to(dtype), kv_heads)
        upstream_output = None
        if upstream.output is not None:
            upstream_output = fold_groups(upstream.output[:, :, block].to(dtype), kv_heads)
        d_query = torch.zeros_like(query)
        for tile in _tiles(rules, start, end, keys):
            keep = _keep(inputs, rules, tile) if rules.dropout_p > 0.0 else None
            products, logits, visible = _tile_logits(inputs, rules, tile, query)
            shifted = logits - rows.shift[..., block].unsqueeze(-1)
            log_weights = shifted - rows.log_total[..., block].unsqueeze(-1)
            weights = torch.exp(log_weights)
            if visible is not None:
                weights = torch.where(visible, weights, 0.0)
            seen = _folded(visible, products.shape, kv_heads)

            d_weights: Tensor | float = 0.0
            if upstream_output is not None and inputs.value is not None:
                value = inputs.value[:, :, tile.key_start : tile.key_end].to(dtype)
                d_weights = unfold_groups(upstream_output @ value.transpose(-1, -2), heads)
                kept = weights
                if keep is not None:
                    d_weights, kept = d_weights * keep, weights * keep
                if needs.value:
                    grads.value[:, :, tile.key_start : tile.key_end] += weighted_sum(
                        fold_groups(kept, kv_heads).transpose(-1, -2), upstream_output, _flipped(seen), signed=True
                    )
            d_logits = weights * (d_weights + rows.constant[..., block].unsqueeze(-1))
            if rows.entropy_gradient is not None:
                surprise = torch.where(weights == 0.0, 0.0, log_weights + rows.entropy[..., block].unsqueeze(-1))
                d_logits = d_logits - weights * surprise * rows.entropy_gradient[..., block].unsqueeze(-1)
            if visible is not None:
                d_logits = torch.where(visible, d_logits, 0.0)
            if needs.mask:
                _add_reduced(mask_part(grads.mask, tile), d_logits)

            scale = _rows_of(inputs.scale, start, end).unsqueeze(-1)
            if rules.softcap is not None:
                d_logits = d_logits * (1.0 - torch.tanh(products * scale / rules.softcap).square())
                if visible is not None:
                    d_logits = torch.where(visible, d_logits, 0.0)
            if needs.scale:
                grads.add_scale(d_logits, products, visible, rows.product_pivot[..., block], start, end)
            if needs.query or needs.key:
                d_products = fold_groups(d_logits * scale, kv_heads)
                if needs.query:
                    key = inputs.key[:, :, tile.key_start : tile.key_end].to(dtype)
                    d_query = d_query + weighted_sum(d_products, key, seen, signed=True)
                if needs.key:
                    grads.key[:, :, tile.key_start : tile.key_end] += weighted_sum(
                        d_products.transpose(-1, -2), query, _flipped(seen), signed=True
                    )
        if needs.query:
            grads.query[:, :, block] = unfold_groups(d_query, heads)

    if inputs.sinks is not None and (needs.sinks or needs.scale):
        d_sink = rows.sink_gradient(inputs.sinks)
        if needs.sinks:
            grads.sinks.copy_(d_sink.sum((0, 2)))
    else:
        d_sink = None
    if needs.scale:
        grads.finish_scale(rows, d_sink, rules)
    return grads.rounded(inputs)


class _RowTerms:
    """What the backward pass needs of each row, [batch, heads, queries]."""

    def __init__(self, inputs: Inputs, result: Forward, upstream: Upstream) -> None:
        self.shift, self.log_total, product_max = result.saved[:3]
        self.entropy = result.entropy
        self.empty = result.lse == -math.inf
        # Any finite number near the products serves; it only keeps their differences small.
        self.product_pivot = torch.where(torch.isfinite(product_max), product_max, 0.0)
        dtype = inputs.compute_dtype
        self.lse_gradient = torch.zeros_like(self.shift) if upstream.lse is None else upstream.lse.to(dtype)
        self.entropy_gradient = None if upstream.entropy is None else upstream.entropy.to(dtype)
        self.constant = self.lse_gradient
        if upstream.output is not None and len(result.saved) == 4:
            self.constant = self.lse_gradient - (result.saved[3] * upstream.output.to(dtype)).sum(-1)

    def sink_gradient(self, sinks: Tensor) -> Tensor:
        """The gradient with respect to the sink's logit: a weight without a value, so dp is 0. [batch, heads, queries]."""
        log_weight = sinks.unsqueeze(-1) - self.shift - self.log_total
        weight = torch.exp(log_weight)
        gradient = weight * self.constant
        if self.entropy_gradient is not None:
            surprise = torch.where(weight == 0.0, 0.0, log_weight + self.entropy)
            gradient = gradient - weight * surprise * self.entropy_gradient
        return gradient


class _Accumulators:
    """The gradients as they grow, in the compute dtype; the empty tensor where none is wanted."""

    def __init__(self, inputs: Inputs, needs: Needs) -> None:
        dtype = inputs.compute_dtype

        def zeros(tensor: Tensor | None, need: bool) -> Tensor:
            return inputs.query.new_zeros(tensor.shape if need and tensor is not None else (0,), dtype=dtype)

        self.needs = needs
        self.query, self.key, self.value, self.mask, self.scale, self.sinks = (
            zeros(tensor, need) for tensor, need in zip(inputs, needs, strict=True)
        )
        rows = inputs.shape[:3] if needs.scale else (0,)
        self.scale_from_pivot, self.logit_sum = (inputs.query.new_zeros(rows, dtype=dtype) for _ in range(2))

    def add_scale(self, d_logits: Tensor, products: Tensor, visible: Tensor | None, pivot: Tensor, start: int, end: int) -> None:
        from_pivot = products - pivot.unsqueeze(-1)
        if visible is not None:
            from_pivot = torch.where(visible, from_pivot, 0.0)
        self.scale_from_pivot[..., start:end] += (d_logits * from_pivot).sum(-1)
        self.logit_sum[..., start:end] += d_logits.sum(-1)

    def finish_scale(self, rows: _RowTerms, d_sink: Tensor | None, rules: Rules) -> None:
        """ds = Σ dz·(u − pivot) + pivot·Σ dz.

        Without a cap Σ dz over keys and sink is the gradient of lse, exactly; the summed one would bring back the rounding
        that the pivot took out.
        """
        total = self.logit_sum
        if rules.softcap is None:
            exact = rows.lse_gradient if d_sink is None else rows.lse_gradient - d_sink
            total = torch.where(rows.empty, 0.0, exact)
        _add_reduced(self.scale, self.scale_from_pivot + rows.product_pivot * total)

    def rounded(self, inputs: Inputs) -> Gradients:
        grown = (self.query, self.key, self.value, self.mask, self.scale, self.sinks)
        return Gradients(
            *(
                gradient.to(tensor.dtype) if need and tensor is not None else None
                for gradient, tensor, need in zip(grown, inputs, self.needs, strict=True)
            )
        )


def _query_blocks(inputs: Inputs) -> list[tuple[int, int]]:
    batch, heads, queries, keys = inputs.shape
    per_query = max(1, batch * heads * min(max(keys, 1), _TILE_KEYS))
    size = max(16, _TILE_ELEMENTS // per_query)
    return [(start, min(start + size, queries)) for start in range(0, queries, size)]


def _tiles(rules: Rules, start: int, end: int, keys: int) -> list[Tile]:
    first, last = keys_in_reach(rules, start, end, keys)
    return [Tile(start, end, key, min(key + _TILE_KEYS, last)) for key in range(first, last, _TILE_KEYS)]


def _tile_logits(inputs: Inputs, rules: Rules, tile: Tile, query: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(products, logits, visible) of a tile; products and logits [batch, heads, tile queries, tile keys].

    Args:
        query: the block's queries, folded: [batch, kv_heads, groups · tile queries, d].
    """
    heads = inputs.shape[1]
    key = inputs.key[:, :, tile.key_start : tile.key_end].to(query.dtype)
    products = unfold_groups(query @ key.transpose(-1, -2), heads)
    visible, bias = masking(inputs, rules, tile)
    logits = logits_of(products, _rows_of(inputs.scale, tile.query_start, tile.query_end), rules.softcap, bias)
    return products, logits, visible


def _weighted(value: Tensor | None, weights: Tensor, visible: Tensor | None, tile: Tile, dtype: torch.dtype) -> Tensor:
    assert value is not None
    heads, kv_heads = weights.shape[1], value.shape[1]
    part = value[:, :, tile.key_start : tile.key_end].to(dtype)
    seen = _folded(visible, weights.shape, kv_heads) if visible is not None and nonfinite(part) else None
    return unfold_groups(weighted_sum(fold_groups(weights, kv_heads), part, seen, signed=False), heads)


def _keep(inputs: Inputs, rules: Rules, tile: Tile) -> Tensor:
    batch, heads = inputs.shape[:2]
    dtype, device = inputs.compute_dtype, inputs.query.device
    return keep_factor(rules.seed, rules.dropout_p, batch, heads, tile, dtype=dtype, device=device)


def _rows_of(tensor: Tensor, start: int, end: int) -> Tensor:
    return tensor if tensor.shape[-1] == 1 else tensor[..., start:end]


def _folded(visible: Tensor | None, shape: torch.Size, kv_heads: int) -> Tensor | None:
    return None if visible is None else fold_groups(visible.expand(shape), kv_heads)


def _flipped(visible: Tensor | None) -> Tensor | None:
    return None if visible is None else visible.transpose(-1, -2)


def _add_reduced(target: Tensor, addend: Tensor) -> None:
    """target += addend, summed over the dimensions in which the target is 1."""
    target += addend.sum_to_size(target.shape)
