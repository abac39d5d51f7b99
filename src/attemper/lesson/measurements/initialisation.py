"""What initialisations make of an input of variance 1: q, and the logits."""

from dataclasses import dataclass

import torch
from torch import nn

from attemper.lesson.figures import Figure, Measured, averaged, estimates, over_seeds
from attemper.ops.attention import row_stats

_TOKENS, _WIDTH, _HEADS = 128, 256, 4
_SWEPT = (64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Initialisation(Measured):
    """Figures: variance of q where the input has variance 1, and of the scaled logits, by initialisation; T5's."""

    packed_variance: Figure
    linear_variance: Figure
    xavier_variance: Figure
    he_variance: Figure
    packed_logit: Figure
    linear_logit: Figure
    he_logit: Figure
    t5_query: Figure
    t5_logit: Figure


def measure(seed: int) -> Initialisation:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 16)
    names = ("packed", "linear", "xavier", "he")
    points = averaged(samples, {name: f"{name}_at_{{}}" for name in names}, _SWEPT)
    forms = {f"{name}_variance": ".3f" for name in names} | {f"{name}_logit": ".3f" for name in ("packed", "linear", "he", "t5")}
    return Initialisation(points=points, **estimates(samples, **forms, t5_query=".4f"))


def _once(_seed: int) -> dict[str, float]:
    found = {}
    for width in _SWEPT:
        x = torch.randn(_TOKENS, width)
        for name, weights in _weights(width).items():
            found[f"{name}_at_{width}"] = (x @ weights[0].mT).var().item()
            if width == _WIDTH:
                found[f"{name}_variance"] = found[f"{name}_at_{width}"]
                found[f"{name}_logit"] = _spread(x, *weights, scale=None)
    head = _WIDTH // _HEADS
    x = torch.randn(_TOKENS, _WIDTH)
    t5 = torch.randn(_WIDTH, _WIDTH) * (_WIDTH * head) ** -0.5, torch.randn(_WIDTH, _WIDTH) * _WIDTH**-0.5
    found["t5_query"] = (x @ t5[0].mT).var().item()
    found["t5_logit"] = _spread(x, *t5, scale=1.0)
    return found


def _weights(width: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """W_q and W_k as torch makes them."""
    with torch.no_grad():
        packed = nn.MultiheadAttention(width, _HEADS).in_proj_weight
        assert packed is not None
        pair = torch.empty(2, width, width)
        made = {"packed": (packed[:width], packed[width : 2 * width])}
        made["linear"] = nn.Linear(width, width).weight, nn.Linear(width, width).weight
        made["xavier"] = nn.init.xavier_uniform_(pair[0].clone()), nn.init.xavier_uniform_(pair[1].clone())
        made["he"] = nn.init.kaiming_normal_(pair[0].clone()), nn.init.kaiming_normal_(pair[1].clone())
    return made


def _spread(x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scale: float | None) -> float:
    """Standard deviation of the logits of all heads."""
    q, k = ((x @ weight.mT).unflatten(-1, (_HEADS, -1)).transpose(0, 1).detach() for weight in (query, key))
    rows = row_stats(q, k, scale=scale)
    return (rows.var + rows.mean.square()).mean().sqrt().item()
