"""A small language model that no library knows, with a mask for each layer: what probes must find by themselves."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, TOKENS, HEADS, WIDTH, BATCH = 61, 23, 3, 5, 2
Mask = Callable[[int], Tensor]


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def bidirectional(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


def but_for(*pairs: tuple[int, int], base: Mask = causal) -> Mask:
    """A mask with a few pairs (query, key) more."""

    def mask(length: int) -> Tensor:
        made = base(length)
        for query, key in pairs:
            made[query, key] = True
        return made

    return mask


def past(right: int, left: int | None = None) -> Mask:
    """A window around the diagonal."""

    def mask(length: int) -> Tensor:
        ones = torch.ones(length, length, dtype=torch.bool).tril(right)
        return ones if left is None else ones.triu(-left)

    return mask


def chunks(size: int, *, before: bool = True) -> Mask:
    """Blocks that see themselves whole, and the blocks before them."""

    def mask(length: int) -> Tensor:
        block = torch.arange(length) // size
        return block[:, None] >= block if before else block[:, None] == block

    return mask


def prefix(size: int, start: int = 0) -> Mask:
    """Causal, but for a block that sees itself whole."""

    def mask(length: int) -> Tensor:
        made = causal(length)
        made[start : start + size, start : start + size] = True
        return made

    return mask


class Attention(nn.Module):
    """Multi-head attention under a mask of its own; `padded`: whether it takes the padding mask too."""

    def __init__(self, mask: Mask, *, padded: bool = True) -> None:
        super().__init__()
        self.mask, self.padded = mask, padded
        self.q, self.k, self.v = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(3))

    def forward(self, x: Tensor, real: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = (layer(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mask = self.mask(k.shape[2])[-q.shape[2] :]
        if real is not None and self.padded:
            mask = mask & real[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2), (k, v)


class Language(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, *layers: Attention) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, HEADS * WIDTH), nn.Embedding(TOKENS, HEADS * WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HEADS * WIDTH, WORDS)

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.words(input_ids)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        real = None if attention_mask is None else attention_mask > 0
        return self.after(self.embedded(input_ids), real)

    def after(self, x: Tensor, real: Tensor | None) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = x + layer(x, real)[0]
        return self.head(x)


def language(*masks: Mask, kind: type[Language] = Language, padded: bool = True) -> Language:
    """A model with a layer for each mask; `padded`: whether its first layer takes the padding mask."""
    torch.manual_seed(0)
    return kind(*(Attention(mask, padded=padded or number > 0) for number, mask in enumerate(masks)))


def ids() -> Tensor:
    return torch.randint(3, WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def padded_on_the_left(blank: int = 7) -> Tensor:
    """An attention mask whose second row begins with padding."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, :blank] = 0
    return mask
