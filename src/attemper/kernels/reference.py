"""The definition of attention, materialised: every logit and weight is written down, in the precision it is given.

Float64 in, float64 throughout: this is the oracle that the other kernels are held against. The gradient is autograd's, through
the lines below, so it shares nothing with theirs.
"""

import torch
from torch import Tensor

from attemper.kernels.dropout import keep_factor
from attemper.kernels.spec import Forward, Gradients, Inputs, Needs, Rules, Tile, Upstream, logits_of, masking, nonfinite
from attemper.stats import RowStats, record_and_weights

FIGURES: int = 0  # the backward pass keeps nothing: it goes forward again
LIKE_INPUTS: bool = False


def forward(inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
    """softmax(z) v and the record of z."""
    output, rows, _ = attend(inputs, rules)
    output = None if output is None else output.to(inputs.query.dtype)
    return Forward(output, rows.lse, rows.entropy, rows.rest if statistics else None)


def backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    """The gradients, by autograd through the definition."""
    with torch.enable_grad():
        query, key, value, mask, scale, sinks = (_leaf(tensor, need) for tensor, need in zip(inputs, needs, strict=True))
        assert query is not None
        assert key is not None
        assert scale is not None
        leaves = Inputs(query, key, value, mask, scale, sinks)
        output, rows, _ = attend(leaves, rules)
        pairs = [
            (tensor, gradient.to(tensor.dtype))
            for tensor, gradient in zip((output, rows.lse, rows.entropy), upstream, strict=True)
            if tensor is not None and gradient is not None and tensor.requires_grad
        ]
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if leaf is not None and need]
        outputs, gradients = [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, materialize_grads=True))
    return Gradients(*(next(found) if need else None for need in needs))


def _leaf(tensor: Tensor | None, need: bool) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(need)


def attend(inputs: Inputs, rules: Rules) -> tuple[Tensor | None, RowStats, Tensor]:
    """The output, the record, and the weights as they met the values, after dropout; all in the compute dtype, by autograd."""
    batch, heads, queries, keys = inputs.shape
    dtype = inputs.compute_dtype
    groups = heads // max(inputs.key.shape[1], 1)
    query = inputs.query.to(dtype)
    key = inputs.key.to(dtype).repeat_interleave(groups, 1)
    value = None if inputs.value is None else inputs.value.to(dtype).repeat_interleave(groups, 1)
    whole = Tile(0, queries, 0, keys)
    visible, bias = masking(inputs, rules, whole)
    seen = None if visible is None else visible.expand(batch, heads, queries, keys)

    products = _products(query, key, seen)
    scale = _per_row(inputs.scale, batch, heads, queries)
    sinks = None if inputs.sinks is None else _per_row(inputs.sinks.unsqueeze(-1), batch, heads, queries)
    logits = logits_of(products, scale, rules.softcap, bias)
    rows, weights = record_and_weights(logits, seen, products, sinks)
    if value is None:
        return None, rows, weights
    if rules.dropout_p > 0.0:
        weights = weights * keep_factor(rules.seed, rules.dropout_p, batch, heads, whole, dtype=dtype, device=query.device)
    return _weighted(weights, value, seen), rows, weights


def _per_row(tensor: Tensor, batch: int, heads: int, queries: int) -> Tensor:
    """The tensor for every row, by way of float64: what flows back adds up in it over the rows."""
    return tensor.double().expand(batch, heads, queries).to(tensor.dtype)


# In the two products an invisible pair must not multiply: 0·NaN is NaN, forward and backward. Where something is not finite
# they are therefore written out element by element, with the invisible ones replaced, at the price of queries·keys·d numbers.


def _products(query: Tensor, key: Tensor, visible: Tensor | None) -> Tensor:
    if visible is None or not (nonfinite(query) or nonfinite(key)):
        return query @ key.transpose(-1, -2)
    seen = visible.unsqueeze(-1)
    return (torch.where(seen, query.unsqueeze(-2), 0.0) * torch.where(seen, key.unsqueeze(-3), 0.0)).sum(-1)


def _weighted(weights: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    if visible is None or not nonfinite(value):
        return weights @ value
    return (weights.unsqueeze(-1) * torch.where(visible.unsqueeze(-1), value.unsqueeze(-3), 0.0)).sum(-2)
