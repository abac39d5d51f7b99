"""The forward pass: the online softmax over tiles, and the sums from which the record of each row follows."""

import math

import torch
from torch import Tensor

from attemper.kernels.blocked.tiles import TileLogits, keep_of, keys_of, query_blocks, tile_logits, tiles
from attemper.kernels.spec import Forward, Inputs, Rules, Tile, fold_groups, nonfinite, unfold_groups, weighted_sum
from attemper.stats import moments

FIGURES: int = 3  # kept for the backward pass: shift, total, product_max
LIKE_INPUTS: bool = False


def forward(inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
    """softmax(z) v and the record of z, one block of queries after another."""
    batch, heads, queries, _ = inputs.shape
    kv_heads, dtype, device = inputs.key.shape[1], inputs.compute_dtype, inputs.query.device
    output = None
    if inputs.value is not None:
        output = torch.empty(batch, heads, queries, inputs.value.shape[-1], dtype=dtype, device=device)
    lse, entropy = (torch.empty(batch, heads, queries, dtype=dtype, device=device) for _ in range(2))
    figures = torch.empty(FIGURES, batch, heads, queries, dtype=dtype, device=device) if differentiable else None
    rest = torch.empty(10, batch, heads, queries, dtype=dtype, device=device) if statistics else None
    for start, end in query_blocks(inputs):
        softmax, moments = _OnlineSoftmax(inputs, end - start), _Moments(inputs, end - start)
        query = fold_groups(inputs.query[:, :, start:end].to(dtype), kv_heads)
        for tile in tiles(inputs, rules, start, end):
            of_tile = tile_logits(inputs, rules, tile, query)
            if statistics:
                moments.add(of_tile, tile)
            softmax.add(inputs, rules, of_tile, tile)
        if inputs.sinks is not None:
            softmax.add_sink(inputs.sinks)
        softmax.finish()
        lse[..., start:end], entropy[..., start:end] = softmax.lse, softmax.entropy
        if figures is not None:
            figures[..., start:end] = torch.stack((softmax.shift, softmax.total, softmax.product_max))
        if output is not None and softmax.output is not None:
            output[:, :, start:end] = softmax.output
        if rest is not None:
            rest[..., start:end] = torch.stack(moments.fields(softmax))
    rounded = None if output is None else output.to(inputs.query.dtype)
    # The backward pass wants the output unrounded: D = Σ o·do would inherit its rounding.
    unrounded = None if rounded is output or not differentiable else output
    return Forward(rounded, lse, entropy, rest, figures, unrounded)


class _OnlineSoftmax:
    """Running sums of a block of rows, relative to the running maximum `top`; [batch, heads, block queries].

    total, squares, cubes: Σ e, Σ e², Σ e³ with e = e^(z − top); weighted: Σ e·(z − top); output: Σ e·v.
    """

    def __init__(self, inputs: Inputs, queries: int) -> None:
        shape = (*inputs.shape[:2], queries)
        self.dtype = inputs.compute_dtype
        self.top = inputs.query.new_full(shape, -math.inf, dtype=self.dtype)
        self.product_max = self.top
        self.total = self.weighted = self.squares = self.cubes = torch.zeros_like(self.top)
        self.output: Tensor | None = None
        if inputs.value is not None:
            self.output = inputs.query.new_zeros(*shape, inputs.value.shape[-1], dtype=self.dtype)

    def add(self, inputs: Inputs, rules: Rules, of_tile: TileLogits, tile: Tile) -> None:
        """Take in the keys of a tile."""
        logits = of_tile.hide(of_tile.logits, -math.inf)
        self.product_max = torch.maximum(self.product_max, of_tile.hide(of_tile.products, -math.inf).amax(-1))
        shift = self._raise_top(logits.amax(-1))
        shifted = logits - shift.unsqueeze(-1)
        exponentials = torch.exp(shifted)
        squares = exponentials.square()
        self.total = self.total + exponentials.sum(-1)
        self.weighted = self.weighted + (exponentials * torch.where(exponentials == 0.0, 0.0, shifted)).sum(-1)
        self.squares = self.squares + squares.sum(-1)
        self.cubes = self.cubes + (squares * exponentials).sum(-1)
        if self.output is None or inputs.value is None:
            return
        keep = keep_of(inputs, rules, tile)
        weights = exponentials if keep is None else exponentials * keep
        value, kv_heads = keys_of(inputs.value, tile, self.dtype), inputs.key.shape[1]
        visible = of_tile.folded_visible(kv_heads) if nonfinite(value) else None
        weighted = weighted_sum(fold_groups(weights, kv_heads), value, visible, signed=False)
        self.output = self.output + unfold_groups(weighted, inputs.shape[1])

    def add_sink(self, sinks: Tensor) -> None:
        """Take in the sink, a logit without a value; last."""
        logit = sinks.unsqueeze(-1).expand_as(self.top)
        shifted = logit - self._raise_top(logit)
        exponential = torch.exp(shifted)
        self.total = self.total + exponential
        self.weighted = self.weighted + exponential * torch.where(exponential == 0.0, 0.0, shifted)
        self.squares = self.squares + exponential.square()
        self.cubes = self.cubes + exponential.pow(3)

    def finish(self) -> None:
        """Divide out the total; rows that saw nothing are left with zeros."""
        nothing = self.top == -math.inf
        self.shift = torch.where(nothing, 0.0, self.top)
        safe = torch.where(nothing, 1.0, self.total)
        log_total = torch.log(safe)
        self.lse = torch.where(nothing, -math.inf, self.shift + log_total)
        self.entropy = torch.where(nothing, 0.0, log_total - self.weighted / safe)
        self.p2, self.p3 = self.squares / safe.square(), self.cubes / safe.pow(3)
        if self.output is not None:
            self.output = self.output / safe.unsqueeze(-1)
        self.total = safe

    def _raise_top(self, candidate: Tensor) -> Tensor:
        """Refer all sums to the larger maximum; the shift to subtract from new logits (0 for rows that saw nothing)."""
        raised = torch.maximum(self.top, candidate)
        shift = torch.where(raised == -math.inf, 0.0, raised)
        fresh = self.top == -math.inf
        fall = torch.where(fresh, 0.0, self.top - shift)
        shrink = torch.where(fresh, 0.0, torch.exp(fall))
        self.weighted = shrink * (self.weighted + self.total * fall)
        self.total = shrink * self.total
        self.squares = shrink.square() * self.squares
        self.cubes = shrink.pow(3) * self.cubes
        if self.output is not None:
            self.output = shrink.unsqueeze(-1) * self.output
        self.top = raised
        return shift


class _Moments:
    """The fields of the record that are plain sums and extremes over the keys; [batch, heads, block queries]."""

    def __init__(self, inputs: Inputs, queries: int) -> None:
        shape = (*inputs.shape[:2], queries)
        self.largest = inputs.query.new_full(shape, -math.inf, dtype=inputs.compute_dtype)
        self.smallest = self.product_min = torch.full_like(self.largest, math.inf)
        self.argmax = torch.full_like(self.largest, -1.0)
        self.count = self.mean = self.var = torch.zeros_like(self.largest)

    def add(self, of_tile: TileLogits, tile: Tile) -> None:
        """Take in the keys of a tile."""
        largest, argmax = of_tile.hide(of_tile.logits, -math.inf).max(-1)
        count = torch.full_like(self.count, tile.key_end - tile.key_start)
        if of_tile.visible is not None:
            # A mask may be 1 wide in the keys and stand for all of them.
            visible = of_tile.visible.expand(*of_tile.visible.shape[:-1], tile.key_end - tile.key_start)
            count = visible.sum(-1).to(count.dtype).expand_as(count)
        self._add_moments(of_tile, count)
        # A later tile must be larger to take over, so that a tie keeps the lowest index; NaN takes over and stays.
        ahead = (self.argmax < 0) | (largest > self.largest) | torch.isnan(largest)
        takes_over = (count > 0) & ahead & ~torch.isnan(self.largest)
        self.argmax = torch.where(takes_over, (argmax + tile.key_start).to(self.argmax.dtype), self.argmax)
        self.largest = torch.maximum(self.largest, largest)
        self.smallest = torch.minimum(self.smallest, of_tile.hide(of_tile.logits, math.inf).amin(-1))
        self.product_min = torch.minimum(self.product_min, of_tile.hide(of_tile.products, math.inf).amin(-1))

    def fields(self, softmax: _OnlineSoftmax) -> tuple[Tensor, ...]:
        """In the order of `RowStats.rest`."""
        sums = (self.mean, self.var, softmax.p2, softmax.p3)
        return self.count, self.largest, self.smallest, self.argmax, *sums, softmax.product_max, self.product_min

    def _add_moments(self, of_tile: TileLogits, count: Tensor) -> None:
        mean, var = moments(of_tile.logits, of_tile.visible, count)
        both = (self.count + count).clamp(min=1.0)
        old, new = self.count / both, count / both
        between = torch.where(count > 0, mean - self.mean, 0.0)
        self.mean = self.mean + new * between
        self.var = old * self.var + new * var + old * new * between.square()
        self.count = self.count + count
