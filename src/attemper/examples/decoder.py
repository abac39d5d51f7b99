"""A small byte-level decoder whose attention scale is an argument: the one thing in which the two example models differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attemper.examples.passage import passage_inputs
from attemper.examples.provenance import Provenance

BYTES = 256
WIDTH = 128
HEADS = 2
LAYERS = 4
HIDDEN = 256
CONTEXT = 128
ROTARY_BASE = 10_000.0


class CausalSelfAttention(nn.Module):
    """Causal self-attention with rotary positions: softmax(scale · q·kᵀ) v over the keys at or before each query.

    Args:
        width: size of the residual stream.
        heads: how many heads; each is width / heads wide.
        scale: the factor on q·k. 1/√d_head is the usual one, 1.0 leaves the products as they are.
    """

    def __init__(self, width: int, heads: int, scale: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.scale = scale
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, tokens, width]."""
        query, key, value = (self._split(project(hidden)) for project in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True, scale=self.scale)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm two-layer perceptron, each added to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int, scale: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = CausalSelfAttention(width, heads, scale)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, tokens, width]."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    """Predicts the next byte of a text: embedding, pre-norm blocks, RMSNorm, output layer.

    Args:
        scale: the factor on q·k in every layer, handed to `F.scaled_dot_product_attention` as it is.

    Attributes:
        provenance: how the weights were trained; None before they were loaded.
    """

    provenance: Provenance | None = None

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, HIDDEN, scale) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # Unit-variance inputs, which RMSNorm gives, become unit-variance q and k: the case that 1/√d was argued from.
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits over the next byte.

        Args:
            input_ids: bytes, [batch, tokens], int64, 0 to 255.

        Returns:
            [batch, tokens, 256], in the dtype of the weights.
        """
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def example_inputs(self) -> dict[str, Tensor]:
        """Keyword arguments for one forward pass over real text: {"input_ids": int64 [batch, tokens]}."""
        return {"input_ids": passage_inputs(CONTEXT)}


def rotate(vectors: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2104.09864): turns each pair (x_i, x_{i+d/2}) by position · base^(-2i/d).

    Args:
        vectors: queries or keys of positions 0, 1, 2, …, [batch, heads, tokens, d].
    """
    tokens, width = vectors.shape[-2:]
    steps = torch.arange(0, width, 2, device=vectors.device, dtype=torch.float32)
    positions = torch.arange(tokens, device=vectors.device, dtype=torch.float32)
    angles = positions[:, None] * ROTARY_BASE ** (-steps / width)
    # Angles in float32 whatever the weights are: in float16 neighbouring positions past 2048 would coincide.
    cosine, sine = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
