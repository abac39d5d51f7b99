"""Attention with its weights written down, for those who ask to see them: queries·keys numbers a head."""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels import reference
from attemper.ops.arguments import check
from attemper.ops.autocast import without_autocast
from attemper.ops.listening import tell
from attemper.stats import RowStats


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
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
    problem = check(query, key, value, attn_mask, dropout_p, is_causal, **options)
    rules, dtype = problem.rules, problem.inputs.query.dtype
    if rules.dropout_p > 0.0:  # drawn as `attention` draws it
        rules = rules._replace(seed=int(torch.randint(2**63 - 1, (), device="cpu")))
    with without_autocast(query.device):
        output, rows, weights = reference.attend(problem.inputs, rules)
    assert output is not None
    record = problem.record(rows.lse, rows.entropy, rows.rest)
    tell(problem, record, shared=True)
    return problem.restore(output.to(dtype)), problem.restore(weights.to(dtype)), record
