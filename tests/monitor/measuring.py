"""The largest |scale·q·k| of each head, from the calls that capture sees: what a watch should find."""

import math

import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture


def scaled_maxima(call: AttentionCall) -> Tensor:
    """float64 [heads]: the largest |scale·product| of one call, of queries that are no padding."""
    stats, mask = call.row_stats(), call.query_mask()
    seen = (stats.count > 0) if mask is None else (stats.count > 0) & mask.unsqueeze(-2)
    scale = torch.as_tensor(call.scale, dtype=torch.float64)
    rows = stats.product_absmax().double()
    scaled = torch.where(seen, rows * (scale.unsqueeze(-1) if scale.ndim == 1 else scale).abs(), -math.inf)
    return scaled.movedim(-2, 0).flatten(1).amax(1).cpu()


def measured(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Maxima of one forward pass, of each module over all its calls."""
    found: dict[str, Tensor] = {}

    def see(call: AttentionCall) -> None:
        largest = scaled_maxima(call)
        found[call.module] = torch.maximum(largest, found.get(call.module, largest))

    with torch.no_grad(), capture(model, see):
        model(**inputs)
    return found
