"""What the caller means by a model and by the names of layers in it."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from attemper.errors import ArgumentError


def innermost(model: nn.Module) -> nn.Module:
    """The module inside the wrappers that torch puts around a model."""
    inside = getattr(model, "module" if isinstance(model, nn.parallel.DistributedDataParallel) else "_orig_mod", None)
    return innermost(inside) if isinstance(inside, nn.Module) else model


def matching(model: nn.Module, layers: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Patterns of module names, each of which fits some module of the model.

    Raises:
        ArgumentError: one does not.
    """
    if layers is None:
        return None
    patterns = (layers,) if isinstance(layers, str) else tuple(layers)
    if not patterns:
        raise ArgumentError("layers", repr(layers), "patterns of names of modules, or None for all")
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            attending = [name for name in names if "att" in name.rpartition(".")[2].lower()][:4]
            expected = f"patterns of names of modules, such as {', '.join(map(repr, attending or names[1:4]))}"
            raise ArgumentError("layers", repr(pattern), expected)
    return patterns


def chosen(layer: str, patterns: Sequence[str] | None) -> bool:
    """Whether a layer is among those that `matching` gave the patterns of."""
    return patterns is None or any(fnmatchcase(layer, pattern) for pattern in patterns)
