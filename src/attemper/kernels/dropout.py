"""Which weights dropout keeps: a function of (seed, batch, head, query, key), the same in every kernel, tile and pass.

The generator is Philox4x32-10 with the counter (key // 4, query, head, batch) and the seed as its 64-bit key; the weight of
key j takes word j mod 4 of the four that come out. Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy
as 1, 2, 3".
"""

import torch
from torch import Tensor

from attemper.kernels.spec import Tile

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def keep_factor(
    seed: int, dropout_p: float, batch: int, heads: int, tile: Tile, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What dropout multiplies each weight by: 0, or 1 / (1 − dropout_p). [batch, heads, tile queries, tile keys]."""
    if dropout_p >= 1.0:
        shape = (batch, heads, tile.query_end - tile.query_start, tile.key_end - tile.key_start)
        return torch.zeros(shape, dtype=dtype, device=device)
    words = _random_words(seed, batch, heads, tile, device)
    return (words >= round(dropout_p * 2**32)).to(dtype) / (1.0 - dropout_p)


def _random_words(seed: int, batch: int, heads: int, tile: Tile, device: torch.device) -> Tensor:
    first, last = tile.key_start // 4, -(-tile.key_end // 4)

    def axis(start: int, end: int, dimension: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dimension] = end - start
        return torch.arange(start, end, dtype=torch.int64, device=device).reshape(shape)

    counter = (axis(first, last, 3), axis(tile.query_start, tile.query_end, 2), axis(0, heads, 1), axis(0, batch, 0))
    words = torch.stack(torch.broadcast_tensors(*_philox(counter, seed)), -1).flatten(-2)
    return words[..., tile.key_start - 4 * first : tile.key_end - 4 * first]


def _philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        # 32 × 32 bits in int64: the product wraps, yet its bits are those of the unsigned one, and so are both halves.
        wide0, wide1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (wide0 >> 32) & _LOW, (wide1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, wide1 & _LOW, high0 ^ c3 ^ k1, wide0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
