"""Floating-point operations for torch's `FlopCounterMode`, counted as torch counts its own attention.

2·batch·heads·queries·keys·width for each product of matrices: two forward (d + d_v), five backward (3·d + 2·d_v: the logits once
more), one for statistics alone (d). Whatever is hidden is counted in full, by the causal rule too, and so is a gradient that
nobody wants; statistics beside an output are not counted.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attemper.ops.dispatch import flop_registries


def tell_flop_counters() -> None:
    """Give the flop counters at work the formulas of the operators, before one of these runs.

    Here and not by `register_flop_formula` on import: its module looks for Triton, which takes long to load where it is
    installed. A counter copies the registry when it is made, so the formulas go to the counter; one of the user's stays.
    """
    for registry in flop_registries():
        for name, formula in _FORMULAS.items():
            registry.setdefault(getattr(torch.ops.attemper, name), formula)


def _forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _pairs(query, key) * 2 * (query.shape[-1] + value.shape[-1])


def _backward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _pairs(query, key) * 2 * (3 * query.shape[-1] + 2 * value.shape[-1])


def _row_stats(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    return _pairs(query, key) * 2 * query.shape[-1]


def _pairs(query: Tensor, key: Tensor) -> int:
    return math.prod(query.shape[:-1]) * key.shape[-2]


_FORMULAS: dict[str, Callable[..., int]] = {"forward": _forward, "backward": _backward, "row_stats": _row_stats}
