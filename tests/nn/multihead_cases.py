"""What the tests of multi-head attention share: sizes, parameters that show, and the definition of its heads."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from attemper.nn import MultiheadAttention

BATCH, TOKENS, EMBED = 2, 7, 12


def spread(module: nn.Module, std: float = 0.4) -> Any:
    """Every parameter drawn anew: none at 0 or 1, where it would not show."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def heads_of(module: MultiheadAttention, x: Tensor) -> list[Tensor]:
    """q, k and v of self-attention, [batch, heads, tokens, width], by the definition; for heads of one width."""
    inner = sum(module.layout.widths)
    kv_inner = sum(module.layout.kv_widths)
    assert module.in_proj_weight is not None
    parts = F.linear(x, module.in_proj_weight, module.in_proj_bias).split([inner, kv_inner, kv_inner], -1)
    return [part.unflatten(-1, (-1, module.head_dim or 0)).transpose(1, 2) for part in parts]


def finish(module: MultiheadAttention, heads: Tensor) -> Tensor:
    return module.out_proj(heads.transpose(1, 2).flatten(2))
