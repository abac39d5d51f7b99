"""The kernels by name, and which of them can run here."""

from dataclasses import dataclass
from typing import Protocol

from attemper.errors import ArgumentError, UnsupportedError
from attemper.kernels import blocked, cpu, reference, triton_problem
from attemper.kernels.spec import Forward, Gradients, Inputs, Needs, Rules, Upstream


class Kernel(Protocol):
    """What an implementation offers.

    Attributes:
        FIGURES: how many figures of a row it keeps for its backward pass, see `Forward`.
        LIKE_INPUTS: whether output and gradients are laid out as `kernels.layout` has it; else they are contiguous.
    """

    FIGURES: int
    LIKE_INPUTS: bool

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


class _Triton:
    """The Triton kernels, which are loaded, and Triton with them, by the first call."""

    FIGURES = triton_problem.FIGURES
    LIKE_INPUTS = False

    def forward(self, inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
        from attemper.kernels import triton_forward

        return triton_forward.forward(inputs, rules, statistics=statistics, differentiable=differentiable)

    def backward(self, inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
        from attemper.kernels import triton_backward

        return triton_backward.backward(inputs, rules, result, upstream, needs)


IMPLEMENTATIONS = (
    Implementation("reference", reference, "the definition, materialised; O(N²) memory; the oracle of the tests"),
    Implementation("blocked", blocked, "pure PyTorch, O(N·d) memory, any device"),
    Implementation("cpu", cpu if cpu.available() else None, cpu.describe()),
    Implementation("triton", _Triton() if triton_problem.available() else None, triton_problem.describe()),
)

KERNELS: dict[str, Kernel] = {each.name: each.kernel for each in IMPLEMENTATIONS if each.kernel is not None}


def choose(impl: str, inputs: Inputs, *, seen: bool) -> str:
    """The name of a kernel that is here and takes these tensors: the one asked for, or for "auto" the fastest.

    Args:
        seen: whether the kernel will get these very tensors. Otherwise they stand for others, on the same device.

    Raises:
        ArgumentError: no such name. UnsupportedError: the kernel is not here, or does not take these tensors, or is the fastest
            and the environment asks for a build of it that is not here.
    """
    if impl == "auto":
        if cpu.MISCHOSEN and not _refusal("cpu", inputs, seen):
            _refuse("cpu")
        if inputs.query.device.type == "cuda":
            return "triton" if "triton" in KERNELS and not _refusal("triton", inputs, seen) else "blocked"
        return "cpu" if cpu.available() and not _refusal("cpu", inputs, seen) else "blocked"
    check_name(impl)
    if impl in ("cpu", "triton") and (reason := _refusal(impl, inputs, seen)):
        raise UnsupportedError(f"impl: {impl!r} does not take {reason}; 'blocked' does")
    return impl


def _refusal(impl: str, inputs: Inputs, seen: bool) -> str:
    """What a compiled kernel does not take of these tensors, "" if it takes them all."""
    if impl == "triton":
        return triton_problem.refusal(inputs, seen=seen)
    if seen:
        return cpu.refusal(inputs)
    device = inputs.query.device  # on which all of them are
    return "" if device.type in ("cpu", "meta") else f"a tensor on {device}"


def check_name(impl: str) -> None:
    """Refuse what is neither "auto" nor the name of a kernel that is here."""
    if impl != "auto" and impl not in KERNELS:
        _refuse(impl)


def _refuse(impl: str) -> None:
    described = {implementation.name: implementation.description for implementation in IMPLEMENTATIONS}
    if impl not in described:
        raise ArgumentError("impl", repr(impl), f"one of 'auto', {', '.join(map(repr, described))}")
    here = ", ".join(map(repr, KERNELS))
    raise UnsupportedError(f"impl: {impl!r} is not available ({described[impl]}); available here: {here}")
