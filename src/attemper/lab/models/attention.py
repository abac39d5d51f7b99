"""One attention layer of the lab, in which scale rule, norm, cap, head widths, and arithmetic are dials.

What it must hold:
- the logits that `attemper.watch` reports are those of the q and k that the layer used; in emulated 16 bits as numbers, where the
  emulation itself may have infinity;
- q and k are made by linear layers of their own, so that the gradient into them can be read from their weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.lab.arithmetic import DTYPES, attend, current, rounded
from attemper.lab.config import Model
from attemper.lab.models.rules import rule_of, shared_width
from attemper.nn import QKNorm, RotaryEmbedding
from attemper.nn.heads import HeadGroup, lay_out
from attemper.ops import attention
from attemper.ops.listening import LISTENERS
from attemper.scales import LogitShape


class Attention(nn.Module):
    """softmax(scale·q·kᵀ)·v of several heads, without biases.

    Args:
        config: the dials.
        tokens: length of the training examples.
        causal: whether query i sees key j at j ≤ i alone.

    "fp32" and "bf16" (see `computing`) go through `attemper.attention`; the others are written out, as models do without a
    kernel.

    Attributes:
        logit_factor: κ, on top of the rule and below the cap.
    """

    def __init__(self, config: Model, tokens: int, causal: bool) -> None:
        super().__init__()
        self.layout = lay_out(config.width, config.heads, None, config.head_dim)
        inner = sum(self.layout.widths)
        # By these names QK-clip finds the heads of the projections; of unequal widths it does not.
        alike = len(self.layout.groups) == 1
        self.num_heads, self.head_dim = (config.heads, self.layout.widths[0]) if alike else (None, None)
        self.q_proj = nn.Linear(config.width, inner, bias=False)
        self.k_proj = nn.Linear(config.width, inner, bias=False)
        self.v_proj = nn.Linear(config.width, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.width, bias=False)
        self.scale = rule_of(config, tokens, causal)
        self.shared_width = shared_width(config)
        widths = [group.width for group in self.layout.groups]
        self.norms = nn.ModuleList(QKNorm(width, "rms") for width in widths) if config.qk_norm else None
        rotary = config.position == "rotary"
        if rotary and min(widths) < 2:
            raise ArgumentError("model.head_dim", min(widths), "at least 2, so that a pair can turn; or another model.position")
        self.rotary = nn.ModuleList(RotaryEmbedding(width - width % 2) for width in widths) if rotary else None
        self.softcap, self.causal = config.softcap, causal
        self.logit_factor = 1.0

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """[batch, tokens, width] -> the same; keys and values come from `memory`, if it is given."""
        source = x if memory is None else memory
        parts = zip(
            self.layout.groups,
            self.layout.split(self.q_proj(x)),
            self.layout.split_kv(self.k_proj(source)),
            self.layout.split_kv(self.v_proj(source)),
            strict=True,
        )
        mixed = [self._attend(place, group, q, k, v, memory is None) for place, (group, q, k, v) in enumerate(parts)]
        return self.o_proj(self.layout.join(mixed))

    def _attend(self, place: int, group: HeadGroup, q: Tensor, k: Tensor, v: Tensor, within: bool) -> Tensor:
        if self.norms is not None:
            q, k = self.norms[place](q, k)
        if self.scale.unit_operands:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.rotary is not None and within:  # positions of two sequences are not comparable
            q, k = self.rotary[place](q), self.rotary[place](k)
        factor = self._factor(group, q.shape[-2], k.shape[-2], q.device)
        arithmetic = current()
        if arithmetic in DTYPES:
            q, k = rounded(q, DTYPES[arithmetic]), rounded(k, DTYPES[arithmetic])
            if LISTENERS:
                with torch.no_grad():
                    attention(q, k, v, is_causal=self.causal, scale=factor, softcap=self.softcap)
            if isinstance(factor, Tensor) and factor.ndim:
                factor = factor[:, None, None] if factor.ndim == 1 else factor[..., None]
            return attend(q, k, v, factor, causal=self.causal, softcap=self.softcap, arithmetic=arithmetic)
        return attention(q, k, v, is_causal=self.causal, scale=factor, softcap=self.softcap)

    def _factor(self, group: HeadGroup, queries: int, keys: int, device: torch.device) -> float | Tensor:
        heads = self.layout.widths
        width = group.width if self.shared_width is None else self.shared_width
        factor = self.scale.factor(LogitShape(width, len(heads), queries, keys, 0, device=device))
        if isinstance(factor, Tensor) and factor.ndim and len(group.heads) < len(heads):
            dim = -1 if factor.ndim == 1 else -2
            if factor.shape[dim] > 1:
                factor = factor.index_select(dim, torch.tensor(group.heads, device=device))
        return factor if self.logit_factor == 1.0 else factor * self.logit_factor
