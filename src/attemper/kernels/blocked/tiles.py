"""How the plane of queries × keys is cut, and what both passes compute of a tile."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.kernels.dropout import keep_factor
from attemper.kernels.spec import Inputs, Rules, Tile, fold_groups, keys_in_reach, logits_of, masking, unfold_groups

_TILE_KEYS = 256
# A few queries over many keys, as in decoding, would make tiles so small that calling torch is all that takes time.
_LEAST_ELEMENTS = 2**15
# Elements of a tile over all batches and heads: 2 MiB in float32, a few of which are alive at a time; near the fastest, too.
_TILE_ELEMENTS = 2**19


class TileLogits(NamedTuple):
    """A tile before its softmax: products and logits [batch, heads, tile queries, tile keys], and who is visible (None: all)."""

    products: Tensor
    logits: Tensor
    visible: Tensor | None

    def hide(self, tensor: Tensor, filler: float) -> Tensor:
        """The tensor with `filler` at invisible places."""
        return tensor if self.visible is None else torch.where(self.visible, tensor, filler)

    def folded_visible(self, kv_heads: int) -> Tensor | None:
        """`visible` in the shape of the folded tile, [batch, kv_heads, groups · tile queries, tile keys]."""
        return None if self.visible is None else fold_groups(self.visible.expand(self.logits.shape), kv_heads)


def query_blocks(inputs: Inputs) -> Iterator[tuple[int, int]]:
    """Half-open ranges of queries, each small enough that a tile of it keeps within its share of memory."""
    batch, heads, queries, keys = inputs.shape
    per_query = max(1, batch * heads * min(max(keys, 1), _TILE_KEYS))
    size = max(16, _TILE_ELEMENTS // per_query)
    for start in range(0, queries, size):
        yield start, min(start + size, queries)


def tiles(inputs: Inputs, rules: Rules, start: int, end: int) -> Iterator[Tile]:
    """The tiles of a block of queries; keys that position hides from all of them are left out."""
    batch, heads, _, keys = inputs.shape
    first, last = keys_in_reach(rules, start, end, keys)
    size = max(_TILE_KEYS, _LEAST_ELEMENTS // max(1, batch * heads * (end - start)))
    for key in range(first, last, size):
        yield Tile(start, end, key, min(key + size, last))


def tile_logits(inputs: Inputs, rules: Rules, tile: Tile, query: Tensor) -> TileLogits:
    """The logits of a tile.

    Args:
        query: the block's queries, folded: [batch, kv_heads, groups · tile queries, d].
    """
    products = unfold_groups(query @ keys_of(inputs.key, tile, query.dtype).transpose(-1, -2), inputs.shape[1])
    visible, bias = masking(inputs, rules, tile)
    return TileLogits(products, logits_of(products, scale_of(inputs, tile), rules.softcap, bias), visible)


def keys_of(tensor: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """The tile's part of key or value, in the compute dtype."""
    return tensor[:, :, tile.key_start : tile.key_end].to(dtype)


def scale_of(inputs: Inputs, tile: Tile) -> Tensor:
    """The tile's part of the scale, broadcastable to [batch, heads, tile queries]."""
    scale = inputs.scale
    return scale if scale.shape[-1] == 1 else scale[..., tile.query_start : tile.query_end]


def keep_of(inputs: Inputs, rules: Rules, tile: Tile) -> Tensor | None:
    """What dropout multiplies the tile's weights by; None without dropout."""
    if rules.dropout_p == 0.0:
        return None
    batch, heads = inputs.shape[:2]
    dtype, device = inputs.compute_dtype, inputs.query.device
    return keep_factor(rules.seed, rules.dropout_p, batch, heads, tile, dtype=dtype, device=device)
