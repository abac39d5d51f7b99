"""How far rounding alone moves a model: the run is repeated with every rounding drawn anew.

A bound for one product follows from its dtype (|s|·Σ|q||k| times the unit roundoff); how an error grows from layer to layer
depends on the weights, and a worst case would allow anything. So the model is run again with every tensor that enters or leaves
one of its modules moved by up to one unit roundoff of its own dtype (Monte Carlo arithmetic: Parker, "Monte Carlo arithmetic",
UCLA CSD-970002, 1997, here at modules instead of instructions). As in the error budget of attemper's kernels, twice what the
peer of the same precision shows is allowed, and the last rounding on top.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

DRAWS = 2
BUDGET = 2.0  # times the peer's own error


@contextlib.contextmanager
def rounded_anew(model: nn.Module, seed: int) -> Generator[None]:
    """While this runs, what enters and leaves each module is moved by up to one unit roundoff."""
    draw = torch.Generator().manual_seed(seed)

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _moved(value, draw) if value.is_floating_point() else value
        if type(value) in (tuple, list):
            return type(value)(map(moved, value))
        return {key: moved(each) for key, each in value.items()} if type(value) is dict else value

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return moved(args), moved(kwargs)

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return moved(output)

    handles = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _moved(value: Tensor, draw: torch.Generator) -> Tensor:
    info = torch.finfo(value.dtype)
    wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else torch.float64
    noise = 2 * torch.rand(value.shape, generator=draw, dtype=torch.float32).to(value.device, wide) - 1
    roundoff = info.eps if wide is value.dtype else info.eps / 2  # float64 has no wider type to add half a unit in
    moved = (value.to(wide) * (1 + roundoff * noise)).to(value.dtype)
    return torch.where(value.abs() < info.max / 4, moved, value)  # not the numbers that masks are made of
