"""A stand-in for a watch: the largest |scale·q·k| of each head, from the calls that capture sees."""

import contextlib
import math
from collections.abc import Generator

import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture


class Measured:
    """Maxima over all calls since they were last asked for, as `Watch.maxima` gives them."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def maxima(self) -> dict[str, Tensor]:
        found, self.found = self.found, {}
        return found

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Generator[None]:
        with capture(model, self.see):
            yield

    def see(self, call: AttentionCall) -> None:
        largest = scaled_maxima(call)
        before = self.found.get(call.module)
        self.found[call.module] = largest if before is None else torch.maximum(before, largest)


def scaled_maxima(call: AttentionCall) -> Tensor:
    """float64 [heads]: the largest |scale·product| of one call."""
    stats = call.row_stats()
    scale = torch.as_tensor(call.scale, dtype=torch.float64)
    rows = stats.product_absmax().double()
    scaled = torch.where(stats.count > 0, rows * (scale.unsqueeze(-1) if scale.ndim == 1 else scale).abs(), -math.inf)
    return scaled.movedim(-2, 0).flatten(1).amax(1).cpu()


def measured(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Maxima of one forward pass."""
    watch = Measured()
    with torch.no_grad(), watch.watching(model):
        model(**inputs)
    return watch.maxima()
