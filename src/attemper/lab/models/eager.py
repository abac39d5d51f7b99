"""Attention written out in 16 bits, as a model does that has no kernel: what overflows and rounds there does so here.

Products of float16 numbers are added up in float32 and rounded to float16 at the end, as matrix units do; beyond 65504 that is
infinite, before any scale is applied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.ops import attention
from attemper.ops.listening import LISTENERS


def attend(
    q: Tensor, k: Tensor, v: Tensor, factor: float | Tensor, causal: bool, softcap: float | None, arithmetic: str
) -> Tensor:
    """softmax(factor·q·kᵀ)·v with every step in 16 bits.

    Args:
        q, k, v: [batch, heads, tokens, d].
        factor: on the products: a number, [heads], or [heads, queries].
        causal: whether key j is hidden from query i at j > i.
        softcap: bound on the logits.
        arithmetic: "fp16": the exponential is of z − max z, in float32. "fp16_naive", "bf16_naive": of z itself, in 16 bits, which is
            infinite from z = 11.09 on in float16, and at 88.73 in bfloat16.
    """
    dtype = torch.bfloat16 if arithmetic == "bf16_naive" else torch.float16
    if LISTENERS:  # what is measured is the logits of these very q and k before anything is rounded
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            attention(q.float(), k.float(), v.float(), is_causal=causal, scale=factor, softcap=softcap)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    logits = (q @ k.transpose(-2, -1)) * _spread(factor, dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        tokens, keys = logits.shape[-2:]
        later = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    if arithmetic == "fp16":
        logits = logits.float()
        powers = (logits - logits.amax(-1, keepdim=True)).exp()
    else:
        powers = logits.exp()
    weights = (powers / powers.sum(-1, keepdim=True)).to(dtype)
    return weights @ v


def _spread(factor: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    if not isinstance(factor, Tensor) or not factor.ndim:
        return factor
    return (factor[:, None, None] if factor.ndim == 1 else factor[..., None]).to(dtype)
