"""Finds the first NaN or infinity of a forward pass by looking at what goes in and out of modules, and the largest activation.

What it must hold: events are kept in the order in which they happen, as tensors without dimension; nothing is read back before
the pass ends; a value that arises between two submodules (a residual sum) is laid to the module whose code runs there; what a
module merely passes on is not laid to it.
"""

import contextlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checker.evidence import NonFinite
from attemper.checker.streaming import values


@dataclass(frozen=True)
class _Event:
    module: str
    receiver: str  # the submodule that a value was on its way to, "" for a module's own output
    low: Tensor
    high: Tensor


@dataclass
class Activations:
    """What was seen; to be read after the forward pass."""

    events: list[_Event] = field(default_factory=list)

    def first_nonfinite(self, model: nn.Module) -> NonFinite | None:
        """The first NaN or infinity, or None."""
        largest = 0.0
        for event in self.events:
            low, high = float(event.low), float(event.high)
            if math.isfinite(low) and math.isfinite(high):
                largest = max(largest, -low, high)
                continue
            kind = "NaN" if math.isnan(low) or math.isnan(high) else "infinity"
            return NonFinite(event.module, event.receiver, kind, _bad_parameter(model, event), largest)
        return None

    def largest(self) -> tuple[str, float]:
        """(module, magnitude) of the first activation beyond float16's range, or of the largest; ("", 0.0) without any."""
        best = ("", 0.0)
        for event in self.events:
            magnitude = max(-float(event.low), float(event.high))
            if math.isfinite(magnitude) and magnitude > best[1]:
                best = (event.module, magnitude)
                if magnitude > torch.finfo(torch.float16).max:
                    return best
        return best


@contextlib.contextmanager
def watch_activations(model: nn.Module, *, inside_fused: bool) -> Generator[Activations]:
    """Look at the first floating-point tensor that goes into and comes out of each module.

    Args:
        inside_fused: also look at `nn.TransformerEncoderLayer` and what is in it; a hook there turns PyTorch's fast path off.
    """
    seen = Activations()
    stack: list[str] = []
    last: list[Tensor] = []

    def note(module: str, receiver: str, value: Tensor | None) -> None:
        if value is None or value.numel() == 0:
            return
        if last and _same(value, last[0]):  # handed on
            return
        last[:] = [value]  # kept, so that its memory is not another tensor's yet
        low, high = torch.aminmax(value.detach())
        seen.events.append(_Event(module, receiver, low, high))

    def hooks(name: str) -> tuple[Any, Any]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if stack:
                named = {key: value for key, value in kwargs.items() if "mask" not in key and "bias" not in key}
                note(stack[-1], name, _first_tensor(args) if args else _first_tensor(named))
            stack.append(name)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if stack and stack[-1] == name:
                stack.pop()
            note(name, "", _first_tensor(output))

        return before, after

    handles = []
    fused = [
        name for name, module in model.named_modules() if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention))
    ]
    for name, module in model.named_modules():
        if not inside_fused and any(name == outer or name.startswith(outer + ".") or outer == "" for outer in fused):
            continue
        before, after = hooks(name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, always_call=False))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a._version == b._version and a.shape == b.shape)


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.dim() > 1 else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    for part in parts:
        found = _first_tensor(part)
        if found is not None:
            return found
    return None


def _bad_parameter(model: nn.Module, event: _Event) -> str:
    # On its way to a submodule a value can only have met the module's own parameters.
    for name, parameter in model.get_submodule(event.module).named_parameters(recurse=not event.receiver):
        if parameter.is_floating_point() and not bool(torch.isfinite(values(parameter)).all()):
            return f"{event.module}.{name}" if event.module else name
    return ""
