"""Entropy of a model's rows, and the bound of σReparam on it, from the weights and from what entered them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.lab.models import attention_layers, build
from attemper.lab.models.attention import Attention
from attemper.lab.store.files import load_weights
from attemper.lab.store.results import RunResult
from attemper.lab.tasks import load_task
from attemper.scales import LogitShape

# Rotary positions, a norm on q and k, and a cap stand between the weights and the logits; `_Head` knows none of them.
MEASURABLE = ("model.position", "model.qk_norm", "model.softcap")
ROUNDING = 1e-4  # nats, far above float32's, far below any entropy of note


def entropy_bound(sigma: Tensor, keys: int) -> Tensor:
    """The lowest entropy of a softmax over `keys` logits whose norm about their mean is at most σ, in nats; 0 of one key.

    H ≥ ln(1 + (T−1)·β) + σ·√(T(T−1))·β / (1 + (T−1)·β) with β = exp(−σ·√(T/(T−1))) (Zhai et al. 2023, theorem 3.1).

    Args:
        sigma: of any shape. keys: T.
    """
    if keys < 2:
        return torch.zeros_like(sigma)
    rest = (keys - 1) * torch.exp(-sigma * math.sqrt(keys / (keys - 1)))
    return torch.log1p(rest) + sigma * math.sqrt(keys / (keys - 1)) * rest / (1 + rest)


class HeadEntropy(NamedTuple):
    """Mean entropy over ln n of one head, NaN of one key; `when`: "before" the training or "after" it; `width`: d_k."""

    run: str
    when: str
    layer: int
    head: int
    width: int
    normalized: float


def entropies(run: RunResult, examples: int) -> Iterator[HeadEntropy]:
    """Of each head, at the last position of held-out examples; the arguments are those of `measured_rows`."""
    for when in ("before", "after"):
        for place, (layer, inputs) in enumerate(seen_by_layers(run, examples, trained=when == "after")):
            for head, width in enumerate(layer.layout.widths):
                entropy = torch.special.entr(_Head(layer, head, inputs).logits.softmax(-1)).sum(-1).mean().item()
                most = math.log(inputs.shape[1])
                yield HeadEntropy(run.id, when, place, head, width, entropy / most if most else math.nan)


def measured_rows(
    run: RunResult, examples: int
) -> Iterator[tuple[int, int, int, float, float, float, float, float, float, float, int]]:
    """Of each head: layer, head, keys, ‖W_q·W_kᵀ‖₂, ‖X·Xᵀ‖₂, σ, row norm, entropy, both bounds, rows below the one from σ.

    Args:
        run: whose model has neither rotary positions nor a norm on q and k, and a scale that is a number.
        examples: of the held-out text, whose last position is measured.

    Raises:
        LoadError: its weights cannot be read.
    """
    for place, (layer, inputs) in enumerate(seen_by_layers(run, examples, trained=True)):
        for head in range(len(layer.layout.widths)):
            yield (place, head, *_bounds(_Head(layer, head, inputs)))


def seen_by_layers(run: RunResult, examples: int, *, trained: bool) -> list[tuple[Attention, Tensor]]:
    """The attention layers of the run's model, as it was drawn or as it was trained, each with what entered it.

    Returns:
        With each layer its input, float64 [examples, tokens, width].

    Raises:
        LoadError: the weights cannot be read.
    """
    task = load_task(run.config.task)
    torch.manual_seed(run.config.seed)
    model = build(run.config, task)
    if trained:
        load_weights(model, run)
    layers = [layer for layer in attention_layers(model).values() if isinstance(layer, Attention)]
    seen: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _layer, inputs, _output: seen.append(inputs[0].double())) for layer in layers]
    with torch.no_grad():
        model.eval()(torch.cat([batch.inputs["tokens"] for batch in task.validation()])[:examples])
    for hook in hooks:
        hook.remove()
    return list(zip(layers, seen, strict=True))


class _Head:
    """Scale, W_q·W_kᵀ and the last row's logits of one head, in float64."""

    def __init__(self, layer: Attention, head: int, x: Tensor) -> None:
        widths, keys = layer.layout.widths, x.shape[1]
        rows = slice(sum(widths[:head]), sum(widths[: head + 1]))
        width = widths[head] if layer.shared_width is None else layer.shared_width
        factor = layer.scale.factor(LogitShape(width, len(widths), keys, keys, 0, device=x.device))
        assert isinstance(factor, float)
        self.x, self.factor = x, factor
        self.weights = layer.q_proj.weight.detach().double()[rows].T @ layer.k_proj.weight.detach().double()[rows]
        self.logits = factor * (x[:, -1:] @ self.weights @ x.transpose(1, 2))[:, 0]


def _bounds(head: _Head) -> tuple[Any, ...]:
    keys = head.x.shape[1]
    weights = torch.linalg.matrix_norm(head.weights, 2)
    inputs = torch.linalg.matrix_norm(head.x, 2) ** 2
    sigma = head.factor * weights * inputs
    norms = torch.linalg.vector_norm(head.logits - head.logits.mean(-1, keepdim=True), dim=-1)
    entropy = torch.special.entr(head.logits.softmax(-1)).sum(-1)
    bound = entropy_bound(sigma, keys)
    figures = (inputs, sigma, norms, entropy, entropy_bound(norms, keys), bound)
    mean = tuple(figure.mean().item() for figure in figures)
    return keys, weights.item(), *mean, int((entropy < bound - ROUNDING).sum())
