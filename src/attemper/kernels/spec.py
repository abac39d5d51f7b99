"""What every kernel is given and gives back: one problem in normal form, and the rules that decide who sees whom.

What it must hold:
- arguments were checked above; here shapes are 4-D, the scale is a tensor, and nothing is None that has a neutral value;
- visibility is defined once, for a whole problem or any tile of it, so that kernels cannot disagree on a mask;
- an invisible pair contributes nothing, even where its key or value is NaN.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rules(NamedTuple):
    """The parts of a problem that are not tensors.

    Attributes:
        is_causal, window, offset: who sees whom by position; key j and query i meet at j ≤ i + offset (causal) and
            i + offset − left ≤ j ≤ i + offset + right (window).
        row_step: where only every so many queries are given, query r of them is query i = r · row_step by position.
        softcap: z = softcap·tanh(scale·u / softcap) + bias; None: z = scale·u + bias.
        dropout_p, seed: probability of dropping a weight, and the seed of the counter-based generator that decides.
    """

    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    offset: int = 0
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int = 0
    row_step: int = 1

    def place(self, query: int) -> int:
        """The key at which a query stands: i + offset."""
        return query * self.row_step + self.offset

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """(left, right) of the window with the causal rule in it: −left ≤ j − (i + offset) ≤ right, None for no limit."""
        left, right = self.window if self.window is not None else (None, None)
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right


class Inputs(NamedTuple):
    """The tensors of a problem.

    query: [batch, heads, queries, d]; key: [batch, kv_heads, keys, d]; value: [batch, kv_heads, keys, d_v], or None where only
    statistics are wanted; mask: bool or float, each dimension of [batch, heads, queries, keys] or 1, or None; scale: float32
    (float64), each dimension of [batch, heads, queries] or 1; sinks: [heads], dtype of the scale, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Tensor | None
    scale: Tensor
    sinks: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[-2]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64 inputs, float32 otherwise: products accumulate, and statistics are kept, in it."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


class Forward(NamedTuple):
    """What a kernel's forward pass returns. No two of these share memory.

    output: [batch, heads, queries, d_v] in the input's dtype (None without values); lse, entropy: [batch, heads, queries];
    rest: [10, batch, heads, queries], see `RowStats.rest`, or None where statistics were not asked for; entropy may then be NaN.
    What the backward pass wants to see again, None where there will be none: figures: [FIGURES of the kernel, batch, heads,
    queries] in the compute dtype, None too where it wants none; unrounded: the output in the compute dtype, None too where that
    is its dtype.
    """

    output: Tensor | None
    lse: Tensor
    entropy: Tensor
    rest: Tensor | None
    figures: Tensor | None = None
    unrounded: Tensor | None = None


class Upstream(NamedTuple):
    """Gradients of the loss with respect to output, lse and entropy; None where the loss does not depend on it."""

    output: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


class Needs(NamedTuple):
    """Which gradients are wanted, in the order of `Inputs`."""

    query: bool
    key: bool
    value: bool
    mask: bool
    scale: bool
    sinks: bool


class Gradients(NamedTuple):
    """Gradients in the order of `Inputs`, each in the shape and dtype of its input; None where not wanted."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    mask: Tensor | None
    scale: Tensor | None
    sinks: Tensor | None


class Tile(NamedTuple):
    """A rectangle of the queries × keys plane, half-open."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int


class Masking(NamedTuple):
    """Who sees whom within a tile, and what is added to the logits there.

    visible: bool, broadcastable to [batch, heads, tile queries, tile keys], or None where all see all; bias: like it in the
    compute dtype, finite or NaN, or None.
    """

    visible: Tensor | None
    bias: Tensor | None


def masking(inputs: Inputs, rules: Rules, tile: Tile) -> Masking:
    """The mask, the causal rule and the window together, within one tile."""
    visible = _by_position(rules, tile, inputs.query.device)
    if inputs.mask is None:
        return Masking(visible, None)
    part = mask_part(inputs.mask, tile)
    if part.dtype == torch.bool:
        return Masking(part if visible is None else part & visible, None)
    hidden = part <= invisible_below(part.dtype, inputs.compute_dtype)
    shown = ~hidden if visible is None else ~hidden & visible
    return Masking(shown, torch.where(hidden, 0.0, part.to(inputs.compute_dtype)))


