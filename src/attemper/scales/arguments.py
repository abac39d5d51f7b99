"""The checks that constructors of rules share: each returns what it was given, or raises and names the argument."""

import math

from torch import nn

from attemper.errors import ArgumentError
from attemper.scales.base import Scale


def finite(argument: str, given: float) -> float:
    """A finite number."""
    if not _is_number(given) or not math.isfinite(given):
        raise ArgumentError(argument, repr(given), "a finite number")
    return given


def positive(argument: str, given: float) -> float:
    """A finite number above 0."""
    if not _is_number(given) or not math.isfinite(given) or given <= 0:
        raise ArgumentError(argument, repr(given), "a finite number above 0")
    return given


def whole(argument: str, given: int, lowest: int) -> int:
    """A whole number from `lowest` on."""
    if not isinstance(given, int) or isinstance(given, bool) or given < lowest:
        raise ArgumentError(argument, repr(given), f"a whole number from {lowest} on")
    return given


def flag(argument: str, given: bool) -> bool:
    """True or False."""
    if not isinstance(given, bool):
        raise ArgumentError(argument, repr(given), "True or False")
    return given


def fixed(argument: str, given: Scale) -> Scale:
    """A rule without parameters: a frozen dataclass around a module would hide its parameters from the model."""
    if not isinstance(given, Scale):
        raise ArgumentError(argument, repr(given), "a rule of attemper.scales, such as InverseSqrt()")
    if isinstance(given, nn.Module):
        expected = "a rule without parameters; nest them the other way round: the learned rule takes the fixed one as its base"
        raise ArgumentError(argument, type(given).__name__, expected)
    return given


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)
