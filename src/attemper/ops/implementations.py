"""The kernels by name, and which of them can run here."""

from dataclasses import dataclass
from typing import Protocol

from attemper.errors import ArgumentError, UnsupportedError
from attemper.kernels import blocked, cpu, reference
from attemper.kernels.spec import Forward, Gradients, Inputs, Needs, Rules, Upstream


class Kernel(Protocol):
    """What an implementation offers."""

    def forward(self, inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
        """The output and the record; see `Forward`. What is not differentiable need not be saved for a backward pass."""
        ...

    def backward(self, inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
        """The gradients that `needs` asks for."""
        ...


@dataclass(frozen=True)
class Implementation:
    """One kernel: whether it is here, and what it is, in a few words."""

    name: str
    kernel: Kernel | None
    description: str


IMPLEMENTATIONS = (
    Implementation("reference", reference, "the definition, materialised; O(N²) memory; the oracle of the tests"),
    Implementation("blocked", blocked, "pure PyTorch, O(N·d) memory, any device"),
    Implementation("cpu", cpu if cpu.available() else None, cpu.describe()),
    Implementation("triton", None, "Triton, for GPUs; not part of this version"),
)


def choose(impl: str, inputs: Inputs) -> Kernel:
    """The kernel of that name; "auto" is the fastest that is here and takes these tensors.

    Raises:
        ArgumentError: no such name. UnsupportedError: the kernel is not here, or does not take these tensors.
    """
    if impl == "auto":
        return cpu if cpu.available() and not cpu.refusal(inputs) else blocked
    known = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
    if impl not in known:
        raise ArgumentError("impl", repr(impl), f"one of 'auto', {', '.join(map(repr, known))}")
    kernel = known[impl].kernel
    if kernel is None:
        here = ", ".join(repr(name) for name, found in known.items() if found.kernel is not None)
        raise UnsupportedError(f"impl: {impl!r} is not available ({known[impl].description}); available here: {here}")
    if kernel is cpu and (reason := cpu.refusal(inputs)):
        raise UnsupportedError(f"impl: 'cpu' does not take {reason}; 'blocked' does")
    return kernel
