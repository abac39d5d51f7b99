"""`AdditiveAttention`: logits from a small network on each pair instead of a product."""

import math

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.kernels.spec import Inputs, Rules
from attemper.nn.additive_tiles import Pairs, blocked, plain
from attemper.stats import broadcasts_to

IMPLEMENTATIONS = ("auto", "plain", "blocked")

# Numbers in the hidden layer up to which "auto" writes it down: 32 MiB in float32.
_LARGEST_PLAIN = 2**23


class AdditiveAttention(nn.Module):
    """softmax(z)·V with z = vᵀ·tanh(W_q·q + W_k·k [+ b]) + mask: "Bahdanau" attention, of one head.

    |z − mask| ≤ ‖v‖₁ whatever the widths, so it needs no scale; how sharp it gets is up to v. Each pair costs hidden_dim tanh
    and, written down, hidden_dim numbers; the blocked form never holds more of them than a tile, and goes over the pairs twice
    again in the backward pass. Computed in float32 (float64 for float64). A row without a visible key gives output 0 and
    gradient 0.

    Args:
        query_dim: width of a query.
        key_dim: width of a key, query_dim if None.
        hidden_dim: d_a, width of the hidden layer, query_dim if None.
        bias: whether the hidden layer has one.
        dropout: probability with which a weight is dropped in training.
        impl: "plain" writes everything down, "blocked" works in tiles, "auto" is blocked where the hidden layer is large.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: an argument does not fit; the message names it.

    Source: Bahdanau, Cho, Bengio 2014 (arXiv 1409.0473), section A.1.2.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        hidden_dim: int | None = None,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if impl not in IMPLEMENTATIONS:
            raise ArgumentError("impl", repr(impl), f"one of {', '.join(map(repr, IMPLEMENTATIONS))}")
        if not 0.0 <= dropout <= 1.0:
            raise ArgumentError("dropout", repr(dropout), "a probability in [0, 1]")
        self.query_dim, self.key_dim = query_dim, query_dim if key_dim is None else key_dim
        self.hidden_dim = query_dim if hidden_dim is None else hidden_dim
        self.dropout, self.impl = dropout, impl
        made = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(self.query_dim, self.hidden_dim, bias=bias, **made)
        self.k_proj = nn.Linear(self.key_dim, self.hidden_dim, bias=False, **made)
        self.v = nn.Parameter(torch.empty(self.hidden_dim, **made))
        # As a linear layer of one output would start.
        nn.init.uniform_(self.v, -1.0 / math.sqrt(self.hidden_dim), 1.0 / math.sqrt(self.hidden_dim))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        offset: int = 0,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            query: [..., queries, query_dim]; key: [..., keys, key_dim]; value: [..., keys, d_v]; leading dimensions are equal.
            attn_mask: broadcastable to [..., queries, keys]; as in `attemper.attention`: bool, **True = take part**, or float,
                added to the logits.
            is_causal: key j is visible to query i at j ≤ i + offset; with a mask, both apply.
            offset: position of query 0 among the keys.
            need_weights: also return the weights; the plain form runs.

        Returns:
            The output, [..., queries, d_v] in the dtype of value, with `need_weights` (output, weights [..., queries, keys]).

        Raises:
            ArgumentError: an argument does not fit; the message names it.
        """
        self._check(query, key, value, attn_mask)
        leading, queries, keys = query.shape[:-2], query.shape[-2], key.shape[-2]
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        hidden_q, hidden_k = (
            each.reshape(math.prod(leading), 1, *each.shape[-2:]).to(dtype) for each in (self.q_proj(query), self.k_proj(key))
        )
        values = value.reshape(math.prod(leading), 1, keys, value.shape[-1]).to(dtype)
        mask = None if attn_mask is None else _flat(attn_mask, leading)
        dropping = self.training and self.dropout > 0.0
        pairs = Pairs(
            Inputs(hidden_q, hidden_k, values, mask, hidden_q.new_ones(1, 1, 1), None),
            Rules(
                is_causal=is_causal,
                offset=offset,
                dropout_p=self.dropout if dropping else 0.0,
                seed=int(torch.randint(2**63 - 1, (), device="cpu")) if dropping else 0,
            ),
        )
        direction = self.v.to(dtype)
        if need_weights or self._plainly(math.prod(leading) * queries * keys):
            output, weights = plain(pairs, direction)
            weights = weights.reshape(*leading, queries, keys).to(value.dtype)
        else:
            output, weights = blocked(pairs, direction), None
        output = output.reshape(*leading, queries, value.shape[-1]).to(value.dtype)
        return (output, weights) if need_weights and weights is not None else output

    def _plainly(self, pairs: int) -> bool:
        return self.impl == "plain" or (self.impl == "auto" and pairs * self.hidden_dim <= _LARGEST_PLAIN)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
        for name, x, width in (("query", query, self.query_dim), ("key", key, self.key_dim), ("value", value, None)):
            if not isinstance(x, Tensor):
                raise ArgumentError(name, type(x).__name__, "a torch.Tensor")
            if x.ndim < 2 or (width is not None and x.shape[-1] != width):
                raise ArgumentError(name, f"shape {tuple(x.shape)}", f"[..., tokens, {width or 'd_v'}]")
            if x.shape[:-2] != query.shape[:-2]:
                expected = f"{tuple(query.shape[:-2])}, those of query"
                raise ArgumentError(name, f"leading dimensions {tuple(x.shape[:-2])}", expected)
        if key.shape[-2] != value.shape[-2]:
            raise ArgumentError("value", f"{value.shape[-2]} tokens", f"{key.shape[-2]}: one value for each key")
        if attn_mask is None:
            return
        target = (*query.shape[:-1], key.shape[-2])
        if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
            raise ArgumentError(
                "attn_mask", str(attn_mask.dtype), "bool (True = take part), or a float dtype (added to the logits)"
            )
        if not broadcasts_to(attn_mask.shape, target):
            raise ArgumentError("attn_mask", f"shape {tuple(attn_mask.shape)}", f"one that broadcasts to {target}")


def _flat(mask: Tensor, leading: torch.Size) -> Tensor:
    """[batch or 1, 1, queries or 1, keys or 1]."""
    mask = mask.reshape(*(1,) * (len(leading) + 2 - mask.ndim), *mask.shape)
    if math.prod(mask.shape[:-2]) == 1:
        return mask.reshape(1, 1, *mask.shape[-2:])
    return mask.expand(*leading, *mask.shape[-2:]).reshape(math.prod(leading), 1, *mask.shape[-2:])
