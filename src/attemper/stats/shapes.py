"""Shapes: the one question about them that several layers ask."""

from collections.abc import Sequence


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of this shape expands to `target`: aligned from the right, each dimension equal or 1."""
    aligned = list(target)[len(target) - len(shape) :]
    # Not `own in (1, wanted)`: when compiled, a parameter's size is a number and an input's a symbol, which `in` keeps apart.
    return len(shape) <= len(target) and all(own == 1 or own == wanted for own, wanted in zip(shape, aligned, strict=True))
