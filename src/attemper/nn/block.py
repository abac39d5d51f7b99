"""`Block`: one pre-norm layer of a transformer, whose attention takes every option."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.nn.multihead import MultiheadAttention
from attemper.stats import RowStats

_NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Block(nn.Module):
    """x ← x + attention(norm(x)); x ← x + W₂·gelu(W₁·norm(x)).

    Args:
        embed_dim: width of the stream.
        num_heads: number of query heads.
        mlp_ratio: width of the hidden layer over embed_dim.
        norm: "layer" or "rms".
        device, dtype: of the parameters.
        options: keyword arguments of `MultiheadAttention`, such as `scale`, `qk_norm`, `softcap`, `sinks`, `rope`.

    Raises:
        ArgumentError: an argument does not fit; the message names it.

    Source: Xiong et al. 2020 (arXiv 2002.04745), figure 1 (b).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        norm: str = "layer",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if norm not in _NORMS:
            raise ArgumentError("norm", repr(norm), f"one of {', '.join(map(repr, _NORMS))}")
        if "batch_first" in options:
            raise ArgumentError("batch_first", repr(options["batch_first"]), "nothing: a Block is [batch, tokens, width]")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention_norm, self.mlp_norm = _NORMS[norm](embed_dim, **made), _NORMS[norm](embed_dim, **made)
        self.attention = MultiheadAttention(embed_dim, num_heads, batch_first=True, **made, **options)
        hidden = round(mlp_ratio * embed_dim)
        self.widen, self.narrow = nn.Linear(embed_dim, hidden, **made), nn.Linear(hidden, embed_dim, **made)

    def forward(
        self,
        x: Tensor,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, RowStats]:
        """One layer.

        Args:
            x: [batch, tokens, embed_dim].
            attn_mask, key_padding_mask: as in `MultiheadAttention`, True = hidden.
            is_causal: key j is visible to query i at j ≤ i.
            return_stats: also return the record of the logits, [batch, heads, tokens].

        Returns:
            [batch, tokens, embed_dim], or the pair (that, `RowStats`).
        """
        normed = self.attention_norm(x)
        attended, _, *rows = self.attention(
            normed, normed, normed, key_padding_mask, False, attn_mask, is_causal=is_causal, return_stats=return_stats
        )
        x = x + attended
        x = x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))
        return (x, rows[0]) if rows else x
