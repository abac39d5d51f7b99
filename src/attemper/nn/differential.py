"""`DifferentialAttention`: the difference of two softmaxes."""

import math

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.nn.rotary import RotaryEmbedding
from attemper.ops import attention


class DifferentialAttention(nn.Module):
    """(softmax(q₁k₁ᵀ/√d) − λ·softmax(q₂k₂ᵀ/√d))·v in each head, then RMS norm and × (1 − λ_init): what both share cancels.

    λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init, learned, one for all heads; λ_init = 0.8 − 0.6·e^(−0.3·layer). Each head has two
    queries and two keys of width d = embed_dim / (2·num_heads), and one value of width 2d.

    Args:
        embed_dim: width of input and output, a multiple of 2·num_heads.
        num_heads: how many differences are formed.
        layer: number of the layer, from 0.
        dropout: probability with which a weight is dropped in training, independently in the two softmaxes.
        bias: whether the projections have one.
        rope: turns queries and keys.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: an argument does not fit; the message names it.

    Source: Ye et al. 2024 (arXiv 2410.05258), section 2.1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        dropout: float = 0.0,
        bias: bool = False,
        rope: RotaryEmbedding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % (2 * num_heads):
            raise ArgumentError("embed_dim", str(embed_dim), f"a multiple of 2·num_heads = {2 * num_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // (2 * num_heads)
        self.dropout, self.rope = dropout, rope
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        made = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, bias=bias, **made) for _ in range(4)
        )
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.randn(self.head_dim, **made) * 0.1) for _ in range(4)
        )
        self.norm = nn.RMSNorm(2 * self.head_dim, eps=1e-5, **made)

    def factor(self) -> Tensor:
        """λ, 0-d, float32."""
        first, second = (
            torch.exp((q.float() * k.float()).sum())
            for q, k in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        return first - second + self.lambda_init

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Self-attention.

        Args:
            x: [batch, tokens, embed_dim].
            attn_mask: broadcastable to [batch, heads, tokens, tokens], as in `attemper.attention`: bool, **True = take part**, or
                float, added to the logits of both softmaxes.
            is_causal: key j is visible to query i at j ≤ i; with a mask, both apply.

        Returns:
            [batch, tokens, embed_dim].
        """
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            raise ArgumentError("x", f"shape {tuple(x.shape)}", f"[batch, tokens, {self.embed_dim}]")
        q, k = (proj(x).unflatten(-1, (self.num_heads, 2, self.head_dim)) for proj in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2)
        attended = []
        for which in (0, 1):
            query, key = (each[:, :, :, which].transpose(1, 2) for each in (q, k))
            if self.rope is not None:
                query, key = self.rope(query), self.rope(key)
            attended.append(attention(query, key, v, attn_mask, self.dropout if self.training else 0.0, is_causal))
        difference = attended[0] - self.factor().to(v.dtype) * attended[1]
        heads = self.norm(difference) * (1.0 - self.lambda_init)
        return self.out_proj(heads.transpose(1, 2).flatten(-2))