def invisible_below(dtype: torch.dtype, compute_dtype: torch.dtype) -> float:
    """A float mask at or below this hides the pair: half the most negative finite number of its dtype, so −inf too.

    Of the compute dtype, where that is the narrower: there the number would become −inf after all.
    """
    return max(torch.finfo(dtype).min, torch.finfo(compute_dtype).min) / 2


def mask_part(tensor: Tensor, tile: Tile) -> Tensor:
    """The tile's part of a tensor that broadcasts to [batch, heads, queries, keys]."""
    if tensor.shape[-2] != 1:
        tensor = tensor[..., tile.query_start : tile.query_end, :]
    if tensor.shape[-1] != 1:
        tensor = tensor[..., tile.key_start : tile.key_end]
    return tensor


def keys_in_reach(rules: Rules, query_start: int, query_end: int, keys: int) -> tuple[int, int]:
    """The half-open range of keys that position alone lets any of these queries see."""
    first, last = 0, keys - 1
    left, right = rules.sides
    if left is not None:
        first = max(first, rules.place(query_start) - left)
    if right is not None:
        last = min(last, rules.place(query_end - 1) + right)
    return first, max(first, last + 1)


def _by_position(rules: Rules, tile: Tile, device: torch.device) -> Tensor | None:
    left, right = rules.sides
    # Distance from the query's own place; the corners of the tile hold the extremes.
    lowest = tile.key_start - rules.place(tile.query_end - 1)
    highest = tile.key_end - 1 - rules.place(tile.query_start)
    if (right is None or highest <= right) and (left is None or lowest >= -left):
        return None
    queries = torch.arange(tile.query_start, tile.query_end, device=device).unsqueeze(-1) * rules.row_step + rules.offset
    distance = torch.arange(tile.key_start, tile.key_end, device=device) - queries
    visible = torch.ones_like(distance, dtype=torch.bool) if right is None else distance <= right
    return visible if left is None else visible & (distance >= -left)


def logits_of(products: Tensor, scale: Tensor, softcap: float | None, bias: Tensor | None) -> Tensor:
    """z from u = q·k: the scale, then the cap, then the bias.

    Args:
        products: [batch, heads, queries, keys]; scale: broadcastable to [batch, heads, queries].
    """
    logits = products * scale.unsqueeze(-1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if bias is None else logits + bias


def fold_groups(tensor: Tensor, kv_heads: int) -> Tensor:
    """[batch, heads, n, m] → [batch, kv_heads, heads / kv_heads · n, m]: the heads that share a key, row under row."""
    batch, heads, n, m = tensor.shape
    return tensor if heads == kv_heads else tensor.reshape(batch, kv_heads, heads // kv_heads * n, m)


def unfold_groups(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of `fold_groups`."""
    batch, kv_heads, n, m = tensor.shape
    return tensor if heads == kv_heads else tensor.reshape(batch, heads, kv_heads * n // heads, m)


def nonfinite(tensor: Tensor) -> bool:
    """Whether any element is NaN or infinite."""
    return not bool(torch.isfinite(tensor).all())


def weighted_sum(weights: Tensor, values: Tensor, visible: Tensor | None, *, signed: bool) -> Tensor:
    """weights @ values, in which an invisible value has no say even if it is NaN or infinite.

    A matrix product would form 0·NaN. Where values hold something non-finite that is visible, the sum says so: NaN, or the
    infinity itself where the weights are known not to be negative.

    Args:
        weights: [..., n, m], 0 at invisible places; values: [..., m, d]; visible: bool [..., n, m], None: all.
        signed: whether weights may be negative, so that the sign of an infinite sum is not known.
    """
    if visible is None or not nonfinite(values):
        return weights @ values
    flags = torch.cat([torch.isnan(values), values == math.inf, values == -math.inf], -1).to(weights.dtype)
    nan, above, below = ((visible.to(weights.dtype) @ flags) > 0).chunk(3, -1)
    total = weights @ torch.where(torch.isfinite(values), values, 0.0)
    total = torch.where(above, math.nan if signed else math.inf, total)
    total = torch.where(below, math.nan if signed else -math.inf, total)
    return torch.where(nan | (above & below), math.nan, total)
