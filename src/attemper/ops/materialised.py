"""Attention with its weights written down, for those who ask to see them: queries·keys numbers a head."""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels import reference
from attemper.ops.arguments import check, factor_of
from attemper.ops.attention import LISTENERS
from attemper.ops.autocast import under_autocast, without_autocast
from attemper.ops.dispatch import compiling
from attemper.scales import Scale
from attemper.stats import RowStats


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    offset: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, RowStats]:
    """What `attention` returns, and the weights: by the definition, whose memory is queries·keys.

    With the same state of torch's generator, dropout drops what it drops in `attention`.

    Args: as in `attention`, without `impl`.

    Returns:
        The output; the weights as they met the values, [..., heads, queries, keys] in the dtype of query, after dropout and 0 at
        invisible keys; `RowStats` of shape [..., heads, queries]. All but the record's packed fields are differentiable.

    Raises:
        ArgumentError: an argument does not fit; the message names it.
    """
    if isinstance(scale, Scale):
        scale = factor_of(scale, query, key, offset)
    query, key, value = under_autocast(query), under_autocast(key), under_autocast(value)
    problem = check(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, offset=offset, **options)
    rules = problem.rules
    if rules.dropout_p > 0.0:  # drawn as `attention` draws it
        rules = rules._replace(seed=int(torch.randint(2**63 - 1, (), device="cpu")))
    with without_autocast(query.device):
        output, rows, weights = reference.attend(problem.inputs, rules)
    assert output is not None
    if not compiling():
        for tell in LISTENERS:
            tell(problem, scale)
    record = RowStats(problem.restore(rows.lse), problem.restore(rows.entropy), problem.restore(rows.rest, before=1), rows.sink)
    return problem.restore(output.to(query.dtype)), problem.restore(weights.to(query.dtype)), record
