"""`QKNorm`: queries and keys brought to one length before their product."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ArgumentError

KINDS = ("rms", "layer", "l2")
_OVERS = ("head", "all")


class QKNorm(nn.Module):
    """Normalises queries and keys, each with gains of its own; the logits are then bounded by the gains.

    x̂ = x / √(mean x² + eps) ("rms"), (x − mean x) / √(var x + eps) ("layer"), x / max(‖x‖, eps) ("l2"), over the entries of a
    head or of all heads; then x̂·gain, with `zero_centred` x̂·(1 + gain), and + bias. Computed in float32 (float64 for float64).
    After "l2" the product is a cosine: it wants a learned scale, not 1/√d. Rotary embeddings come after it.

    Args:
        head_dim: d, the width of a head.
        kind: "rms", "layer" or "l2".
        over: "head" normalises each head by itself, "all" the heads of a token together, as one vector of heads·d.
        num_heads, num_kv_heads: how many heads query and key have; asked for where a parameter or the norm spans the heads.
        gain: True: learned, [d] for all heads, or [heads·d] over all; "head": [heads, d], one for each; False: none.
        zero_centred: keep the gain as its distance from 1 (Gemma), so that weight decay pulls it to 1.
        bias: learned, of the shape of the gain.
        eps: keeps the division away from 0.
        device, dtype: of the parameters.

    Shapes: query [..., heads, queries, d], key [..., kv_heads, keys, d]; what comes back has the same shape and dtype.
    Parameters are `q_norm.weight`, `k_norm.weight` and `.bias`, as in Hugging Face's models.

    Raises:
        ArgumentError: an option that does not exist, or a shape that does not fit.

    Source: Henry et al. 2020 (arXiv 2010.04245) for "l2"; Dehghani et al. 2023 (arXiv 2302.05442), section 2, for "layer"; per
    head as in Qwen 3 and Gemma 3, over all heads as in OLMo 2, one gain a head as in Cohere.
    """

    def __init__(
        self,
        head_dim: int,
        kind: str = "rms",
        *,
        over: str = "head",
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        gain: bool | str = True,
        zero_centred: bool = False,
        bias: bool = False,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ArgumentError("kind", repr(kind), f"one of {', '.join(map(repr, KINDS))}")
        if over not in _OVERS:
            raise ArgumentError("over", repr(over), f"one of {', '.join(map(repr, _OVERS))}")
        if gain not in (True, False, "head"):
            raise ArgumentError("gain", repr(gain), "True, False or 'head'")
        if not eps > 0.0:
            raise ArgumentError("eps", repr(eps), "a number above 0")
        spans = over == "all" or gain == "head"
        if spans and num_heads is None:
            raise ArgumentError("num_heads", "None", "the number of query heads, since the norm or its gain spans them")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim, self.kind, self.over, self.zero_centred, self.eps = head_dim, kind, over, zero_centred, eps

        def shape(heads: int | None) -> tuple[int, ...]:
            if not spans or heads is None:
                return (head_dim,)
            return (heads, head_dim) if gain == "head" else (heads * head_dim,)

        made = {"gain": bool(gain), "bias": bias, "device": device, "dtype": dtype}
        self.q_norm = _Norm(self, shape(num_heads), **made)
        self.k_norm = _Norm(self, shape(kv_heads), **made)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both, normalised.

        Args:
            query: [..., heads, tokens, d]; key: [..., kv_heads, tokens, d].

        Returns:
            (query, key), in their shapes and dtypes.
        """
        return self.q_norm("query", query), self.k_norm("key", key)

    def extra_repr(self) -> str:
        """What tells two of them apart."""
        return f"{self.head_dim}, kind={self.kind!r}, over={self.over!r}, zero_centred={self.zero_centred}, eps={self.eps}"


class _Norm(nn.Module):
    """One of the two. `shape` of its parameters: (d,), (heads, d), or (heads·d,) over all heads."""

    def __init__(
        self,
        pair: QKNorm,
        shape: tuple[int, ...],
        *,
        gain: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.head_dim, self.kind, self.over, self.zero_centred, self.eps = (
            pair.head_dim,
            pair.kind,
            pair.over,
            pair.zero_centred,
            pair.eps,
        )
        self.shape = shape
        start = torch.zeros if self.zero_centred else torch.ones
        self.register_parameter("weight", nn.Parameter(start(shape, device=device, dtype=dtype)) if gain else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) if bias else None)

    def forward(self, name: str, x: Tensor) -> Tensor:
        self._check(name, x)
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        wide = wide.transpose(-3, -2).flatten(-2) if self.over == "all" else wide
        wide = self._normalise(wide)
        if self.over == "all":
            wide = wide.unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-3, -2)
        if self.weight is not None:
            gain = self._per_head(self.weight).to(wide.dtype)
            wide = wide * (1.0 + gain if self.zero_centred else gain)
        if self.bias is not None:
            wide = wide + self._per_head(self.bias).to(wide.dtype)
        return wide.to(x.dtype)

    def _normalise(self, x: Tensor) -> Tensor:
        if self.kind == "l2":
            return F.normalize(x, dim=-1, eps=self.eps)
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)

    def _per_head(self, parameter: Tensor) -> Tensor:
        """[d] as it is, [heads, d] and [heads·d] as [heads, 1, d]."""
        return parameter if self.shape == (self.head_dim,) else parameter.reshape(-1, 1, self.head_dim)

    def _check(self, name: str, x: Tensor) -> None:
        if x.ndim < 3 or x.shape[-1] != self.head_dim:
            raise ArgumentError(name, f"shape {tuple(x.shape)}", f"[..., heads, tokens, {self.head_dim}]")
        heads = math.prod(self.shape) // self.head_dim
        if (self.over == "all" or len(self.shape) == 2) and x.shape[-3] != heads:
            raise ArgumentError(name, f"{x.shape[-3]} heads", f"{heads}, as the norm was built for")
