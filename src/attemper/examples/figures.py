"""What the attention of an example model does on a text, from the logits written out in float64.

Deliberately the long way round, with none of attemper's own statistics: what the examples show must not depend on the code
that they are there to show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attemper.examples.decoder import CausalSelfAttention, Decoder, rotate

SATURATED = 0.99


@dataclass(frozen=True)
class HeadFigures:
    """One head of one layer, over all rows (queries) with at least two visible keys.

    Attributes:
        layer, head: which one.
        logit_max, logit_std: of the visible logits.
        saturated: share of rows whose largest weight is above 0.99.
        entropy: mean of H / ln(visible keys).
        gain: mean of 1 − Σ p².
        query_gradient, key_gradient, value_gradient: Frobenius norm of the loss's gradient in the projection of this head.
    """

    layer: int
    head: int
    logit_max: float
    logit_std: float
    saturated: float
    entropy: float
    gain: float
    query_gradient: float
    key_gradient: float
    value_gradient: float


def measure(model: Decoder, input_ids: Tensor) -> list[HeadFigures]:
    """Figures of every head on one batch, layer by layer.

    Args:
        model: an example model; its gradients are cleared.
        input_ids: bytes, [batch, tokens], int64; the last of a row is only predicted, so attention sees tokens − 1.
    """
    seen: dict[int, Tensor] = {}

    def keep(layer: int, _module: nn.Module, arguments: tuple[Tensor]) -> None:
        seen[layer] = arguments[0].detach().double()

    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    handles = [module.register_forward_pre_hook(partial(keep, layer)) for layer, module in enumerate(layers)]
    try:
        model.zero_grad()
        next_byte_loss(model, input_ids).backward()
    finally:
        for handle in handles:
            handle.remove()
    figures = [row for layer, module in enumerate(layers) for row in layer_figures(layer, module, seen[layer])]
    model.zero_grad()
    return figures


def next_byte_loss(model: Decoder, input_ids: Tensor) -> Tensor:
    """Mean of −ln p(next byte) over a batch, in nats.

    Args:
        model: an example model.
        input_ids: bytes, [batch, tokens], int64; the first is not predicted, the last predicts nothing.
    """
    return F.cross_entropy(model(input_ids[:, :-1]).flatten(0, 1), input_ids[:, 1:].flatten())


def layer_figures(layer: int, module: CausalSelfAttention, hidden: Tensor) -> list[HeadFigures]:
    """Figures of one layer's heads, from what went into the layer: [batch, tokens, width], float64."""

    def project(linear: nn.Linear) -> Tensor:
        parts = (hidden @ linear.weight.detach().double().T).unflatten(-1, (module.heads, module.head_dim))
        return rotate(parts.transpose(1, 2))

    tokens = hidden.shape[1]
    logits = module.scale * project(module.q_proj) @ project(module.k_proj).mT
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    # The first query sees one key: its weight is 1 whatever the logit is.
    weights = logits.masked_fill(~visible, -math.inf).softmax(-1)[:, :, 1:]
    entropy = torch.special.entr(weights).sum(-1) / torch.arange(2, tokens + 1).double().log()
    gradients = [gradient_norms(projection, module.heads) for projection in (module.q_proj, module.k_proj, module.v_proj)]
    return [
        HeadFigures(
            layer=layer,
            head=head,
            logit_max=logits[:, head, visible].max().item(),
            logit_std=logits[:, head, visible].std().item(),
            saturated=(weights[:, head].amax(-1) > SATURATED).double().mean().item(),
            entropy=entropy[:, head].mean().item(),
            gain=(1 - weights[:, head].square().sum(-1)).mean().item(),
            query_gradient=gradients[0][head],
            key_gradient=gradients[1][head],
            value_gradient=gradients[2][head],
        )
        for head in range(module.heads)
    ]


def gradient_norms(projection: nn.Linear, heads: int) -> list[float]:
    """Frobenius norm of the gradient in each head's rows of a projection."""
    gradient = projection.weight.grad
    return [] if gradient is None else gradient.unflatten(0, (heads, -1)).flatten(1).norm(dim=1).tolist()
