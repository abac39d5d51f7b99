"""Entropy of a trained model's rows beside the bound of σReparam, from its weights and from what entered them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attemper.errors import LoadError
from attemper.lab.models import attention_layers, build
from attemper.lab.models.attention import Attention
from attemper.lab.store.results import RunResult
from attemper.lab.tasks import load_task
from attemper.scales import LogitShape

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


def measured_rows(run: RunResult, examples: int) -> Iterator[tuple[int, int, int, float, float, float, float, float, float, float, int]]:
    """Of each head: layer, head, keys, ‖W_q·W_kᵀ‖₂, ‖X·Xᵀ‖₂, σ, row norm, entropy, both bounds, rows below the one from σ.

    Args:
        run: whose model has neither rotary positions nor a norm on q and k, and a scale that is a number.
        examples: of the held-out text, whose last position is measured.

    Raises:
        LoadError: its weights cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    assert run.folder is not None
    path = run.folder / "model.safetensors"
    task = load_task(run.config.task)
    model = build(run.config, task)
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise LoadError(f"{path}: {error}; expected the weights of the run {run.id}") from error
    layers = list(attention_layers(model).values())
    seen: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _layer, inputs, _output: seen.append(inputs[0])) for layer in layers]
    batches = [batch.inputs["tokens"] for batch in task.validation()]
    with torch.no_grad():
        model.eval()(torch.cat(batches)[:examples])
    for hook in hooks:
        hook.remove()
    for place, (layer, inputs) in enumerate(zip(layers, seen, strict=True)):
        for head in range(run.config.model.heads):
            yield (place, head, *_head(layer, head, inputs.double()))


def _head(layer: Attention, head: int, x: Tensor) -> tuple[int, float, float, float, float, float, float, float, int]:
    """x: [examples, tokens, width], float64."""
    width = layer.layout.widths[head]
    rows = slice(sum(layer.layout.widths[:head]), sum(layer.layout.widths[: head + 1]))
    keys = x.shape[1]
    factor = layer.scale.factor(LogitShape(width, len(layer.layout.widths), keys, keys, 0, device=x.device))
    assert isinstance(factor, float)
    products = layer.q_proj.weight.detach().double()[rows].T @ layer.k_proj.weight.detach().double()[rows]
    logits = factor * (x[:, -1:] @ products @ x.transpose(1, 2))[:, 0]
    weights = torch.linalg.matrix_norm(products, 2)
    inputs = torch.linalg.matrix_norm(x, 2) ** 2
    sigma = factor * weights * inputs
    norms = torch.linalg.vector_norm(logits - logits.mean(-1, keepdim=True), dim=-1)
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    bound = entropy_bound(sigma, keys)
    figures = (inputs, sigma, norms, entropy, entropy_bound(norms, keys), bound)
    return keys, weights.item(), *(figure.mean().item() for figure in figures), int((entropy < bound - ROUNDING).sum())
